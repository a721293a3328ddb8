"""Measure the memory that a process of a plan holds: of the host on a CPU, of the device on a GPU."""

from __future__ import annotations

import torch

from upshift.benchmarking.meters import reset_resident_peak, resident_bytes, resident_peak_bytes
from upshift.planning.cost.resident import outside_allocator
from upshift.planning.plan import Plan


def held_bytes(plan: Plan) -> int:
    """Return the bytes that this process holds now.

    On a GPU these are what torch's allocator has reserved, and what is predicted to lie outside it. The device itself also counts
    what other processes hold."""
    if plan.device == "cuda":
        return torch.cuda.memory_reserved() + round(outside_allocator(plan))
    return resident_bytes()


def held_peak_bytes(plan: Plan) -> int:
    """Return the most bytes that this process has held since ``begin_held_peak``."""
    if plan.device == "cuda":
        return torch.cuda.max_memory_reserved() + round(outside_allocator(plan))
    return resident_peak_bytes()


def begin_held_peak(plan: Plan) -> None:
    if plan.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_resident_peak()
