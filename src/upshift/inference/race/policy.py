"""Define RacePolicy: the bounds of a race, and what follows from them: who runs, for how long, and who runs again.

Compare the seconds that compiling takes with those that it could save on the user's own texts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from upshift.inference.race.early_stopping import behind
from upshift.inference.race.forecast import Forecast
from upshift.inference.race.types import Entrants, LeftOut, Limits, Quality, Reason, Run, Stopped
from upshift.inference.registry import ENGINES, EngineName, EngineSetup

COMPILE_SECONDS = 40.0  # in the race, and before the run once more, from torch's own files; measured (docs/log.md)
FEW = 1000.0  # texts or tokens: compiling would have to save 40 ms of each, and no forecast is worth its time


def pays(rate: float | None, best: float | None, amount: float) -> bool:
    """Return whether compiling saves more time than it takes. ``rate`` and ``best`` are texts or tokens a second,
    compiled and of the fastest without. None: not known."""
    if not rate or not best:
        return False
    return amount / best - amount / rate > COMPILE_SECONDS


def fastest(runs: Sequence[Run], quality: Quality) -> float | None:
    return max((run.per_second or 0.0 for run in runs if run.within(quality)), default=None)


def compiled_rate(setup: EngineSetup, runs: Sequence[Run], says: Forecast, quality: Quality) -> float | None:
    """Return the rate of the uncompiled run, times the gain that the planner's formulas expect of compiling. Return
    None if the run was not within the quality, or if there is no forecast."""
    uncompiled = ENGINES[setup.engine].uncompiled
    same = [run for run in runs if (run.setup.engine, run.setup.precision) == (uncompiled, setup.precision)]
    best = max((run for run in same if run.within(quality)), key=lambda run: run.per_second or 0.0, default=None)
    if best is None:
        return None
    before, after = says(best.setup), says(setup.changed(batch=best.setup.batch))
    return best.per_second * after / before if best.per_second and before and after else None


RACE_SECONDS, RACE_SHARE = 90.0, 0.1  # of a race, or of the run where that is longer
LONGER = 1.5  # times as much time as a race had: what it left out for want of time may race


class Entering(NamedTuple):
    setups: tuple[EngineSetup, ...]
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True)
class RacePolicy:
    quality: Quality
    limits: Limits
    amount: float  # texts, or tokens to generate, for which compiling must pay
    engine: EngineName | None = None  # only this one beside the reference
    seconds: float | None = None  # of the race; None: by the amount

    @property
    def is_limited(self) -> bool:
        return bool(self.limits)

    def admit(self, setups: tuple[EngineSetup, ...], runs: Sequence[Run], says: Forecast) -> Entering:
        """Return which of one engine's setups run.

        Of an engine that compiles, only the setup with the fastest forecast runs, if compiling pays beside ``runs``. If the
        user asked for the engine, all of its setups run, whether they pay or not."""
        if self.engine is not None or ENGINES[setups[0].engine].uncompiled is None:
            return Entering(setups)
        rates = {setup: compiled_rate(setup, runs, says, self.quality) for setup in setups}
        likely = max(setups, key=lambda setup: rates[setup] or 0.0)
        if pays(rates[likely], fastest(runs, self.quality), self.amount):
            return Entering((likely,))
        return Entering((), (LeftOut(setup=likely, reason="compiling", rate=rates[likely]),))

    def budget(self, runs: Sequence[Run]) -> float:
        """Return the seconds of a race: those that the user asks for, or a share of how long the run would take with the
        fastest so far."""
        return self.seconds or max(RACE_SECONDS, RACE_SHARE * self.amount / (fastest(runs, self.quality) or math.inf))

    def run_again(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Return who runs in a final.

        A final is about the time of many texts; under limits who is chosen may be far from the fastest."""
        return finalists(runs, self.quality) if self.amount >= FEW and not self.limits else ()

    def is_settled(self, runs: Sequence[Run], left_out: Sequence[LeftOut], budget: float) -> bool:
        """Return whether no setup that was left out or stopped could win under these bounds.

        The bounds of the race that ``runs`` are of may have been others. ``budget``: the seconds that it might take."""
        longer = self.budget(runs) > LONGER * budget
        best = fastest(runs, self.quality)
        left_out_rules: dict[Reason, Callable[[LeftOut], bool]] = {
            "compiling": lambda out: not pays(out.rate, best, self.amount),
            "quality": lambda out: self.quality != "exact" and (out.cosine or 0.0) < self.quality,
            "time": lambda out: not longer,
        }
        stop_rules: dict[Stopped | None, Callable[[Run], bool]] = {
            "quality": lambda run: not run.within(self.quality),
            "behind": lambda run: not self.limits and (not run.within(self.quality) or behind(run, runs, self.quality)),
            "time": lambda run: not longer,
            None: lambda run: True,
        }
        return all(left_out_rules[out.reason](out) for out in left_out) and all(stop_rules[run.stopped](run) for run in runs)


NEAR = 0.93  # of the fastest: rates wander by 3 to 5 % within the minute of a race (docs/log.md)


MAX_FINALISTS = 3
FINAL_TURNS = 3
FINAL_SECONDS = 30.0


Ran = Callable[[Entrants], Iterator[Run | LeftOut]]


def finalists(runs: Sequence[Run], quality: Quality) -> list[Run]:
    """Return each finalist with its best batch, the fastest first, or none if nobody comes near. An engine that
    compiles is left out, because it would do so in each turn."""
    best: dict[str, Run] = {}
    able = [run for run in runs if run.within(quality) and not run.stopped and not ENGINES[run.setup.engine].uncompiled]
    for run in sorted(able, key=lambda run: -(run.per_second or 0.0)):
        best.setdefault(run.setup.label(), run)
    least = NEAR * (fastest(runs, quality) or 0.0)
    near = [run for run in best.values() if (run.per_second or 0.0) >= least][:MAX_FINALISTS]
    return near if len(near) > 1 else []


def run_final(near: Sequence[Run], entrants: Entrants, ran: Ran, *, seconds: float) -> list[Run]:
    """Return each finalist with the rate of its middle turn, or with its failure. ``entrants`` has no setups.
    ``seconds`` limits the final. Without time for a whole turn of all, return nothing."""
    end = time.perf_counter() + min(seconds, FINAL_SECONDS)
    turns: list[list[Run]] = []
    longest = sum((run.load_seconds or 0.0) + 3.0 * (run.seconds.p50 if run.seconds else 0.0) for run in near)
    for _ in range(FINAL_TURNS):
        start = time.perf_counter()
        if start + longest > end:
            break
        turn: list[Run] = []
        for run in near:
            contest = entrants.contest.changed(batches=(run.setup.batch,))
            asked = entrants.changed(contest=contest, setups=(run.setup,), before=tuple(near), seconds=end - time.perf_counter())
            turn += [said for said in ran(asked) if isinstance(said, Run)]
        if len(turn) < len(near) or any(run.stopped == "time" for run in turn):
            break
        turns.append(turn)
        longest = max(longest, time.perf_counter() - start)
    return [_middle(run, again) for run, again in zip(near, zip(*turns, strict=True), strict=True)] if turns else []


def _middle(run: Run, again: Sequence[Run]) -> Run:
    failed = next((one for one in again if one.failure), None)
    rate = median_low(one.per_second or 0.0 for one in again)
    middle = failed or next(one for one in again if (one.per_second or 0.0) == rate)
    return middle.changed(forecast_per_second=run.forecast_per_second)
