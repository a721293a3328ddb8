"""Define RacePolicy: the user's bounds of a race, and what follows from them.

The policy admits setups, limits the time of a race, selects finalists, and decides whether an earlier race still answers. The
functions after it compare the time that compiling takes with the time that it saves, and run the final."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from upshift.inference.race.early_stopping import is_dominated
from upshift.inference.race.forecast import Forecast
from upshift.inference.race.types import Limits, Quality, RaceRequest, RaceSeconds, Reason, Run, Skipped, Stopped
from upshift.inference.registry import ENGINES, EngineName, EngineSetup

RACE_SECONDS = 90.0  # the longest time of a race
START_LIMIT_SECONDS = 240.0  # beside it, for the start of the process of an engine that the user asks for
RACE_SHARE = 0.1  # the share of the user's run that a race may take, if that is longer than RACE_SECONDS
LONGER_RATIO = 1.5  # a race with this times the time may run the setups that an earlier race had no time for
COMPILE_SECONDS = 40.0  # in the race, and once more before the run, from torch's own files; measured (docs/log.md)
MIN_AMOUNT = 1000.0  # texts or tokens: with fewer, compiling would have to save 40 ms of each, and no forecast is worth its time


class Admission(NamedTuple):
    """The setups of one engine that run, and those that are skipped."""

    setups: tuple[EngineSetup, ...]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class RacePolicy:
    """The bounds of a race.

    ``amount``: texts to encode, or tokens to generate, for which compiling must pay off.
    ``engine``: the only engine that runs beside the reference. None: all engines.
    ``seconds``: the time of the race. None: it follows from the amount. "run": it also is no longer than the run itself, because
    no later call of this process uses its result."""

    quality: Quality
    limits: Limits
    amount: float
    engine: EngineName | None = None
    seconds: RaceSeconds = None

    @property
    def is_limited(self) -> bool:
        """Return whether the user limits latencies."""
        return bool(self.limits)

    def admit(self, setups: tuple[EngineSetup, ...], runs: Sequence[Run], forecast: Forecast) -> Admission:
        """Return which of one engine's setups run after ``runs``.

        An engine with a process of its own runs only if its starts could pay off. If an engine compiles, only its setup with the
        fastest forecast runs, and only if compiling pays off. If the user asks for the engine, all of its setups run."""
        spec = ENGINES[setups[0].engine]
        if self.engine is None and spec.has_environment and not self._start_pays(setups[0], best_rate(runs, self.quality)):
            return Admission((), tuple(Skipped(setup=setup, reason="start") for setup in setups))
        if self.engine is not None or spec.uncompiled is None:
            return Admission(setups)
        rates = {setup: predict_compiled_rate(setup, runs, forecast, self.quality) for setup in setups}
        fastest = max(setups, key=lambda setup: rates[setup] or 0.0)
        if pays_off(rates[fastest], best_rate(runs, self.quality), self.amount):
            return Admission((fastest,))
        return Admission((), (Skipped(setup=fastest, reason="compiling", rate=rates[fastest]),))

    def _start_pays(self, setup: EngineSetup, best: float | None) -> bool:
        """Return whether the user's run at the rate ``best`` takes longer than two starts of a setup's engine: one in the race,
        and one before the run."""
        return best is None or self.amount / best > 2 * ENGINES[setup.engine].start_seconds

    def time_budget(self, runs: Sequence[Run]) -> float:
        """Return the seconds of a race: the user's, or a share of the time that the fastest setup so far needs for the
        user's run."""
        if self.seconds and self.seconds != "run":
            return self.seconds
        rate = best_rate(runs, self.quality)
        run_seconds = self.amount / (rate or math.inf)
        if self.seconds == "run" and rate and self.engine is None and not self.limits:
            return max(min(RACE_SECONDS, run_seconds), RACE_SHARE * run_seconds)
        start_seconds = 0.0
        if self.engine is not None and ENGINES[self.engine].has_environment:  # the user has asked for its start
            start_seconds = START_LIMIT_SECONDS
        return start_seconds + max(RACE_SECONDS, RACE_SHARE * run_seconds)

    def select_finalists(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Return the runs whose setups run again in a final.

        There is a final only for many texts without limits. Under limits the choice may be far from the fastest setup."""
        if self.amount < MIN_AMOUNT or self.limits:
            return ()
        return finalists(runs, self.quality)

    def is_final(self, runs: Sequence[Run], skipped: Sequence[Skipped], time_budget: float) -> bool:
        """Return whether no skipped or stopped setup of an earlier race could win under these bounds.

        The bounds of that race may have been others. ``time_budget`` is the time that it had, in seconds. A setup whose failure
        may pass could win."""
        if any(run.temporary for run in runs):
            return False
        has_more_time = self.time_budget(runs) > LONGER_RATIO * time_budget
        rate = best_rate(runs, self.quality)
        skip_rules: dict[Reason, Callable[[Skipped], bool]] = {
            "compiling": lambda skip: not pays_off(skip.rate, rate, self.amount),
            "start": lambda skip: not self._start_pays(skip.setup, rate),
            "quality": lambda skip: self.quality != "exact" and (skip.cosine or 0.0) < self.quality,
            "time": lambda skip: not has_more_time,
        }
        stop_rules: dict[Stopped | None, Callable[[Run], bool]] = {
            "quality": lambda run: not run.meets(self.quality),
            "behind": lambda run: not self.limits and (not run.meets(self.quality) or is_dominated(run, runs, self.quality)),
            "time": lambda run: not has_more_time,
            None: lambda run: True,
        }
        skips_stay = all(skip_rules[skip.reason](skip) for skip in skipped)
        return skips_stay and all(stop_rules[run.stopped](run) for run in runs)


def best_rate(runs: Sequence[Run], quality: Quality) -> float | None:
    """Return the texts or tokens per second of the fastest run within the quality, or None without such a run."""
    return max((run.per_second or 0.0 for run in runs if run.meets(quality)), default=None)


def pays_off(compiled_rate: float | None, best: float | None, amount: float) -> bool:
    """Return whether compiling saves more time than it takes.

    ``compiled_rate`` and ``best`` are texts or tokens per second, of the compiled engine and of the fastest other one. If
    one of them is unknown, return False."""
    if not compiled_rate or not best:
        return False
    return amount / best - amount / compiled_rate > COMPILE_SECONDS


def predict_compiled_rate(setup: EngineSetup, runs: Sequence[Run], forecast: Forecast, quality: Quality) -> float | None:
    """Return the rate of the uncompiled run, times the gain that the planner's formulas predict for compiling.

    Return None if there is no uncompiled run within the quality, or no forecast."""
    uncompiled = ENGINES[setup.engine].uncompiled
    uncompiled_runs = [
        run for run in runs if (run.setup.engine, run.setup.precision) == (uncompiled, setup.precision) and run.meets(quality)
    ]
    best = max(uncompiled_runs, key=lambda run: run.per_second or 0.0, default=None)
    if best is None:
        return None
    uncompiled_forecast = forecast(best.setup)
    compiled_forecast = forecast(setup.changed(batch=best.setup.batch))
    if not (best.per_second and uncompiled_forecast and compiled_forecast):
        return None
    return best.per_second * compiled_forecast / uncompiled_forecast


# The share of the best rate that a finalist needs. Rates change by 3 to 5 % within the minute of a race (docs/log.md).
NEAR_RATIO = 0.93
MAX_FINALISTS = 3
FINAL_TURNS = 3
FINAL_SECONDS = 30.0
RunRequest = Callable[[RaceRequest], Iterator[Run | Skipped]]


def finalists(runs: Sequence[Run], quality: Quality) -> list[Run]:
    """Return the runs that are near to the fastest, each setup with its best batch, the fastest first.

    Return nothing if no other setup comes near. An engine that compiles or starts a process at each load
    is left out, because it would do so in each turn."""
    candidates = [run for run in runs if run.meets(quality) and not run.stopped and not ENGINES[run.setup.engine].loads_slowly]
    best_by_label: dict[str, Run] = {}
    for run in sorted(candidates, key=lambda run: -(run.per_second or 0.0)):
        best_by_label.setdefault(run.setup.label(), run)
    min_rate = NEAR_RATIO * (best_rate(runs, quality) or 0.0)
    near = [run for run in best_by_label.values() if (run.per_second or 0.0) >= min_rate][:MAX_FINALISTS]
    return near if len(near) > 1 else []


def run_final(contenders: Sequence[Run], request: RaceRequest, run_request: RunRequest, *, seconds: float) -> list[Run]:
    """Run the finalists again, in turns. Return each with the rate of its middle turn, or with its failure.

    ``request`` is the request of the race, without setups. ``seconds`` limits the time of the final. If that is too short
    for a turn of all finalists, return nothing."""
    end = time.perf_counter() + min(seconds, FINAL_SECONDS)
    turns: list[list[Run]] = []
    turn_seconds = sum((run.load_seconds or 0.0) + 3.0 * (run.seconds.p50 if run.seconds else 0.0) for run in contenders)
    for _ in range(FINAL_TURNS):
        start = time.perf_counter()
        if start + turn_seconds > end:
            break
        turn: list[Run] = []
        for run in contenders:
            contest = request.contest.changed(batches=(run.setup.batch,))
            seconds_left = end - time.perf_counter()
            turn_request = request.changed(contest=contest, setups=(run.setup,), before=tuple(contenders), seconds=seconds_left)
            turn += [result for result in run_request(turn_request) if isinstance(result, Run)]
        if len(turn) < len(contenders) or any(run.stopped == "time" for run in turn):
            break
        turns.append(turn)
        turn_seconds = max(turn_seconds, time.perf_counter() - start)
    if not turns:
        return []
    return [_middle_turn(run, runs) for run, runs in zip(contenders, zip(*turns, strict=True), strict=True)]


def _middle_turn(first: Run, turns: Sequence[Run]) -> Run:
    """Return the first failure among the turns, or the turn with the median rate, with the forecast of the race's run."""
    result = next((run for run in turns if run.failure), None)
    if result is None:
        rate = median_low(run.per_second or 0.0 for run in turns)
        result = next(run for run in turns if (run.per_second or 0.0) == rate)
    return result.changed(forecast_per_second=first.forecast_per_second)
