"""Pipeline schedules: every pass once and in a possible order, and the idle time and memory that planning counts with."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from upshift.planning.cost.partition import micro_batches_in_flight
from upshift.planning.cost.pipeline_schedule import Pass, idle_micro_batches, idle_share, makespan, peak_in_flight, simulate
from upshift.planning.layout import Layout, Schedule
from upshift.planning.plan import Plan

SHAPES = [
    (schedule, ranks, micro_batches, stages)
    for schedule, all_stages in (("gpipe", (1,)), ("1f1b", (1,)), ("zero_bubble", (1,)), ("interleaved_1f1b", (2, 3, 4)))
    for ranks in (2, 3, 4, 8)
    for micro_batches in (1, 2, 3, 4, 5, 8, 12, 13, 24, 32)
    for stages in all_stages
]
PLAIN = ("gpipe", "1f1b")
FULL = [shape for shape in SHAPES if shape[0] in PLAIN or shape[2] >= shape[1]]
"""The formulas of the others are for at least as many micro-batches as ranks."""
EVEN = [shape for shape in SHAPES if shape[0] != "interleaved_1f1b" or shape[2] % shape[1] == 0]
"""Interleaved, that of memory is for groups of as many micro-batches as ranks (Narayanan et al. 2021)."""


def plan_of(schedule: Schedule, ranks: int, micro_batches: int, stages: int) -> Plan:
    return Plan(
        device="cuda", host="host", model="model", sequence_length=8, per_device_train_batch_size=1,
        gradient_accumulation_steps=micro_batches, num_processes=ranks,
        layout=Layout(pipeline_parallel=ranks, pipeline_schedule=schedule, virtual_stages=stages),
    )  # fmt: skip


def passes_of(schedule: Schedule, ranks: int, micro_batches: int, stages: int) -> tuple[Pass, ...]:
    return simulate(schedule, ranks=ranks, micro_batches=micro_batches, virtual_stages=stages)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pass_runs_once_and_after_what_it_needs(shape) -> None:
    schedule, ranks, micro_batches, stages = shape
    passes = passes_of(*shape)
    kinds = "FBW" if schedule == "zero_bubble" else "FB"
    assert Counter(one.kind for one in passes) == dict.fromkeys(kinds, ranks * micro_batches * stages)
    ends = {(one.kind, one.micro_batch, one.chunk * ranks + one.rank): one.start + one.duration for one in passes}
    assert len(ends) == len(passes)
    last = ranks * stages - 1
    for one in passes:
        stage = one.chunk * ranks + one.rank
        if one.kind == "F":
            assert ends.get(("F", one.micro_batch, stage - 1), 0) <= one.start
            assert (stage > 0) == (("F", one.micro_batch, stage - 1) in ends)
        elif one.kind == "B":
            assert ends["F", one.micro_batch, stage] <= one.start
            assert stage == last or ends["B", one.micro_batch, stage + 1] <= one.start
        else:
            assert ends["B", one.micro_batch, stage] <= one.start
    for rank in range(ranks):
        mine = [one for one in passes if one.rank == rank]
        assert all(before.start + before.duration <= after.start for before, after in pairwise(mine))


@pytest.mark.parametrize("shape", FULL, ids=str)
def test_idle_time_is_that_of_the_formulas(shape) -> None:
    schedule, ranks, micro_batches, stages = shape
    passes = passes_of(*shape)
    work = {"zero_bubble": 3 * micro_batches, "interleaved_1f1b": stages * micro_batches}.get(schedule, micro_batches)
    assert idle_share(passes) == pytest.approx((ranks - 1) / (work + ranks - 1))
    of_one = 3 * stages  # units of a micro-batch on a rank
    assert makespan(passes) == pytest.approx(of_one * (micro_batches + idle_micro_batches(plan_of(*shape))))


@pytest.mark.parametrize("shape", EVEN, ids=str)
def test_waiting_micro_batches_are_those_of_the_memory_cost(shape) -> None:
    schedule, ranks, micro_batches, stages = shape
    passes, plan = passes_of(*shape), plan_of(*shape)
    for rank in range(ranks):
        assert peak_in_flight(passes, rank, virtual_stages=stages) == pytest.approx(micro_batches_in_flight(plan, rank))


def test_weight_passes_wait_no_longer_than_the_first_rank_does() -> None:
    """ZB-H1 keeps what W needs of as many micro-batches on every rank as 1F1B keeps on the first (Qi et al. 2024)."""
    passes = simulate("zero_bubble", ranks=4, micro_batches=12)
    assert [peak_in_flight(passes, rank, until="W") for rank in range(4)] == [4, 4, 4, 4]


def test_a_schedule_as_it_is_printed() -> None:
    """Narayanan et al. 2021, figure 4 (upper): the first and the last of four ranks."""
    passes = simulate("1f1b", ranks=4, micro_batches=8)
    order = [" ".join(f"{one.kind}{one.micro_batch + 1}" for one in passes if one.rank == rank) for rank in (0, 3)]
    assert order[0].startswith("F1 F2 F3 F4 B1 F5 B2 F6 B3")
    assert order[1].startswith("F1 B1 F2 B2 F3 B3")
