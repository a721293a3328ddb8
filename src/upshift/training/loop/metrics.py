"""Measure a training run: the step times, the speed, and the memory of one early step."""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from upshift.benchmarking.meters import (
    AllocatedPeak,
    allocated_peak,
)
from upshift.benchmarking.timing import Moment, Timing, read_moment, timing_between
from upshift.planning.plan import Plan
from upshift.record import Spread
from upshift.training.batches.sampler import GlobalBatch
from upshift.training.held_memory import held_bytes, held_peak_bytes, reset_held_peak, trim_heap
from upshift.training.prepare import in_memory_bytes
from upshift.training.step import QueuedStep, TrainStep

NUM_WARMUP = 2  # first steps, which allocate, compile and tune
MAX_WATCHED_STEP = 64  # memory is measured in the one of these first steps that has the longest micro-batch
# On a CPU these steps after the watched one are slow: they fault in the pages that went back with the meter's memory.
RECOVERY_STEPS = 3
WINDOW_STEPS = 20


class StepMeter:
    """Measure the steps of this process, counted from its first one: a resumed run warms up again.

    ``longest_step`` is the number (from 1) of the step that has the longest micro-batch after the warm-up. The speed is that of
    the steps after the warm-up, without those that the measurement of memory slowed down.
    """

    def __init__(self, plan: Plan, *, planned_steps: int, longest_step: int = NUM_WARMUP + 1) -> None:
        self.plan = plan
        self.watched_step = min(longest_step, planned_steps)  # the step whose memory is measured
        self._planned_steps = planned_steps
        self.count = 0
        self.seconds = 0.0
        self.first_seconds: float | None = None
        self.steady: list[tuple[int, float]] = []  # tokens, seconds
        self.peak_bytes: int | None = None
        self.waited_seconds = 0.0  # of the steady steps, in this process
        self.cpu_seconds = 0.0  # of the steady steps, in this process
        self._step_start = read_moment()
        self._num_queued = 0
        self._starts: deque[Moment] = deque()  # of the steps that are queued and not done
        self._last_end: Moment | None = None
        self._window: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS)
        self._held_peak = 0
        reset_held_peak(plan)

    def begin(self) -> None:
        """Read the clocks, before the batch of a step is made."""
        self._step_start = read_moment()

    def queue_step(self, train_step: TrainStep, batch: GlobalBatch) -> QueuedStep:
        """Queue a step. Call ``end_step`` once it is done."""
        is_watched = self._num_queued + 1 == self.watched_step
        queued = self._queue_watched_step(train_step, batch) if is_watched else train_step.queue(batch)
        self._num_queued += 1
        self._starts.append(self._step_start)
        return queued

    def end_step(self, tokens: int) -> None:
        """Count the oldest step that is queued, which is done now. A GPU begins a step when it has ended the one before."""
        end = read_moment()
        start = self._starts.popleft()
        if self._last_end is not None and self._last_end.seconds > start.seconds:
            start = self._last_end
        self._last_end = end
        self.add(tokens, timing_between(start, end))

    def add(self, tokens: int, timing: Timing) -> None:
        """Count a step that is done."""
        seconds = timing.seconds
        self.count += 1
        self.seconds += seconds
        if self.count == 1:
            self.first_seconds = seconds
        if self.count == 2 and self.watched_step != 2:
            self._window.clear()  # the first step compiles
        if self.count == 1 or self.count != self.watched_step:
            self._window.append((tokens, seconds))
        if self.count > NUM_WARMUP and not self._is_disturbed:
            self.waited_seconds += timing.waited
            self.cpu_seconds += timing.cpu_seconds
            self.steady.append((tokens, seconds))

    @property
    def _is_disturbed(self) -> bool:
        """Return whether the meter of memory slowed this step down. A short run needs every step after the watched one."""
        num_disturbed = 1
        if self.plan.device == "cpu" and self._planned_steps > 4 * RECOVERY_STEPS:
            num_disturbed += RECOVERY_STEPS
        return self.watched_step <= self.count < self.watched_step + num_disturbed

    @property
    def seconds_with_queued(self) -> float:
        """Return the seconds of the steps that are done, and of those that are queued, which will take as long as the last."""
        return self.seconds + len(self._starts) * self.recent_step_seconds

    def _queue_watched_step(self, train_step: TrainStep, batch: GlobalBatch) -> QueuedStep:
        """Queue a step and measure its peak memory. The meter keeps its events in memory, so it covers a part of the step."""
        self._held_peak = held_peak_bytes(self.plan)
        peaks: list[AllocatedPeak] = []

        @contextmanager
        def watch() -> Iterator[None]:
            resident = in_memory_bytes(train_step.model, train_step.optimizer)
            with allocated_peak(self.plan.device, resident_bytes=resident) as peak:
                peaks.append(peak)
                yield

        queued = train_step.queue(batch, watch=watch)
        self.peak_bytes = max(peak.bytes or 0 for peak in peaks) or None
        if self.plan.device == "cpu":
            if platform.libc_ver()[0] == "glibc":
                trim_heap()
            reset_held_peak(self.plan)  # the run itself does not need the meter's memory
        return queued

    @property
    def recent_tokens_per_second(self) -> float:
        """Return the speed over the last steps, in real tokens."""
        tokens = sum(tokens for tokens, _ in self._window)
        seconds = sum(seconds for _, seconds in self._window)
        return tokens / seconds if seconds else 0.0

    @property
    def recent_step_seconds(self) -> float:
        return sum(seconds for _, seconds in self._window) / max(len(self._window), 1)

    @property
    def step_ms(self) -> Spread | None:
        if not self.steady:
            return None
        return Spread.of([seconds * 1000 for _, seconds in self.steady], num_warmup=NUM_WARMUP + 1)

    @property
    def tokens_per_second(self) -> float | None:
        seconds = sum(seconds for _, seconds in self.steady)
        return sum(tokens for tokens, _ in self.steady) / seconds if seconds else None

    @property
    def waited_share(self) -> float:
        """Return the share of the steady steps' time spent waiting for a core that another program used."""
        seconds = sum(seconds for _, seconds in self.steady)
        return self.waited_seconds / seconds if seconds else 0.0

    @property
    def one_time_seconds(self) -> float | None:
        """Return the seconds that the first step took longer than the median one."""
        spread = self.step_ms
        if spread is None or self.first_seconds is None:
            return None
        return max(self.first_seconds - spread.p50 / 1000, 0.0)

    def exclude_save(self, *, begins: bool) -> None:
        """Leave the copies that a save makes out of the memory peak of the steps. Call it before and after a save."""
        if self.plan.device == "cpu":
            if begins:
                self._held_peak = self.held_peak()
            else:
                reset_held_peak(self.plan)

    def held_bytes(self) -> int:
        return held_bytes(self.plan)

    def held_peak(self) -> int:
        return max(self._held_peak, held_peak_bytes(self.plan))
