"""Decide which setups can still win a race. Skip or stop the others, and record why."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from upshift.disk_full import DISK_FULL_PHRASES, disk_full_message
from upshift.errors import UpshiftError
from upshift.inference.race.types import Quality, RaceRequest, RaceResult, Run, Skipped, Stopped
from upshift.inference.registry import EngineSetup, Precision
from upshift.text import one_line

# A first step or a second pass that is slower than the best by this factor cannot win: a step's slowest warm-up was 1.2.
HOPELESS_RATIO = 1.5
# Share of its threads' time that a run must have computed: with less, something else ran beside it, and it may be slow for that.
MIN_CPU_SHARE = 0.75
COARSER: Mapping[Precision, tuple[Precision, ...]] = {  # precisions of the same engine that round everything at least as far
    "fp16": ("int8", "int4"),
    "fp16-weights": ("mixed-weights", "mixed", "int8-weights", "int8", "int4-weights", "int4"),
    "mixed-weights": ("mixed", "int8-weights", "int8", "int4-weights", "int4"),
    "mixed": ("int8", "int4"),
    "int8-weights": ("int8", "int4-weights", "int4"),
    "int8": ("int4",),
    "int4-weights": ("int4",),
}
EIGHT_BITS: tuple[Precision, ...] = ("int8", "int8-weights")
FOUR_BITS: tuple[Precision, ...] = ("int4", "int4-weights")
# The loss of cosine with 4 bits is at least this times the loss with 8 bits: the steps are 16 times as wide. Measured: 67 and 73
# (docs/log.md).
FOUR_BIT_LOSS_RATIO = 16.0

TEMPORARY_PHRASES = (  # in the errors of libraries whose memory is full, and of full disks
    "out of memory",
    "outofmemory",
    "memoryerror",
    "bad_alloc",
    "bad allocation",
    "cannot allocate memory",
    "can't allocate memory",
    "failed to allocate",
    "alloc_failed",
    *DISK_FULL_PHRASES,
)
TEMPORARY_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGBUS)  # the system has no memory; no room for a mapped file


class EarlyStopping:
    """The decisions about one engine's setups in a race, from their runs and those of the engines before."""

    def __init__(self, request: RaceRequest) -> None:
        self._request = request
        self._runs: list[Run] = []
        self._end = time.perf_counter() + request.seconds

    @property
    def is_late(self) -> bool:
        """Return whether the time of the race is over."""
        return time.perf_counter() > self._end

    def add(self, runs: Iterable[Run]) -> None:
        self._runs += runs

    def skip(self, setup: EngineSetup) -> Skipped | None:
        """Return why a setup need not even be converted, or None if it may win."""
        if self.is_late and self._request.before:  # the reference runs in any case
            return Skipped(setup=setup, reason="time")
        return implied_skip(setup, self._runs, self._request.quality)

    def stop(self, run: Run, cpu_share: float) -> Stopped | None:
        """Return why a setup is not timed further after its run so far, or None if it may win.

        ``cpu_share`` is the share of its threads' time that the run computed."""
        if not run.meets(self._request.quality):
            return "quality"
        other_runs = (*self._request.before, *self._runs)
        is_comparable = not self._request.limited and cpu_share >= MIN_CPU_SHARE
        if is_comparable and is_dominated(run, other_runs, self._request.quality):
            return "behind"
        return "time" if self.is_late else None


def is_temporary(failure: str) -> bool:
    """Return whether the text of a failure says that a disk or a memory was full, so that the setup may run later."""
    return any(phrase in failure.lower() for phrase in TEMPORARY_PHRASES)


def is_dominated(run: Run, others: Iterable[Run], quality: Quality) -> bool:
    """Return whether a run is too slow to win. Only batches of the same size are compared, because engines gain
    differently from larger batches."""
    rivals = (other for other in others if other.setup.batch == run.setup.batch and other.meets(quality))
    best_rate = max((rival.per_second or 0.0 for rival in rivals), default=0.0)
    return (run.per_second or 0.0) * HOPELESS_RATIO < best_rate


def implied_skip(setup: EngineSetup, runs: Sequence[Run], quality: Quality) -> Skipped | None:
    """Return why a setup cannot reach the quality, or None if it may.

    It cannot if a setup of the same engine that rounds less missed the quality. It also cannot if a setup with 8 bits came
    so near to the bound that 4 bits must miss it."""
    if quality == "exact":
        return None
    for run in runs:
        finer = run.setup.precision
        if run.worst_cosine is None or setup.precision not in COARSER.get(finer, ()):
            continue
        is_halved = finer in EIGHT_BITS and setup.precision in FOUR_BITS
        max_cosine = 1.0 - (1.0 - run.worst_cosine) * (FOUR_BIT_LOSS_RATIO if is_halved else 1.0)
        if run.setup.engine == setup.engine and max_cosine < quality:
            return Skipped(setup=setup, reason="quality", cosine=max_cosine, by=run.setup)
    return None


def serve_race(
    path: Path, answer: Callable[[RaceResult], None], run_setup: Callable[[RaceRequest, EngineSetup, EarlyStopping], list[Run]]
) -> None:
    """Answer the RaceRequest in the file ``path``, one setup after the other, in an engine's process.

    An error of a setup is the failure of that setup alone."""
    request = RaceRequest.from_file(path)
    early_stopping = EarlyStopping(request)
    has_run = False
    for setup in request.setups:
        skipped = early_stopping.skip(setup)
        if skipped is not None:
            answer(RaceResult(skipped=skipped))
            continue
        if has_run:
            gc.collect()  # free the engine before the next one is loaded
        has_run = True
        try:
            runs = run_setup(request, setup, early_stopping)
        except Exception as error:  # of any library: the user is told why this setup did not run
            message = one_line(error, limit=400)
            failure = message if isinstance(error, UpshiftError) else f"{type(error).__name__}: {message}"
            runs = [Run(setup=setup, failure=failure, temporary=is_temporary(failure) or disk_full_message(error) is not None)]
        early_stopping.add(runs)
        answer(RaceResult(runs=tuple(runs)))
