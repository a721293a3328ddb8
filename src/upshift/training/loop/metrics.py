"""Measure a training run: step times, speed, and the memory of one early step."""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from upshift.benchmarking.meters import (
    AllocatedPeak,
    allocated_peak,
)
from upshift.benchmarking.timing import between, read_moment
from upshift.planning.plan import Plan
from upshift.record import Spread
from upshift.training.batches.sampler import GlobalBatch
from upshift.training.held_memory import held_bytes, held_peak_bytes, reset_held_peak, trim_heap
from upshift.training.prepare import in_memory_bytes
from upshift.training.step import StepResult, TrainStep

NUM_WARMUP = 2  # steps that allocate, compile and tune
MAX_WATCHED_STEP = 16  # steps, or the first half of fewer, one of which is watched: the one with the longest micro-batch
WINDOW_STEPS = 20


class StepMeter:
    """A meter that counts from this process's first step: a resumed run warms up again.

    ``longest_step`` is the number, from 1, of the step after the warm-up that has the longest micro-batch.
    """

    def __init__(self, plan: Plan, *, planned_steps: int, longest_step: int = NUM_WARMUP + 1) -> None:
        self.plan = plan
        self.watched = min(longest_step, planned_steps)  # the step whose memory is watched
        self.count = 0
        self.seconds = 0.0
        self.first_seconds: float | None = None
        self.steady: list[tuple[int, float]] = []  # tokens, seconds
        self.peak_bytes: int | None = None
        self.waited_seconds, self.cpu_seconds = 0.0, 0.0  # of the steady steps, in this process
        self._before = read_moment()
        self._window: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS)
        self._held_peak = 0
        reset_held_peak(plan)

    def begin(self) -> None:
        """Read the clocks before a step's batch is made."""
        self._before = read_moment()

    def step(self, stepper: TrainStep, batch: GlobalBatch) -> StepResult:
        if self.count + 1 == self.watched:
            return self._watched_step(stepper, batch)
        return stepper.step(batch)

    def add(self, tokens: int, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        if self.count == 1:
            self.first_seconds = seconds
        if self.count == 2 and self.watched != 2:
            self._window.clear()  # the first step compiles
        if self.count == 1 or self.count != self.watched:
            self._window.append((tokens, seconds))
        if self.count > NUM_WARMUP and self.count != self.watched:
            timing = between(self._before, read_moment())
            self.waited_seconds += timing.waited
            self.cpu_seconds += timing.cpu_seconds
            self.steady.append((tokens, seconds))

    def _watched_step(self, stepper: TrainStep, batch: GlobalBatch) -> StepResult:
        """Run ``Stepper.step`` under the allocator's meter. Its events are kept in memory, so only a part is watched."""
        self._held_peak = held_peak_bytes(self.plan)
        seen: list[AllocatedPeak] = []

        @contextmanager
        def watch() -> Iterator[None]:
            with allocated_peak(self.plan.device, resident_bytes=in_memory_bytes(stepper.model, stepper.optimizer)) as peak:
                seen.append(peak)
                yield

        outcome = stepper.step(batch, watch=watch)
        self.peak_bytes = max(peak.bytes or 0 for peak in seen) or None
        if self.plan.device == "cpu":
            if platform.libc_ver()[0] == "glibc":
                trim_heap()
            reset_held_peak(self.plan)  # the memory of watching itself is not the run's
        return outcome

    @property
    def recent_tokens_per_second(self) -> float:
        tokens, seconds = (sum(column) for column in zip(*self._window, strict=True)) if self._window else (0, 0.0)
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
        """Return the share of the steady steps' time that went by waiting for a core that another program had."""
        seconds = sum(seconds for _, seconds in self.steady)
        return self.waited_seconds / seconds if seconds else 0.0

    @property
    def one_time_seconds(self) -> float | None:
        spread = self.step_ms
        if spread is None or self.first_seconds is None:
            return None
        return max(self.first_seconds - spread.p50 / 1000, 0.0)

    def saving(self, *, begins: bool) -> None:
        """Keep a save's copies out of the step's memory peak. The copies leave with the save."""
        if self.plan.device == "cpu":
            if begins:
                self._held_peak = self.held_peak()
            else:
                reset_held_peak(self.plan)

    def held_now(self) -> int:
        return held_bytes(self.plan)

    def held_peak(self) -> int:
        return max(self._held_peak, held_peak_bytes(self.plan))
