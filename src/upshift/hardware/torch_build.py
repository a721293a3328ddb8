"""Tell whether the installed torch can use this machine's GPUs. CUDA itself is not asked: no fork could use a GPU afterwards."""

from __future__ import annotations

from typing import Any

from upshift.errors import RequestError
from upshift.hardware.detect import find_nvml
from upshift.hardware.nvml import newest_cuda
from upshift.hardware.spec import Host
from upshift.versions import torch_cuda

# A driver serves all CUDA releases of its own major number, and older ones: CUDA Compatibility guide. The first driver of each.
DRIVERS = {12: "525", 13: "580"}


def check_gpus_are_used(host: Host) -> None:
    """Check a host that was found here. Raise RequestError if the installed torch cannot use its GPUs."""
    if host.device != "cuda":
        return
    built, is_known = torch_cuda()
    why = why_unused(built, is_known, _driver_cuda(find_nvml()))
    if why is not None:
        names = ", ".join(sorted({gpu.name for gpu in (host.gpu, *host.mixed_gpus) if gpu is not None}))
        raise RequestError(
            f"this machine has {names}, which the installed torch cannot use: {why}; or leave the GPU out: "
            "set CUDA_VISIBLE_DEVICES to nothing. upshift doctor tells more"
        )


def lacks_cuda(built: tuple[int, int] | None, is_known: bool) -> bool:
    """Return whether torch is built without CUDA. ``is_known``: what it is built for could be read."""
    return is_known and built is None


def needs_newer_driver(built: tuple[int, int], driver_cuda: tuple[int, int]) -> bool:
    """Return whether the driver serves only releases of CUDA before the one that torch is built for."""
    return driver_cuda[0] < built[0]


def _driver_cuda(nvml: Any) -> tuple[int, int] | None:
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return newest_cuda(nvml)
    finally:
        nvml.nvmlShutdown()


def why_unused(built: tuple[int, int] | None, is_known: bool, driver_cuda: tuple[int, int] | None) -> str | None:
    """Return why torch cannot use an NVIDIA GPU and what to do, or None if nothing speaks against it.

    Args:
        built: the CUDA that torch is built for; None: without CUDA, if ``is_known``.
        driver_cuda: the newest CUDA that the driver serves; None: unknown.
    """
    if lacks_cuda(built, is_known):
        return "it is built without CUDA; pip install torch from an index whose wheels have CUDA"
    if built is not None and driver_cuda is not None and needs_newer_driver(built, driver_cuda):
        newest = ".".join(map(str, driver_cuda))
        driver = f"a driver of {DRIVERS[built[0]]} or newer" if built[0] in DRIVERS else "a newer driver"
        return (
            f"it is built for CUDA {built[0]}.{built[1]}, and the driver serves up to {newest}; install {driver}, or a torch for "
            f"CUDA {driver_cuda[0]}"
        )
    return None
