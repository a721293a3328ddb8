"""Define RacePolicy: the bounds of a race, and what follows from them: who runs, for how long, and who runs again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from upshift.inference.bounds import Limits, Quality
from upshift.inference.contestant import LeftOut, Reason, Run, Stopped
from upshift.inference.engines import ENGINES
from upshift.inference.final import finalists
from upshift.inference.forecast import Forecast
from upshift.inference.payback import FEW, compiled_rate, fastest, pays
from upshift.inference.setup import EngineName, EngineSetup
from upshift.inference.standing import behind

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
