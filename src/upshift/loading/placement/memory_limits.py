"""Decide how much memory a placement may use on each device: the user's limit, else a share of the free memory."""

from __future__ import annotations

import re
from collections.abc import Mapping

from upshift.errors import RequestError
from upshift.hardware.spec import Cpu, Gpu, Host, stated_memory
from upshift.units import GIB, KIB, MIB, format_bytes

UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
USABLE_SHARE = 0.9  # of the free memory; other processes and the allocator's blocks take the rest


def read_size(size: str | int, *, option: str = "") -> int:
    """Return the bytes of a size such as 123, "8GiB" or "20GB". Raise RequestError for anything else.

    ``option``: what the message begins with, where the size is of the command line."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in UNITS:
        value = f"{option} {size!r}".strip()
        raise RequestError(f"{value} is no size of memory; give bytes, or a number with KiB, MiB, GiB, KB, MB or GB: 8GiB")
    return int(float(match[1]) * UNITS[match[2].lower()])


def read_device(device: str | int, host: Host) -> str:
    """Return "cpu", "disk", or a GPU as "cuda:0", for a device in device_map or max_memory.

    Raise RequestError if the host does not have it."""
    text = str(device).strip().lower()
    if text in ("cpu", "disk"):
        return text
    kind, _, number = text.rpartition(":")
    kind = kind or ("cuda" if host.device == "cpu" else host.device)
    if text == host.device != "cpu":
        kind = text
        number = "0"
    if number.isdigit() and int(number) < host.gpus_per_node and kind == host.device:
        return f"{kind}:{int(number)}"
    devices = ["cpu", "disk", *(str(number) for number in range(host.gpus_per_node))]
    raise RequestError(f"device {device!r} is not here; the devices are {', '.join(devices)}")


def memory_limits(host: Host, max_memory: Mapping[str | int, str | int] | None) -> dict[str, int]:
    """Return the limit of each device in bytes, fastest device first.

    A GPU that ``max_memory`` leaves out is not used. The CPU is always used, by default with its free memory, or with what the
    limits of the GPUs leave of it if they share it."""
    stated: dict[str, int] = {}
    for device, size in (max_memory or {}).items():
        name = read_device(device, host)
        if stated.setdefault(name, read_size(size)) != read_size(size):
            raise RequestError(f"max_memory gives {name} {format_bytes(stated[name])} and {size}; give it one of them")
    if "disk" in stated:
        raise RequestError("max_memory limits GPUs and the cpu; leave out the disk, which holds all other weights")
    free = _free_memory(host)
    limits: dict[str, int | None] = {}
    for device, free_bytes in free.items():
        if max_memory is None or device in stated or device == "cpu":
            limits[device] = stated.get(device, free_bytes)
    if any(gpu is not None and gpu.shares_host_memory for gpu in _gpus(host)) and "cpu" not in stated:
        gpu_bytes = sum(num_bytes or 0 for device, num_bytes in limits.items() if device != "cpu")
        limits["cpu"] = max(0, (free["cpu"] or 0) - gpu_bytes)
    unknown = next((device for device, num_bytes in limits.items() if num_bytes is None), None)
    if unknown is not None:
        raise RequestError(f"how much memory {unknown} of {host.name} has free is not known; say it with max_memory")
    return {device: num_bytes for device, num_bytes in limits.items() if num_bytes is not None}


def _free_memory(host: Host) -> dict[str, int | None]:
    free = {f"{host.device}:{number}": _usable_memory(gpu) for number, gpu in enumerate(_gpus(host))}
    return free | {"cpu": _usable_memory(host.cpu)}


def _gpus(host: Host) -> list[Gpu | None]:
    return [*host.mixed_gpus] or [host.gpu] * host.gpus_per_node


def _usable_memory(device: Gpu | Cpu | None) -> int | None:
    num_bytes = stated_memory(device)
    return None if num_bytes is None else int(USABLE_SHARE * num_bytes)


def read_max_memory(options: list[str] | None) -> dict[str | int, str | int] | None:
    """Return the limits from the command line's DEVICE=SIZE options. Raise RequestError for another form."""
    if not options:
        return None
    pairs = [option.partition("=") for option in options]
    invalid = next((option for option, (_, equals, size) in zip(options, pairs, strict=True) if not equals or not size), None)
    if invalid is not None:
        raise RequestError(f"--max-memory {invalid!r} is not DEVICE=SIZE; write cpu=8GiB, or 0=20GiB for the first GPU")
    limits: dict[str | int, str | int] = {}
    for device, _, size in pairs:
        num_bytes = read_size(size, option=f"--max-memory {device}:")
        if read_size(limits.setdefault(device, size)) != num_bytes:
            raise RequestError(f"--max-memory gives {device} {limits[device]} and {size}; give it one of them")
    return limits
