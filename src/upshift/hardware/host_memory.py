"""Read how much memory the machine has, and how much of it this process may still take."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple

from upshift.hardware.cgroup import read_limits, read_text
from upshift.units import KIB


class HostMemory(NamedTuple):
    """The memory of the machine, in bytes, whatever the limits of this process are. `origin` says where both were read."""

    total_bytes: int
    available_bytes: int
    origin: str


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of the machine. `root`: the folder that contains proc."""
    lines = (line.split() for line in read_text(root / "proc/meminfo").splitlines())
    kib = {fields[0]: int(fields[1]) for fields in lines if len(fields) > 1 and fields[1].isdigit()}
    if "MemTotal:" in kib and "MemAvailable:" in kib:
        return HostMemory(kib["MemTotal:"] * KIB, kib["MemAvailable:"] * KIB, "/proc/meminfo")
    memory = importlib.import_module("psutil").virtual_memory()
    return HostMemory(int(memory.total), int(memory.available), "psutil")


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take: what is available on the machine, and within its control groups.

    A container sees all the memory of its machine, and the kernel ends it at the limit of its group.
    """
    available = read_host_memory(root).available_bytes
    limit = read_limits(root).free_memory_bytes
    return available if limit is None else min(available, limit)
