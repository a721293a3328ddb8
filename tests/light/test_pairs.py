"""Plans for pairs of preferences: micro-batches and ranks hold whole pairs, and other choices are rejected; without torch."""

from __future__ import annotations

import pytest
from made_profile import make_profile
from made_up_plans import made_up_planning

from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.planning.plan import Plan, plain_default
from upshift.planning.search.constraints import conflict_with_pairs
from upshift.planning.search.ranking import Ranking
from upshift.planning.search.search import search
from upshift.planning.search.space import parse_fixed
from upshift.planning.workload import LengthHistogram, Workload
from upshift.reports.plan.page import plan_page_html
from upshift.reports.plan.what_if_grid import family_grid

PROFILE = make_profile()
SHORT = LengthHistogram(sequence_length=4096, lengths=(64, 512), counts=(30, 10), num_tokens=30 * 64 + 10 * 512)
PAIRS = Workload(sequence_length=4096, global_batch=24, rows_together=2, lengths=SHORT)
HOSTS = ("1xh100", "4xh100", "epyc-9654-768gb")


def searched(host: str, *fixed: str, workload: Workload = PAIRS) -> Ranking:
    here = describe(host)
    return search(here, PROFILE, workload, fixed=parse_fixed(fixed, here, PROFILE, workload))


@pytest.mark.parametrize("host", HOSTS)
def test_every_plan_holds_whole_pairs_on_each_rank(host: str) -> None:
    plans: list[Plan] = [candidate.plan for candidate in searched(host).candidates]
    assert len(plans) > 5
    for plan in plans:
        assert plan.global_batch == 24 and plan.per_device_train_batch_size % 2 == 0
        assert conflict_with_pairs(plan) is None


def test_without_pairs_there_are_plans_that_divide_them() -> None:
    of_sequences = searched("1xh100", workload=PAIRS.changed(rows_together=1)).candidates
    assert any(conflict_with_pairs(candidate.plan) is not None for candidate in of_sequences)


@pytest.mark.parametrize("host", HOSTS)
def test_the_plain_default_holds_whole_pairs(host: str) -> None:
    plan = plain_default(describe(host), PROFILE, PAIRS)
    assert plan.global_batch == 24 and plan.per_device_train_batch_size % 2 == 0 and conflict_with_pairs(plan) is None


@pytest.mark.parametrize(
    ("host", "fixed", "words"),
    [
        ("1xh100", "per_device_train_batch_size=3", "per_device_train_batch_size=3 is not for --objective dpo"),
        ("1xh100", "per_device_train_batch_size=10", "the global batch of 12 pairs; use divisors of it: 1, 2, 3, 4, 6, 12 (per_"),
        ("1xh100", "gradient_accumulation_steps=24", "does not divide the global batch of 12 pairs"),
        ("4xh100", "tensor_parallel=2", "tensor_parallel=2 is not for --objective dpo"),
        ("4xh100", "pipeline_parallel=2", "pipeline_parallel=2 is not for --objective dpo"),
        ("1xh100", "packing=true", "two rows of a pair are compared"),
    ],
)
def test_a_choice_that_is_not_for_pairs_is_rejected_in_one_line(host: str, fixed: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        searched(host, fixed)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_page_of_a_planning_shows_micro_batches_of_whole_pairs() -> None:
    planning = made_up_planning(on="1xa100-40gb", global_batch=24, rows_together=2)
    grid = family_grid(planning)
    assert grid is not None and grid.micro_batches == (2, 4, 6, 8, 12, 24)
    for row in grid.cells:
        for candidate in (candidate for cell in row for candidate in cell.plans):
            assert conflict_with_pairs(candidate.plan) is None
    assert "global batch 12 pairs of sequences of" in plan_page_html(planning, model="MODEL")


def test_a_model_that_padding_changes_is_rejected() -> None:
    changed = PROFILE.model_copy(update={"isolation": PROFILE.isolation.model_copy(update={"padding": "none"})})
    with pytest.raises(RequestError, match="pads two answers to one length, and padding changes the results"):
        search(describe("1xh100"), changed, PAIRS, fixed={})


def test_a_model_of_another_kind_is_rejected() -> None:
    masked = PROFILE.model_copy(update={"objective": "masked-lm"})
    with pytest.raises(RequestError, match="is of the kind masked-lm"):
        search(describe("1xh100"), masked, PAIRS, fixed={})


def test_a_reward_model_is_planned_for_pairs() -> None:
    """The made profile has no traces with masks, which a classifier needs. So its plans are legal, and have no price."""
    rewarding = PROFILE.model_copy(update={"objective": "sequence-classification"})
    plans = [rejected.plan for rejected in search(describe("1xh100"), rewarding, PAIRS, fixed={}).rejected]
    assert len(plans) > 5 and all(conflict_with_pairs(plan) is None and not plan.packing for plan in plans)
