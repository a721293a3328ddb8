"""Compare the seconds that compiling takes with those that it could save on the user's own texts."""

from __future__ import annotations

from collections.abc import Sequence

from upshift.inference.bounds import Quality
from upshift.inference.contestant import Run
from upshift.inference.engines import ENGINES
from upshift.inference.forecast import Forecast
from upshift.inference.setup import EngineSetup

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
