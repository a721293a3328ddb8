"""List the shares of their datasheets' peaks that products reach: fits of published measurements. None: not measured."""

from __future__ import annotations

from typing import get_args

from upshift.hardware.spec import Collective, Link
from upshift.units import GIGA

# COSTS.md D7: medians over AIConfigurator's measured tables (vLLM 0.14 and 0.24 GEMMs, bf16), as a share of the
# roofline with the dense peaks of the table. A class holds the matrix products from its bound in FLOP to the next one's.
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
    """Return the achieved share of the bf16 roofline for one matrix product (FITTED_SOURCE).

    The share is of the product's size, or of the nearest size that was measured. None for a GPU that was not measured.
    """
    classes = GEMM_EFFICIENCY.get(gpu_key)
    if classes is None:
        return None
    measured = [(bound, share) for bound, share in zip(GEMM_CLASSES, classes, strict=True) if share is not None]
    below = [share for bound, share in measured if flops_per_gemm >= bound]
    return below[-1] if below else measured[0][1]


def memory_efficiency(gpu_key: str) -> float | None:
    """Return the achieved share of bandwidth of memory-bound operations above 50 MB (FITTED_SOURCE); None: not measured."""
    return MEMORY_EFFICIENCY.get(gpu_key)


def collective(gpu_key: str, operation: Collective) -> Link | None:
    """Return latency and algorithm bandwidth of NCCL over 8 GPUs of one node (FITTED_SOURCE); None: not measured."""
    fits = COLLECTIVES.get(gpu_key)
    if fits is None:
        return None
    microseconds, gb_s = fits[get_args(Collective).index(operation)]
    name = f"NCCL {operation}"
    return Link(name=name, latency_seconds=microseconds / 1e6, bytes_per_second=gb_s * GIGA, measured=True)
