"""Time a call, and measure how much of the machine other programs had meanwhile, so that a row tells how quiet it was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Return ``seconds`` of the wall, ``cpu_seconds`` of this process (all threads), and ``others``.

    ``others`` is the share of the cores' time that other processes, or other guests of the host, had."""
    busy, own, start = _busy_seconds(), time.process_time(), time.perf_counter()
    call()
    seconds, cpu_seconds, busy = time.perf_counter() - start, time.process_time() - own, _busy_seconds() - busy
    others = max(busy - cpu_seconds, 0.0) / (seconds * (os.cpu_count() or 1))
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "others": others}


def _busy_seconds() -> float:
    """Return the busy seconds of all cores since the system started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
