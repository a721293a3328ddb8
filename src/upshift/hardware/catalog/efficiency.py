"""List the share of its datasheet's peak that each product reaches, fitted to published measurements. None: not measured."""

from __future__ import annotations

from typing import Literal, get_args

from upshift.hardware.spec import Collective, Gpu, Link, Precision
from upshift.units import GIGA

# COSTS.md D7: medians over AIConfigurator's measured tables (vLLM 0.14 and 0.24 GEMMs, bf16), as a share of the
# roofline with the catalog's dense peaks. A class has the matrix products from its bound in FLOP to the next bound.
FITTED_SOURCE = "Upshift's fit of AIConfigurator's published kernel and NCCL tables (medians)"
GEMM_CLASSES = (1e9, 1e10, 1e11, 1e12, 1e13)
GEMM_EFFICIENCY: dict[str, tuple[float | None, ...]] = {
    "a100-40gb": (0.46, 0.67, 0.84, 0.93, None),
    "a100-80gb": (0.46, 0.67, 0.84, 0.93, None),
    "h100-sxm": (0.49, 0.72, 0.80, 0.80, 0.84),
    "h200": (0.46, 0.72, 0.79, 0.77, 0.80),
    "b200": (0.35, 0.61, 0.68, 0.70, 0.74),
    "l40s": (0.49, 0.58, 0.61, 0.65, 0.72),
}
# For GPUs that are in none of these tables, of products above 1e12 FLOP, as training has them. SemiAnalysis, "MI300X vs H100 vs
# H200 Benchmark Part 1: Training" (2024): 620 of 1,307 TFLOP/s in bf16.
LARGE_GEMM_EFFICIENCY = {"mi300x": 0.47}
# GPUs in none of these tables whose tensor cores accumulate at half of their rate reach nearly all of it with large products: a
# 3090 Ti 81 of 80 TFLOP/s in fp16, a 4090 159 to 167 of 165 (mli/transformers-benchmarks, README, issue 4), an L20 105 to 115 of
# 119.5 (DefTruth/CUDA-Learn-Notes, hgemm/README.md). Smaller ones by the sizes of a 5090, of 209.5 in bf16 (zzc0721/
# torch-performance-test-data#15): 94 at n = 1024, 174 at 2048, 184 at 4096 (fp16: 219) and 236 at 8192. No row of
# benchmarks/published is of an A10G or an L40.
HALVED = "tensor cores that accumulate in FP32 at half of their rate"
HALVED_GEMM_EFFICIENCY = (0.5, 0.83, 0.95, 0.95, None)
# Products in fp32 (51.6 of 82.6 on a 4090 and 24 of 35.6 on a 3090, issues 3 and 4 of the same) and in int8 are not halved.
HALVED_PRECISIONS: tuple[Precision, ...] = ("fp32_medium", "bf16", "fp16", "fp8")
# Attention of training: its kernels, and the share of the 16-bit peak that forward and backward pass reach together, by the major
# number of the compute capability. For causal attention of long texts with heads of 128 elements, counted as half of all scores.
# The backward pass has 2.5 times the work. FlashAttention 1 and 2 on an A100: Dao 2023 (arXiv 2307.08691): forward 30 to 50 % and
# 50 to 73 %, backward 25 to 35 % and up to 63 %. FlashAttention 2 and 3 and cuDNN on an H100: Shah et al. 2024 (arXiv 2407.08608,
# figures 5 and 6): 335, 616 and 539 TFLOP/s forward, 322, 561 and 516 backward. FlashAttention 1 on an H100 is to 2 as on an
# A100. cuDNN on a B200: forward 1605 / 1.3 TFLOP/s (together.ai/blog/flashattention-4), backward as on an H100.
AttentionKernel = Literal["flash_1", "flash_2", "flash_3", "cudnn"]
ATTENTION_EFFICIENCY: dict[tuple[AttentionKernel, int], float] = {
    ("flash_1", 8): 0.32,
    ("flash_1", 9): 0.19,
    ("flash_2", 8): 0.55,
    ("flash_2", 9): 0.32,
    ("flash_3", 9): 0.58,
    ("cudnn", 9): 0.52,
    ("cudnn", 10): 0.52,
}
ATTENTION_HALF_LENGTH = 300  # tokens at which all of these kernels reach half of it (the same figures of Shah et al.)
MEMORY_EFFICIENCY = {"a100-40gb": 0.66, "a100-80gb": 0.66, "h100-sxm": 0.78, "h200": 0.72, "b200": 0.69, "l40s": 0.75}
# From the same tables, NCCL 2.27 to 2.29 on 8 GPUs with NVLink: latency in microseconds and algorithm bandwidth in GB/s, with an
# error of 7 to 16 %. The order is all-gather, reduce-scatter, all-reduce, all-to-all.
COLLECTIVES: dict[str, tuple[tuple[float, float], ...]] = {
    "a100-40gb": ((21, 201), (18, 207), (28, 111), (17, 201)),
    "a100-80gb": ((21, 201), (18, 207), (28, 111), (17, 201)),
    "h100-sxm": ((14, 340), (12, 347), (20, 218), (11, 319)),
    "h200": ((14, 345), (13, 351), (21, 226), (12, 325)),
    "b200": ((20, 627), (19, 626), (29, 339), (16, 579)),
}


