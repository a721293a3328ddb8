"""Facts about rentable GPUs, each with its source, and `describe`: the Host that a text such as 8xh100 names.

Names are matched exactly after lower-casing. All rates are dense (without 2:4 sparsity) and, for tensor cores, with
FP32 accumulation; datasheets that print only the sparse figure are halved. An unknown product has no figures.
`memory_bytes` is the total that NVML reports with ECC as shipped, which is below the number on the box.
PCIe cards are taken without NVLink bridges.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

from upshift.errors import RequestError
from upshift.hardware.spec import Gpu, Host, Link, Precision, Rates
from upshift.units import GIGA, MIB, TERA
from upshift.value import Value

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


class GpuFacts(Value):
    gpu: Gpu
    source: str


# 10**12 per second in fp32, fp32_medium (TF32), bf16, fp16, fp8, int8.
Tera = tuple[float | None, float | None, float | None, float | None, float | None, float | None]
V100_SXM: Tera = (15.7, None, None, 125, None, None)
V100_PCIE: Tera = (14, None, None, 112, None, None)
A100_ALL: Tera = (19.5, 156, 312, 312, None, 624)
HOPPER_SXM: Tera = (67, 494.5, 989.5, 989.5, 1979, 1979)
# Links, and GB/s of all of them in one direction: half of what the datasheets print.
NO_NVLINK, NVLINK2, NVLINK3, NVLINK4, NVLINK5 = (0, None), (6, 150.0), (12, 300.0), (18, 450.0), (18, 900.0)

V100 = "NVIDIA V100 Tensor Core GPU datasheet (2020)"
A100 = "NVIDIA A100 Tensor Core GPU datasheet (2021)"
T4 = "NVIDIA T4 datasheet (2019); memory bandwidth: T4 product brief PB-09256-001"
A10 = "NVIDIA A10 Tensor Core GPU datasheet (2021)"
A10G = "NVIDIA A10G Tensor Core GPU datasheet for AWS G5 (2021)"
L4 = "NVIDIA L4 Tensor Core GPU datasheet (2023), sparse figures halved"
L40S = "NVIDIA L40S GPU datasheet (2023)"
AMPERE = "NVIDIA Ampere GA102 GPU architecture whitepaper V2, appendix A"
ADA = "NVIDIA Ada GPU architecture whitepaper v2, appendix A"
RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper (2025), appendix A"
H100 = "NVIDIA H100 Tensor Core GPU datasheet (2023), sparse figures halved"
H200 = "NVIDIA H200 Tensor Core GPU datasheet (2024), sparse figures halved"
B200 = "NVIDIA HGX platform page (2025), B200, per GPU, sparse figures halved"


def _row(
    key: str, name: str, source: str, tera: Tera, *, mib: int, gb_s: float, cc: tuple[int, int], pcie: int,
    nvlink: tuple[int, float | None] = NO_NVLINK,
) -> tuple[str, GpuFacts]:  # fmt: skip
    """`mib` and `gb_s` are of the memory, `cc` is the compute capability."""
    rates = [None if rate is None else rate * TERA for rate in tera]
    peak = Rates(**dict(zip(get_args(Precision), rates, strict=True)), memory_bytes_per_second=gb_s * GIGA)
    links, link_gb_s = nvlink
    gpu = Gpu(
        name=name,
        table_key=key,
        memory_bytes=mib * MIB,
        compute_capability=cc,
        pcie_generation=pcie,
        pcie_width=16,
        nvlink_links=links,
        nvlink_bytes_per_second=None if link_gb_s is None else link_gb_s * GIGA,
        peak=peak,
    )
    return key, GpuFacts(gpu=gpu, source=source)


# fmt: off
GPUS: dict[str, GpuFacts] = dict([
    _row("v100-16gb", "Tesla V100-SXM2-16GB", V100, V100_SXM, mib=16160, gb_s=900, cc=(7, 0), pcie=3, nvlink=NVLINK2),
    _row("v100-32gb", "Tesla V100-SXM2-32GB", V100, V100_SXM, mib=32510, gb_s=900, cc=(7, 0), pcie=3, nvlink=NVLINK2),
    _row("v100-pcie-16gb", "Tesla V100-PCIE-16GB", V100, V100_PCIE, mib=16160, gb_s=900, cc=(7, 0), pcie=3),
    _row("v100-pcie-32gb", "Tesla V100-PCIE-32GB", V100, V100_PCIE, mib=32510, gb_s=900, cc=(7, 0), pcie=3),
    _row("t4", "Tesla T4", T4, (8.1, None, None, 65, None, 130), mib=15360, gb_s=320, cc=(7, 5), pcie=3),
    _row("a10", "NVIDIA A10", A10, (31.2, 62.5, 125, 125, None, 250), mib=23028, gb_s=600, cc=(8, 6), pcie=4),
    _row("a10g", "NVIDIA A10G", A10G, (31.5, 35, 70, 70, None, 140), mib=22731, gb_s=600, cc=(8, 6), pcie=4),
    _row("a100-40gb", "NVIDIA A100-SXM4-40GB", A100, A100_ALL, mib=40960, gb_s=1555, cc=(8, 0), pcie=4, nvlink=NVLINK3),
    _row("a100-80gb", "NVIDIA A100-SXM4-80GB", A100, A100_ALL, mib=81920, gb_s=2039, cc=(8, 0), pcie=4, nvlink=NVLINK3),
    _row("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB", A100, A100_ALL, mib=40960, gb_s=1555, cc=(8, 0), pcie=4),
    _row("a100-pcie-80gb", "NVIDIA A100 80GB PCIe", A100, A100_ALL, mib=81920, gb_s=1935, cc=(8, 0), pcie=4),
    _row("l4", "NVIDIA L4", L4, (30.3, 60, 121, 121, 242.5, 242.5), mib=23034, gb_s=300, cc=(8, 9), pcie=4),
    _row("l40s", "NVIDIA L40S", L40S, (91.6, 183, 362.05, 362.05, 733, 733), mib=46068, gb_s=864, cc=(8, 9), pcie=4),
    _row("rtx-3090", "NVIDIA GeForce RTX 3090", AMPERE, (35.6, 35.6, 71, 71, None, 284),
         mib=24576, gb_s=936, cc=(8, 6), pcie=4),
    _row("rtx-4090", "NVIDIA GeForce RTX 4090", ADA, (82.6, 82.6, 165.2, 165.2, 330.3, 660.6),
         mib=24564, gb_s=1008, cc=(8, 9), pcie=4),
    _row("rtx-5090", "NVIDIA GeForce RTX 5090", RTX_BLACKWELL, (104.8, 104.8, 209.5, 209.5, 419, 838),
         mib=32607, gb_s=1792, cc=(12, 0), pcie=5),
    _row("h100-sxm", "NVIDIA H100 80GB HBM3", H100, HOPPER_SXM,
         mib=81559, gb_s=3350, cc=(9, 0), pcie=5, nvlink=NVLINK4),
    _row("h100-pcie", "NVIDIA H100 PCIe", H100, (51, 378, 756.5, 756.5, 1513, 1513),
         mib=81559, gb_s=2000, cc=(9, 0), pcie=5),
    _row("h200", "NVIDIA H200", H200, HOPPER_SXM, mib=143771, gb_s=4800, cc=(9, 0), pcie=5, nvlink=NVLINK4),
    _row("b200", "NVIDIA B200", B200, (75, 1125, 2250, 2250, 4500, 4500),
         mib=183359, gb_s=8000, cc=(10, 0), pcie=5, nvlink=NVLINK5),
])
# fmt: on
ALIASES = {"h100": "h100-sxm"}
AMBIGUOUS = {
    "a100": ("a100-40gb", "a100-80gb", "a100-pcie-40gb", "a100-pcie-80gb"),
    "v100": ("v100-16gb", "v100-32gb", "v100-pcie-16gb", "v100-pcie-32gb"),
}
# Full product names as NVML reports them; drivers before 470 print some without the brand.
NVML_NAMES: dict[str, str] = {facts.gpu.name: key for key, facts in GPUS.items()} | {
    "A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-80GB": "a100-80gb",
    "A100-PCIE-40GB": "a100-pcie-40gb",
    "GeForce RTX 3090": "rtx-3090",
    "NVIDIA T4": "t4",
}

# Bytes/s of one lane in one direction after line coding: PCI Express base specification 3.0, 4.0 (128b/130b), 5.0.
PCIE_LANE_BYTES_PER_SECOND = {3: 0.985 * GIGA, 4: 1.969 * GIGA, 5: 3.938 * GIGA}

# COSTS.md D7: medians over AIConfigurator's measured tables (vLLM 0.14 and 0.24 GEMMs, bf16), as a share of the
# roofline with the dense peaks above. A class holds the matrix products from its bound in FLOP to the next one's.
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
MEMORY_EFFICIENCY = {"a100-40gb": 0.66, "a100-80gb": 0.66, "h100-sxm": 0.78, "h200": 0.72, "b200": 0.66, "l40s": 0.75}
# Likewise, NCCL 2.27 to 2.29 on 8 NVLinked GPUs: latency in microseconds, algorithm bandwidth in GB/s; 7 to 16 % error.
# Order: all-gather, reduce-scatter, all-reduce, all-to-all.
COLLECTIVES: dict[str, tuple[tuple[float, float], ...]] = {
    "a100-40gb": ((21, 201), (18, 207), (28, 111), (17, 201)),
    "a100-80gb": ((21, 201), (18, 207), (28, 111), (17, 201)),
    "h100-sxm": ((14, 340), (12, 347), (20, 218), (11, 319)),
    "h200": ((14, 345), (13, 351), (21, 226), (12, 325)),
    "b200": ((20, 627), (19, 626), (29, 339), (16, 579)),
}


def gemm_efficiency(gpu_key: str, flops_per_gemm: float) -> float | None:
    """Achieved share of the bf16 roofline for one matrix product of this size (FITTED_SOURCE); None: not measured."""
    classes = GEMM_EFFICIENCY.get(gpu_key)
    position = sum(flops_per_gemm >= bound for bound in GEMM_CLASSES) - 1
    return None if classes is None or position < 0 else classes[position]


def memory_efficiency(gpu_key: str) -> float | None:
    """Achieved share of bandwidth of memory-bound operations above 50 MB (FITTED_SOURCE); None: not measured."""
    return MEMORY_EFFICIENCY.get(gpu_key)


def collective(gpu_key: str, operation: Collective) -> Link | None:
    """Latency and algorithm bandwidth of NCCL over 8 GPUs of one node (FITTED_SOURCE); None: not measured."""
    fits = COLLECTIVES.get(gpu_key)
    if fits is None:
        return None
    microseconds, gb_s = fits[get_args(Collective).index(operation)]
    name = f"NCCL {operation}"
    return Link(name=name, latency_seconds=microseconds / 1e6, bytes_per_second=gb_s * GIGA, measured=True)


def pcie_link(gpu: Gpu) -> Link | None:
    """The PCIe connection of a GPU at its specified rate, an upper bound."""
    lane = PCIE_LANE_BYTES_PER_SECOND.get(gpu.pcie_generation or 0)
    if lane is None or gpu.pcie_width is None:
        return None
    return Link(name=f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}", bytes_per_second=lane * gpu.pcie_width)


def gpu_link(gpu: Gpu) -> Link | None:
    """The connection between GPUs of one node at its specified rate: NVLink where there is one, else PCIe."""
    if gpu.nvlink_bytes_per_second is not None:
        return Link(name=f"NVLink x{gpu.nvlink_links}", bytes_per_second=gpu.nvlink_bytes_per_second)
    return pcie_link(gpu) if gpu.nvlink_links == 0 else None


def find(name: str) -> GpuFacts:
    """The row of a GPU name. Raises RequestError for an ambiguous or unknown name."""
    key = ALIASES.get(name, name)
    if key in GPUS:
        return GPUS[key]
    if key in AMBIGUOUS:
        raise RequestError(f"GPU {name!r} is sold in several kinds; use one of {', '.join(AMBIGUOUS[key])}")
    valid = ", ".join(sorted([*GPUS, *ALIASES]))
    raise RequestError(f"unknown GPU {name[:60]!r}; use one of {valid}, or the path of a Host JSON file")


def describe(text: str) -> Host:
    """The Host that `text` names: h100, 8xh100, 2x8xa100-80gb (nodes x GPUs x name), or the path of a Host JSON file.

    The links between nodes are unknown (None): write them into the JSON file. Raises RequestError.
    """
    stripped = text.strip()
    if stripped.lower().endswith(".json"):
        try:
            return Host.from_file(Path(stripped))
        except ValueError:  # a NUL or a lone surrogate is no path
            raise RequestError(f"{stripped[:60]!r} is not a path; give the path of a Host JSON file") from None
    name = stripped.lower()
    match = re.fullmatch(r"(?:([0-9]{1,6})x)?(?:([0-9]{1,6})x)?([a-z].*)", name)
    if match is None:
        forms = "h100, 8xh100, 2x8xh100 or the path of a Host JSON file"
        raise RequestError(f"host {text[:60]!r} is not understood; write {forms}")
    first, second, gpu_name = match.groups()
    nodes, per_node = (int(first), int(second)) if second else (1, int(first or 1))
    if nodes == 0 or per_node == 0:
        raise RequestError(f"host {text[:60]!r} counts 0 nodes or GPUs; use 1 or more, such as 8xh100")
    facts = find(gpu_name)
    source = f"table: {facts.source}"
    return Host(
        name=name,
        num_nodes=nodes,
        gpus_per_node=per_node,
        gpu=facts.gpu,
        intra_node=gpu_link(facts.gpu) if per_node > 1 else None,
        host_to_device=pcie_link(facts.gpu),
        origin={
            "num_nodes": "described",
            "gpus_per_node": "described",
            "gpu": source,
            "gpu.memory_bytes": "table: total reported by NVML for this product",
            "intra_node": source,
            "host_to_device": "PCI Express base specification",
        },
    )
