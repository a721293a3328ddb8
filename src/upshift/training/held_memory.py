"""Measure the memory that a process of a plan holds, on the host for a CPU and on the device for a GPU, and control it.

glibc returns freed blocks over 32 MiB to the kernel at once, and the next step has to fault every page in again. Keeping these
blocks saves that time (measured here: 5 to 15 % of a training step on CPU), but fragmentation then holds some memory back.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import platform
import resource
from collections.abc import Callable, Iterator

import psutil

from upshift.benchmarking.meters import reset_resident_peak, resident_bytes, resident_peak_bytes
from upshift.hardware.host_memory import free_memory_bytes
from upshift.planning.cost.process_memory import outside_allocator
from upshift.planning.plan import Plan

# Options of mallopt, from malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4
TOP_PAD_BYTES = 64 * 2**20
RETURN_STEPS = 16  # memory that comes back in fewer steps is needed
RAISED_LIMIT = 1.1  # times what the process holds then
USABLE_SHARE = 0.95  # of the memory free at the start; an allocation beyond it fails, before the system kills the process


def held_bytes(plan: Plan) -> int:
    """Return the bytes that this process holds now.

    On a GPU these are the bytes that torch's allocator has reserved, and those that are predicted to lie outside of it. The
    device's own count includes other processes.
    """
    if plan.device == "cuda":
        import torch

        return torch.cuda.memory_reserved() + round(outside_allocator(plan))
    return resident_bytes()


def held_peak_bytes(plan: Plan) -> int:
    """Return the most bytes that this process has held since ``reset_held_peak``."""
    if plan.device == "cuda":
        import torch

        return torch.cuda.max_memory_reserved() + round(outside_allocator(plan))
    return resident_peak_bytes()


def reset_held_peak(plan: Plan) -> None:
    """Start to measure the peak of the held memory again."""
    if plan.device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        reset_resident_peak()


def keep_freed_memory() -> None:
    """Make the C allocator keep freed memory until the process ends: no separate mappings, and no trimming of the heap."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, TOP_PAD_BYTES)):
        if libc.mallopt(option, value) != 1:
            raise OSError(f"mallopt({option}, {value}) was refused by the C library")


def trim_heap() -> None:
    """Return the free pages of the heap to the kernel once, also if freed memory is kept. Only glibc can do this."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(ctypes.util.find_library("c")).malloc_trim(0)


class HeldMemory:
    """Give the holes of the heap back to the system when a process holds much more than was predicted.

    Blocks whose sizes change from step to step leave free holes in the heap, which still take memory. Giving them back costs page
    faults in the next steps: on two cores, training with texts of mixed lengths was 15 % slower when it happened every few steps.
    So it happens once the process holds more than ``limit_bytes``. If it soon does so again, the steps need that memory, and the
    limit goes up.
    """

    def __init__(self, limit_bytes: float | None, *, give_back: Callable[[], None] = trim_heap) -> None:
        self.limit_bytes = limit_bytes if platform.libc_ver()[0] == "glibc" else None
        self._give_back = give_back
        self._steps_since = RETURN_STEPS  # memory was given back

    def after_step(self, resident_bytes: int) -> bool:
        """Give memory back if the process holds too much. Return whether it was done."""
        self._steps_since += 1
        if self.limit_bytes is None or resident_bytes <= self.limit_bytes:
            return False
        if self._steps_since <= RETURN_STEPS:
            self.limit_bytes = RAISED_LIMIT * resident_bytes
            return False
        self._give_back()
        self._steps_since = 0
        return True


@contextlib.contextmanager
def limited_memory(num_processes: int = 1) -> Iterator[None]:
    """Limit the memory of this process while open, so that running out raises an error before the system kills processes."""
    memory = psutil.Process().memory_info()
    used = getattr(memory, "data", memory.rss)  # RLIMIT_DATA counts mapped memory, touched or not
    limit = int(used + free_memory_bytes() * USABLE_SHARE / num_processes)
    previous_limits = resource.getrlimit(resource.RLIMIT_DATA)
    hard_limit = previous_limits[1]
    highest = hard_limit if hard_limit != resource.RLIM_INFINITY else limit
    resource.setrlimit(resource.RLIMIT_DATA, (min(limit, highest), hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, previous_limits)
