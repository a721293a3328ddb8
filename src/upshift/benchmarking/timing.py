"""Time calls on CPU and GPU, and measure how much other programs used the machine meanwhile.

``LoadMeter`` measures how long threads waited for a core that another program had. Linux counts for each thread how long it was
ready to run and had no core (run_delay in /proc/PID/task/TID/schedstat; see Documentation/scheduler/sched-stats.rst of the
kernel). This is right in a container, too, where the load of the whole host means little. Two programs on the two threads of
one core slow each other down without waiting. For this case /proc/stat counts the work of other programs on this process's
processors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil


def synchronise(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def time_call(work: Callable[[], object], *, device: str = "cpu") -> float:
    """Return the seconds of one call."""
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def time_with_load(call: Callable[[], object]) -> dict[str, float]:
    """Return ``seconds`` of wall time, ``cpu_seconds`` of this process (all threads), and ``others``.

    ``others`` is the share of all cores' time that other processes, or other guests of the host, used."""
    busy_before = _busy_seconds()
    cpu_before = time.process_time()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - cpu_before
    busy_seconds = _busy_seconds() - busy_before
    others = max(busy_seconds - cpu_seconds, 0.0) / (seconds * (os.cpu_count() or 1))
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "others": others}


def _busy_seconds() -> float:
    """Return the busy seconds of all cores since the system started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


BUSY_SHARE = 0.05  # the machine is busy if the most delayed thread waited for more than this share of the time
BUSY_CORES = 0.25  # or if other programs used more than this many of the process's processors
LEAST_SHARE = 0.02  # share of a timing that never counts as waiting: the counters are read one after the other
LEAST_SECONDS = 0.2  # shorter timings ignore other programs: /proc/stat counts in ticks of 0.01 s
NANOSECONDS = 1e9
IDLE_FIELDS = (3, 4)  # idle and iowait, of a processor's line in /proc/stat (proc_stat(5))
COMPUTING_SHARE = 0.1  # a thread with this share of the busiest thread's time on cores computes; others only look on
GUEST_FIELDS = 8  # the fields from here on are counted in the first two already


class ThreadClock(NamedTuple):
    """The seconds that a thread has had a core, and those in which it was ready and had none."""

    ran: float
    waited: float


@dataclass(frozen=True)
class Moment:
    """The readings of all clocks at one time. None: the system does not have this counter."""

    seconds: float
    own_cpu_seconds: float
    threads: dict[int, ThreadClock] | None  # by the thread's number
    all_cpu_seconds: float | None  # CPU time that this process's processors have spent on any program


@dataclass(frozen=True)
class Timing:
    """The times of some work. ``waited``: the seconds in which its most delayed computing thread was ready and had no core."""

    seconds: float
    cpu_seconds: float
    waited: float = 0.0
    other_cores: float = 0.0  # cores that other programs used meanwhile

    @property
    def busy(self) -> bool:
        others_compute = self.other_cores > BUSY_CORES and self.seconds >= LEAST_SECONDS
        return others_compute or self.waited > BUSY_SHARE * self.seconds

    @property
    def calm_seconds(self) -> float:
        """Return the seconds that the work would have taken without waiting."""
        return max(self.seconds - self.waited, LEAST_SHARE * self.seconds)


def read_moment() -> Moment:
    return Moment(time.perf_counter(), time.process_time(), _read_threads(), _read_cpu_seconds())


class LoadMeter:
    """A meter that times work and measures the load by other programs meanwhile. Tests replace ``read``."""

    def __init__(self, read: Callable[[], Moment] = read_moment) -> None:
        self._read = read

    def time(self, work: Callable[[], object]) -> Timing:
        before = self._read()
        work()
        return timing_between(before, self._read())


def timing_between(before: Moment, after: Moment) -> Timing:
    seconds = after.seconds - before.seconds
    own_seconds = after.own_cpu_seconds - before.own_cpu_seconds
    other_cores = 0.0
    waited = _waited_between(before, after, seconds)
    if before.all_cpu_seconds is not None and after.all_cpu_seconds is not None and seconds > 0.0:
        other_cores = max(after.all_cpu_seconds - before.all_cpu_seconds - own_seconds, 0.0) / seconds
    return Timing(seconds, own_seconds, waited, other_cores)


def _waited_between(before: Moment, after: Moment, seconds: float) -> float:
    """Return the seconds that the most delayed computing thread waited for a core, and no more than leaves the busiest its time.

    A thread that only looks on, such as one that samples memory, may wait all the time beside other programs, and delays
    nothing. Without waiting the work takes at least as long as its busiest thread has a core."""
    if before.threads is None or after.threads is None:
        return 0.0
    none = ThreadClock(0.0, 0.0)
    changes = [
        ThreadClock(clock.ran - before.threads.get(thread, none).ran, clock.waited - before.threads.get(thread, none).waited)
        for thread, clock in after.threads.items()
    ]
    busiest = max((change.ran for change in changes), default=0.0)
    waited = max((change.waited for change in changes if change.ran >= COMPUTING_SHARE * busiest), default=0.0)
    return max(min(waited, seconds - busiest), 0.0)


def _read_threads() -> dict[int, ThreadClock] | None:
    threads: dict[int, ThreadClock] = {}
    try:
        for task in Path("/proc/self/task").iterdir():
            ran, waited, *_ = (int(text) / NANOSECONDS for text in (task / "schedstat").read_text().split())
            threads[int(task.name)] = ThreadClock(ran, waited)
    except (OSError, ValueError):  # no Linux, a kernel without these counters, or a thread that ended meanwhile
        return threads or None
    return threads


def _read_cpu_seconds() -> float | None:
    try:
        usable_cpus = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in usable_cpus:
                values = [int(field) for field in fields[:GUEST_FIELDS]]
                ticks += sum(value for number, value in enumerate(values) if number not in IDLE_FIELDS)
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):  # no Linux
        return None
