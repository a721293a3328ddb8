"""The clock that trials and benchmarks share: device-synchronised, warm-up apart, medians and quantiles out."""

from __future__ import annotations

import time
from collections.abc import Callable

from upshift.record import Spread


def synchronise(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def time_once(work: Callable[[], object], *, device: str = "cpu") -> float:
    """Seconds of one call."""
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def time_repeated(
    work: Callable[[], object], *, seconds: float, minimum: int = 3, maximum: int = 100, num_warmup: int = 1, device: str = "cpu"
) -> Spread:
    """Seconds per call: at least ``minimum`` samples, more while the budget lasts."""
    for _ in range(num_warmup):
        time_once(work, device=device)
    samples: list[float] = []
    while len(samples) < maximum and (len(samples) < minimum or sum(samples) < seconds):
        samples.append(time_once(work, device=device))
    return Spread.of(samples, num_warmup=num_warmup)
