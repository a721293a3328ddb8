"""Decide which contestants can still win a race. Others are not converted, or not timed further, and the reason is
recorded."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from upshift.inference.race.types import Entrants, LeftOut, Quality, Run, Runs, Stopped
from upshift.inference.registry import EngineSetup, Precision

BEHIND = 1.5  # of a first step, or a second pass, which no later one makes up: a step's slowest warm-up was 1.2
ALONE = 0.75  # of its threads' time: with less something else ran beside it, and being slow says nothing
COARSER: Mapping[Precision, tuple[Precision, ...]] = {  # of one engine: what rounds all that this one does, at least as far
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
FOUR_OF_EIGHT = 16.0  # loss of cosine with 4 bits over that with 8, at least: steps are 16 times as wide; 67, 73 in docs/log.md


class Standing:
    """The position of one engine's setups in a race, by their runs and those of the engines before."""

    def __init__(self, entrants: Entrants) -> None:
        self._entrants, self._runs = entrants, list[Run]()
        self._end = time.perf_counter() + entrants.seconds

    @property
    def late(self) -> bool:
        return time.perf_counter() > self._end

    def add(self, runs: Iterable[Run]) -> None:
        self._runs += runs

    def left_out(self, setup: EngineSetup) -> LeftOut | None:
        """Return why a setup need not even be converted, or None."""
        if self.late and self._entrants.before:  # the reference runs in any case
            return LeftOut(setup=setup, reason="time")
        return implied(setup, self._runs, self._entrants.quality)

    def stopped(self, run: Run, share: float) -> Stopped | None:
        """Return why a contestant is timed no further, by its run so far, or None. ``share`` is the share of its
        threads' time that it computed."""
        if not run.within(self._entrants.quality):
            return "quality"
        known = (*self._entrants.before, *self._runs)
        if not self._entrants.limited and share >= ALONE and behind(run, known, self._entrants.quality):
            return "behind"
        return "time" if self.late else None


def behind(run: Run, others: Iterable[Run], quality: Quality) -> bool:
    """Return whether a run is too slow to win. Only batches of one size are compared, because the gain of a larger
    one differs between engines."""
    alike = (one for one in others if one.setup.batch == run.setup.batch and one.within(quality))
    return (run.per_second or 0.0) * BEHIND < max((one.per_second or 0.0 for one in alike), default=0.0)


def implied(setup: EngineSetup, runs: Sequence[Run], quality: Quality) -> LeftOut | None:
    """Return why a setup cannot win: one of the same engine that rounds less missed the quality, or came so near that
    half its bits must miss it. Otherwise return None."""
    for run in runs:
        known = run.setup.precision
        if quality == "exact" or run.worst_cosine is None or setup.precision not in COARSER.get(known, ()):
            continue
        halved = known in EIGHT_BITS and setup.precision in FOUR_BITS
        most = 1.0 - (1.0 - run.worst_cosine) * (FOUR_OF_EIGHT if halved else 1.0)
        if run.setup.engine == setup.engine and most < quality:
            return LeftOut(setup=setup, reason="quality", cosine=most, by=run.setup)
    return None


def contend(path: Path, answer: Callable[[Runs], None], run: Callable[[Entrants, EngineSetup, Standing], list[Run]]) -> None:
    """Run an engine's process: answer for each setup of the Entrants in ``path``. An error is that setup's failure
    alone."""
    entrants = Entrants.from_file(path)
    standing = Standing(entrants)
    for setup in entrants.setups:
        out = standing.left_out(setup)
        if out is not None:
            answer(Runs(left_out=out))
            continue
        try:
            found = run(entrants, setup, standing)
        except Exception as error:  # whatever a library raises: it is told to the user as why this setup did not run
            found = [Run(setup=setup, failure=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")]
        standing.add(found)
        answer(Runs(runs=tuple(found)))
        gc.collect()  # before the next one is loaded
