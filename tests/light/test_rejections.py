"""Rejected plans that are printed: one for each reason, and of its plans the one that would have been the fastest."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from made_sizes import Size, decoder

from upshift.hardware import describe
from upshift.planning.analysis.rejections import kind_of_reason, lessons_of
from upshift.planning.plan import plain_default
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate, Rejected, TooBig, cost_plan
from upshift.planning.search.search import search
from upshift.planning.search.space import parse_fixed
from upshift.planning.trials.calibration import Calibration, sample_of
from upshift.planning.workload import Workload

LLAMA = Size(4096, 14336, 32, 32, 8)


@dataclass(frozen=True)
class Entry:
    plan: tuple[tuple[str, int], ...]
    reason: str


def test_each_reason_has_its_fastest_plan_whatever_the_order() -> None:
    reasons = ("needs {} GiB of the 75.2 GiB that a process may use", "{} ranks cannot share 7 heads")
    entries = [Entry((("number", number),), reasons[number % 2].format(number)) for number in range(40)]
    random.Random(0).shuffle(entries)
    speeds = {entry: 1 / (1 + abs(dict(entry.plan)["number"] - 17.2)) for entry in entries}
    lessons = lessons_of(entries, None, speeds.get)
    assert [lesson.reason for lesson in lessons] == [reasons[1].format(17), reasons[0].format(18)]
    assert [lesson.speed for lesson in lessons] == sorted(speeds.values(), reverse=True)[:2]


def test_without_a_time_the_plan_most_like_the_best_is_named() -> None:
    @dataclass(frozen=True)
    class Plan:
        first: int
        second: int

        def __iter__(self):
            return iter(vars(self).items())

    plans = [Plan(1, 1), Plan(0, 1), Plan(2, 2)]
    (lesson,) = lessons_of([Rejected(plan, "why") for plan in plans], Plan(0, 0), lambda entry: None)  # type: ignore[arg-type]
    assert (lesson.plan, lesson.speed) == (plans[1], None)


def plan_of(on: str) -> Planning:
    workload = Workload(sequence_length=2048, global_batch=64)
    profile = decoder(LLAMA, longest=2048)
    host = describe(on)
    ranking = search(host, profile, workload, fixed=parse_fixed((), host, profile, workload))
    default = cost_plan(plain_default(host, profile, workload), host=host, profile=profile, workload=workload)
    assert isinstance(default, Candidate)
    return Planning(host, profile, workload, ranking, default)


def test_speeds_are_corrected_by_what_ran_here() -> None:
    """A host that is half as fast as the formula is so for the rejected plans, too."""
    planning = plan_of("8xa100-80gb")
    candidates = planning.ranking.candidates
    samples = [
        sample_of(entry.plan, planning.workload, "run", {"step": (entry.time.total, 2 * entry.time.total)})
        for entry in candidates[:20]
    ]
    slower = Calibration(tuple(samples))
    corrected = replace(planning, ranking=slower.rerank(planning.ranking, planning.host, planning.workload), calibration=slower)
    assert corrected.ranking.candidates[0].tokens_per_second < 0.7 * candidates[0].tokens_per_second
    before = {kind_of_reason(lesson.reason): lesson.speed for lesson in planning.lessons}
    for lesson in corrected.lessons:
        speed = before[kind_of_reason(lesson.reason)]
        assert (lesson.speed is None) == (speed is None)
        if speed is not None:
            assert lesson.speed == pytest.approx(speed, rel=0.05)


@pytest.mark.parametrize("on", ["8xa100-80gb", "2x8xh100@ib-ndr"])
def test_no_plan_of_a_reason_would_be_faster_than_the_one_that_is_named(on: str) -> None:
    planning = plan_of(on)
    named = {kind_of_reason(lesson.reason): lesson for lesson in planning.lessons}
    assert {kind_of_reason(entry.reason) for entry in planning.ranking.rejected} == set(named)
    best = planning.ranking.candidates[0].tokens_per_second
    for entry in planning.ranking.rejected[::7]:
        if isinstance(entry, TooBig):
            candidate = cost_plan(entry.plan, host=planning.host, profile=planning.profile, workload=planning.workload)
            speed = named[kind_of_reason(entry.reason)].speed
            assert isinstance(candidate, Candidate) and speed is not None
            assert candidate.tokens_per_second / best <= speed * (1 + 1e-9)
