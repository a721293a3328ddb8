"""Measure the memory that a process of a plan holds: of the host on a CPU, of the device on a GPU.

Control how the process's C allocator treats freed memory, and how much it may take.

glibc gives blocks over 32 MiB straight back to the kernel and faults every page in anew at the next step. Keeping them saves
that (measured here: 5 to 15 % of a training step on CPU) and costs what fragmentation holds back.
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
from upshift.planning.cost.process_memory import outside_allocator
from upshift.planning.plan import Plan


def held_bytes(plan: Plan) -> int:
    """Return the bytes that this process holds now.

    On a GPU these are what torch's allocator has reserved, and what is predicted to lie outside it. The device itself also counts
    what other processes hold."""
    if plan.device == "cuda":
        import torch

        return torch.cuda.memory_reserved() + round(outside_allocator(plan))
    return resident_bytes()


def held_peak_bytes(plan: Plan) -> int:
    """Return the most bytes that this process has held since ``begin_held_peak``."""
    if plan.device == "cuda":
        import torch

        return torch.cuda.max_memory_reserved() + round(outside_allocator(plan))
    return resident_peak_bytes()


def reset_held_peak(plan: Plan) -> None:
    if plan.device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        reset_resident_peak()


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h
TOP_PAD_BYTES = 64 * 2**20
LONGEST_WAIT_STEPS = 64
USABLE_SHARE = 0.95  # of what is free at the start; beyond it an allocation fails in the process, not in the system


def keep_freed_memory() -> None:
    """Stop mapping blocks one by one and trimming the heap, for the rest of the process's life."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, TOP_PAD_BYTES)):
        if libc.mallopt(option, value) != 1:
            raise OSError(f"mallopt({option}, {value}) was refused by the C library")


def trim_heap() -> None:
    """Return pages of the heap that hold nothing to the kernel once, also if freed memory is kept."""
    ctypes.CDLL(ctypes.util.find_library("c")).malloc_trim(0)


class HeldMemory:
    """A guard that keeps a process near the memory that was predicted for it.

    Blocks whose sizes change from step to step leave holes in the heap, which hold memory though nothing is in them. After a
    step that left the process above ``limit_bytes``, they go back to the system. Giving them back costs page faults in the
    next step, so it is done half as often each time it did not last until the next look.
    """

    def __init__(self, limit_bytes: float | None, *, give_back: Callable[[], None] = trim_heap) -> None:
        self.limit_bytes = limit_bytes if platform.libc_ver()[0] == "glibc" else None
        self._give_back = give_back
        self._wait = 1
        self._steps_left = 0

    def after_step(self, resident_bytes: int) -> bool:
        """Return whether memory was given back."""
        self._steps_left = max(self._steps_left - 1, 0)
        if self.limit_bytes is None or self._steps_left:
            return False
        if resident_bytes <= self.limit_bytes:
            self._wait = 1
            return False
        self._give_back()
        self._steps_left = self._wait
        self._wait = min(2 * self._wait, LONGEST_WAIT_STEPS)
        return True


@contextlib.contextmanager
def limited_memory(num_processes: int = 1) -> Iterator[None]:
    """Make the allocator refuse, while open, before the system starts to kill. Running out then becomes an error that can be
    handled."""
    memory = psutil.Process().memory_info()
    used = getattr(memory, "data", memory.rss)  # RLIMIT_DATA counts what is mapped, touched or not
    limit = int(used + psutil.virtual_memory().available * USABLE_SHARE / num_processes)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    highest = before[1] if before[1] != resource.RLIM_INFINITY else limit
    resource.setrlimit(resource.RLIMIT_DATA, (min(limit, highest), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
