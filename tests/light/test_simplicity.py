"""The simplest plan wins among those that the prediction cannot tell apart, and the answer says so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import exp, expm1
from typing import Any

import pytest
from made_up_plans import made_up_planning

from upshift.hardware import describe
from upshift.planning.inference.plan import InferencePlan
from upshift.planning.inference.planner import _complexity
from upshift.planning.layout import Layout
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate, Ranking
from upshift.planning.search.simplicity import (
    MECHANISM_ERROR,
    PAIR_ERROR,
    complexity,
    move_simplest,
    simplest_first,
    why_simplest,
)
from upshift.record import Basis


@pytest.fixture(scope="module")
def planning() -> Planning:
    return made_up_planning()


def candidate_of(planning: Planning, speed: float, layout: Layout, **plan: Any) -> Candidate:
    best = planning.ranking.candidates[0]
    changed = {"layout": layout, "activation_checkpointing": 0, **plan}
    return replace(best, plan=best.plan.model_copy(update=changed), tokens_per_second=speed)


SHARDED = Layout(fully_shard="weights", shard_size=8)
DIVIDED = Layout(fully_shard="weights", shard_size=4, tensor_parallel=2, sequence_parallel=True)
PLAIN = Layout()
NVLINK = describe("8xh100")


def first(*candidates: Candidate, **options: Any) -> Candidate:
    return simplest_first(Ranking(candidates=list(candidates)), NVLINK, **options).candidates[0]


def test_each_mechanism_adds(planning: Planning) -> None:
    def of(layout: Layout, **plan: Any) -> tuple[int, int]:
        return complexity(candidate_of(planning, 1.0, layout, **plan).plan, NVLINK)

    assert of(PLAIN) == (0, 0) < of(SHARDED) < of(DIVIDED)
    assert of(SHARDED) < of(SHARDED.changed(shard_size=4))  # replicas of shards
    assert of(PLAIN, activation_checkpointing=4) == (1, 1)
    assert of(SHARDED, activation_checkpointing=4) < of(Layout(tensor_parallel=4))  # as many, and taken up earlier
    stages = Layout(pipeline_parallel=2)
    cards = describe("8x4090")
    tensor = candidate_of(planning, 1.0, Layout(tensor_parallel=2)).plan
    pipeline = candidate_of(planning, 1.0, stages).plan
    assert complexity(tensor, NVLINK) < complexity(pipeline, NVLINK)
    assert complexity(tensor, cards) > complexity(pipeline, cards)
    experts, ring = Layout(expert_parallel=2), Layout(context_parallel=2)
    for layout in (experts, ring.changed(context_kind="ulysses")):  # these exchange in every layer, too
        plan_of_layout = candidate_of(planning, 1.0, layout).plan
        assert complexity(plan_of_layout, cards) > complexity(plan_of_layout, NVLINK)
    assert complexity(candidate_of(planning, 1.0, ring).plan, cards) == of(ring)
    assert of(DIVIDED) <= of(stages) < of(stages.changed(pipeline_schedule="zero_bubble"))


def test_the_simplest_wins_within_the_error_and_not_beyond_it(planning: Planning) -> None:
    fastest = candidate_of(planning, 100.0, DIVIDED)
    limit = 100.0 * exp(-MECHANISM_ERROR)
    near, far = candidate_of(planning, limit + 0.5, PLAIN), candidate_of(planning, limit - 0.5, PLAIN)
    sharded = candidate_of(planning, 90.0, SHARDED)
    assert first(fastest, sharded, near) is near
    assert first(fastest, sharded, far) is sharded
    assert first(fastest, far) is fastest
    assert first(fastest, sharded, near, fits=lambda candidate: candidate is not near) is sharded
    ranked = simplest_first(Ranking(candidates=[fastest, sharded, near]), NVLINK).candidates
    assert ranked == [near, fastest, sharded]


def test_plans_with_the_same_mechanisms_are_told_apart_better(planning: Planning) -> None:
    """Two shardings differ in the number of their replicas alone."""
    hybrid = candidate_of(planning, 100.0, SHARDED.changed(shard_size=4))
    limit = 100.0 * exp(-PAIR_ERROR)
    near, far = (candidate_of(planning, speed, SHARDED) for speed in (limit + 0.5, limit - 0.5))
    assert first(hybrid, near) is near and first(hybrid, far) is hybrid
    told = why_simplest([near, hybrid])
    assert told is not None and f"{expm1(PAIR_ERROR):.0%}" in told
    other = why_simplest([candidate_of(planning, 90.0, PLAIN), hybrid])
    assert other is not None and f"{expm1(MECHANISM_ERROR):.0%}" in other


@dataclass
class Served:
    plan: InferencePlan
    tokens_per_second: float


@pytest.mark.parametrize(
    ("host", "order"),
    [("4xl40s", ("copies", "pipeline", "tensor", "both")), ("4xh100", ("copies", "tensor", "pipeline", "both"))],
)
def test_of_served_plans_that_are_as_fast_the_simplest_is_first(host: str, order: tuple[str, ...]) -> None:
    """vLLM's guide takes pipelines on GPUs without NVLink."""
    degrees = {"copies": (1, 1), "pipeline": (1, 4), "tensor": (4, 1), "both": (2, 2)}
    served = {
        name: InferencePlan(
            device="cuda", host="h", model="m", weights="bf16", kv_cache="bf16", tensor_parallel=tensor, pipeline_parallel=stages,
            max_concurrency=8, prefill_chunk_tokens=512, execution="graphs",
        )
        for name, (tensor, stages) in degrees.items()
    }  # fmt: skip
    for number, name in enumerate(order):
        left = [Served(served[other], 100.0 + rank) for rank, other in enumerate(order[number:])]
        ranked = move_simplest(left[::-1], partial(_complexity, host=describe(host)), lambda candidate: True)
        assert ranked[0].plan is served[name]


def test_what_was_measured_or_rounds_otherwise_is_told_apart(planning: Planning) -> None:
    fastest, near = candidate_of(planning, 100.0, DIVIDED), candidate_of(planning, 95.0, PLAIN)
    measured = replace(fastest, bases={"step": Basis(tier="measured")})
    assert first(measured, near) is measured
    assert first(fastest, candidate_of(planning, 95.0, PLAIN, precision="fp32")) is fastest


def test_the_answer_names_the_fastest(planning: Planning) -> None:
    fastest, near = candidate_of(planning, 100.0, SHARDED), candidate_of(planning, 90.0, PLAIN)
    told = why_simplest([near, fastest])
    assert told is not None and "+11.1%" in told and "zero3 8" in told
    assert why_simplest([fastest, near]) is None
    changed = replace(planning, ranking=replace(planning.ranking, candidates=[near, fastest]))
    layout = next(reason for reason in changed.reasons if reason.choice == "layout")
    assert (layout.value, layout.runner_up) == ("data parallel", "zero3 8")
    assert changed.document()["preference"] == told
