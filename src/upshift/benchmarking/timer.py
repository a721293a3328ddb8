"""Provide the clock that trials and benchmarks share: device-synchronised."""

from __future__ import annotations

import time
from collections.abc import Callable


def synchronise(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def time_once(work: Callable[[], object], *, device: str = "cpu") -> float:
    """Return the seconds of one call."""
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start
