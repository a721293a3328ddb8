"""Limit the seconds of a race and of compiling by the seconds that they could save on the user's own texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from upshift.inference.bounds import Quality
from upshift.inference.contestant import LeftOut, Reason, Run, Stopped
from upshift.inference.engines import ENGINES
from upshift.inference.forecast import Forecast
from upshift.inference.setup import EngineSetup
from upshift.inference.standing import behind

COMPILE_SECONDS = 40.0  # in the race, and before the run once more, from torch's own files; measured (docs/log.md)
RACE_SECONDS, RACE_SHARE = 90.0, 0.1  # of a race, or of the run where that is longer
LONGER = 1.5  # times as much time as a race had: what it left out for want of time may race
FEW = 1000.0  # texts or tokens: compiling would have to save 40 ms of each, and no forecast is worth its time


class Entering(NamedTuple):
    setups: tuple[EngineSetup, ...]
    left_out: tuple[LeftOut, ...] = ()


def entering(
    setups: tuple[EngineSetup, ...], runs: Sequence[Run], says: Forecast, *, quality: Quality, amount: float | None
) -> Entering:
    """Return which of one engine's setups run.

    Of an engine that compiles, only the setup with the fastest forecast runs, if compiling pays beside ``runs``.
    ``amount`` is the texts or tokens of the whole run. None: the user asked for all setups, whether they pay or not."""
    if amount is None or ENGINES[setups[0].engine].uncompiled is None:
        return Entering(setups)
    rates = {setup: _compiled_rate(setup, runs, says, quality) for setup in setups}
    likely = max(setups, key=lambda setup: rates[setup] or 0.0)
    if pays(rates[likely], fastest(runs, quality), amount):
        return Entering((likely,))
    return Entering((), (LeftOut(setup=likely, reason="compiling", rate=rates[likely]),))


def pays(rate: float | None, best: float | None, amount: float) -> bool:
    """Return whether compiling saves more time than it takes. ``rate`` and ``best`` are texts or tokens a second,
    compiled and of the fastest without. None: not known."""
    if not rate or not best:
        return False
    return amount / best - amount / rate > COMPILE_SECONDS


def allowed(asked: float | None, runs: Sequence[Run], quality: Quality, amount: float) -> float:
    """Return the seconds of a race: those that the user asks for, or a share of how long the run would take with the
    fastest so far."""
    return asked or max(RACE_SECONDS, RACE_SHARE * amount / (fastest(runs, quality) or math.inf))


def settled(
    runs: Sequence[Run], left_out: Sequence[LeftOut], quality: Quality, *, amount: float, limited: bool, longer: bool
) -> bool:
    """Return whether no setup that was left out or stopped could win under the present bounds, which may differ from
    the race's. ``longer``: there is more time than there was."""
    best = fastest(runs, quality)
    left_out_rules: dict[Reason, Callable[[LeftOut], bool]] = {
        "compiling": lambda out: not pays(out.rate, best, amount),
        "quality": lambda out: quality != "exact" and (out.cosine or 0.0) < quality,
        "time": lambda out: not longer,
    }
    stop_rules: dict[Stopped | None, Callable[[Run], bool]] = {
        "quality": lambda run: not run.within(quality),
        "behind": lambda run: not limited and (not run.within(quality) or behind(run, runs, quality)),
        "time": lambda run: not longer,
        None: lambda run: True,
    }
    return all(left_out_rules[out.reason](out) for out in left_out) and all(stop_rules[run.stopped](run) for run in runs)


def fastest(runs: Sequence[Run], quality: Quality) -> float | None:
    return max((run.per_second or 0.0 for run in runs if run.within(quality)), default=None)


def _compiled_rate(setup: EngineSetup, runs: Sequence[Run], says: Forecast, quality: Quality) -> float | None:
    """Return the rate of the uncompiled run, times the gain that the planner's formulas expect of compiling. Return
    None if the run was not within the quality, or if there is no forecast."""
    uncompiled = ENGINES[setup.engine].uncompiled
    same = [run for run in runs if (run.setup.engine, run.setup.precision) == (uncompiled, setup.precision)]
    best = max((run for run in same if run.within(quality)), key=lambda run: run.per_second or 0.0, default=None)
    if best is None:
        return None
    before, after = says(best.setup), says(setup.changed(batch=best.setup.batch))
    return best.per_second * after / before if best.per_second and before and after else None
