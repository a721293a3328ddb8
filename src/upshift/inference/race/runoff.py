"""Run the contestants again that a race leaves too near to each other to tell the fastest. They run in turn, each
time in a process of its own. What else the machine does changes from minute to minute, and the turns share it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median_low

from upshift.inference.race.policy import fastest
from upshift.inference.race.types import Entrants, LeftOut, Quality, Run
from upshift.inference.registry import ENGINES

NEAR = 0.93  # of the fastest: rates wander by 3 to 5 % within the minute of a race (docs/log.md)
MOST, TURNS = 3, 3
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
    near = [run for run in best.values() if (run.per_second or 0.0) >= least][:MOST]
    return near if len(near) > 1 else []


def run_final(near: Sequence[Run], entrants: Entrants, ran: Ran, *, seconds: float) -> list[Run]:
    """Return each finalist with the rate of its middle turn, or with its failure. ``entrants`` has no setups.
    ``seconds`` limits the final. Without time for a whole turn of all, return nothing."""
    end = time.perf_counter() + min(seconds, FINAL_SECONDS)
    turns: list[list[Run]] = []
    longest = sum((run.load_seconds or 0.0) + 3.0 * (run.seconds.p50 if run.seconds else 0.0) for run in near)
    for _ in range(TURNS):
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