def efficiency_row(gpu: Gpu, precision: Precision) -> str:
    """Return the row of measured efficiencies that holds for a GPU's matrix products: the GPU's own, or HALVED.

    An empty text if there is none.
    """
    key = gpu.table_key or ""
    if key in GEMM_EFFICIENCY or not gpu.halves_tensor_cores:
        return key
    return HALVED if precision in HALVED_PRECISIONS else ""


def gemm_shares(row: str) -> tuple[float | None, ...]:
    """Return the share of the peak for each class of products. Empty: not measured by size."""
    return HALVED_GEMM_EFFICIENCY if row == HALVED else GEMM_EFFICIENCY.get(row, ())


def gemm_efficiency(row: str, flops_per_gemm: float) -> float | None:
    """Return the share of the bf16 roofline that a matrix product of this size reaches, or None if the GPU was not measured.

    ``row``: see ``efficiency_row``. If no product of this size was measured, the nearest measured size counts. Source:
    FITTED_SOURCE, HALVED_GEMM_EFFICIENCY or LARGE_GEMM_EFFICIENCY.
    """
    classes = gemm_shares(row)
    if not classes:
        return LARGE_GEMM_EFFICIENCY.get(row)
    measured = [(bound, share) for bound, share in zip(GEMM_CLASSES, classes, strict=True) if share is not None]
    below = [share for bound, share in measured if flops_per_gemm >= bound]
    return below[-1] if below else measured[0][1]


def attention_efficiency(kernel: AttentionKernel, capability: tuple[int, int], length: int) -> float | None:
    """Return the share of the 16-bit peak that attention of texts of this length reaches in training; None: not measured."""
    share = ATTENTION_EFFICIENCY.get((kernel, capability[0]))
    return None if share is None else share * length / (length + ATTENTION_HALF_LENGTH)


def memory_efficiency(gpu_key: str) -> float | None:
    """Return the share of the bandwidth that memory-bound operations above 50 MB reach (FITTED_SOURCE); None: not measured."""
    return MEMORY_EFFICIENCY.get(gpu_key)


def collective(gpu_key: str, operation: Collective) -> Link | None:
    """Return NCCL's latency and algorithm bandwidth over 8 GPUs of a node (FITTED_SOURCE), or None if not measured."""
    fits = COLLECTIVES.get(gpu_key)
    if fits is None:
        return None
    microseconds, gb_s = fits[get_args(Collective).index(operation)]
    name = f"NCCL {operation}"
    return Link(name=name, latency_seconds=microseconds / 1e6, bytes_per_second=gb_s * GIGA, measured=True)
