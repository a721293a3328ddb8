"""Check whether the installed torch can use this machine's GPUs, without initialising CUDA: forks could not use a GPU then."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from upshift.errors import MissingInternal, RequestError
from upshift.hardware.detect import find_nvml
from upshift.hardware.nvml import WRONG_CHOICE, newest_cuda
from upshift.hardware.spec import Host
from upshift.internals.torch_names import ARCHITECTURES
from upshift.versions import torch_cuda

# The first driver of each major CUDA release. A driver supports all releases of its own major number, and older ones (CUDA
# Compatibility guide).
DRIVERS = {12: "525", 13: "580"}


def check_torch_uses_gpus(host: Host) -> None:
    """Raise RequestError if the installed torch cannot use the GPUs of this machine, which ``host`` describes.

    Raise it too if CUDA_VISIBLE_DEVICES names none of them by mistake.
    """
    if host.origin.get("gpu", "").startswith(WRONG_CHOICE):
        raise RequestError(host.origin["gpu"])
    if host.device != "cuda":
        return
    built, is_known = torch_cuda()
    gpus = [gpu for gpu in (host.gpu, *host.mixed_gpus) if gpu is not None]
    reason = why_unused(built, is_known, _driver_cuda(find_nvml()))
    if reason is None and built is not None:
        architectures = _architectures()
        reasons = [why_no_kernels(gpu.compute_capability, architectures, built) for gpu in gpus]
        reason = next((text for text in reasons if text is not None), None)
    if reason is not None:
        names = ", ".join(sorted({gpu.name for gpu in gpus}))
        raise RequestError(
            f"this machine has {names}, which the installed torch cannot use: {reason}; or leave the GPU out: "
            "set CUDA_VISIBLE_DEVICES to nothing. upshift doctor tells more"
        )


def lacks_cuda(built: tuple[int, int] | None, is_known: bool) -> bool:
    """Return whether torch is built without CUDA. ``is_known``: whether its CUDA release could be read."""
    return is_known and built is None


def needs_newer_driver(built: tuple[int, int], driver_cuda: tuple[int, int]) -> bool:
    """Return whether the driver is too old for the CUDA release that torch is built for."""
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


def _architectures() -> tuple[str, ...]:
    """Return the architectures that torch has kernels for, such as sm_90 and compute_90; none if they cannot be read."""
    try:
        return tuple((ARCHITECTURES.get()() or "").split())
    except MissingInternal:
        return ()


def why_no_kernels(capability: tuple[int, int] | None, architectures: Sequence[str], built: tuple[int, int]) -> str | None:
    """Return why torch has no kernels for a GPU and what to do, or None if it has some or that is unknown.

    Code of sm_86 runs on capability 8.6 and later ones of 8, and the driver compiles code of compute_86 for all later ones (CUDA
    Programming Guide, "Compute Capabilities"). A letter at the end restricts code to one capability.
    """
    if capability is None or not architectures:
        return None
    newest = (0, 0)
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_([0-9]+)([0-9])([a-z]?)", name)
        if match is None:
            return None
        first = (int(match[2]), int(match[3]))
        newest = max(newest, first)
        if first == capability or (not match[4] and first <= capability and (match[1] == "compute" or first[0] == capability[0])):
            return None
    release = f"CUDA {built[0]}.{built[1]}"
    change = "a newer CUDA" if capability > newest else "an older CUDA, such as 12.6,"
    return (
        f"it is built for {release} and has kernels for {', '.join(architectures)}, and none for compute capability "
        f"{capability[0]}.{capability[1]}; install a torch that is built for {change} and has them"
    )


def why_unused(built: tuple[int, int] | None, is_known: bool, driver_cuda: tuple[int, int] | None) -> str | None:
    """Return why torch cannot use an NVIDIA GPU and what to do, or None if there is no known reason.

    Args:
        built: the CUDA release that torch is built for; None: without CUDA, if ``is_known``.
        is_known: whether the CUDA release could be read.
        driver_cuda: the newest CUDA release that the driver supports; None: unknown.
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
