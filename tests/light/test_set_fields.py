"""Each field of --set changes the plans, or is refused by its name: in training plans and in both kinds of inference plans."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from made_generators import LLAMA_8B
from made_profile import make_profile

from upshift.cli.plan import questions
from upshift.errors import NothingFits, RequestError
from upshift.hardware import describe
from upshift.models.source import ModelSource
from upshift.planning.analysis.what_if import explain_choice, shadow_prices
from upshift.planning.inference.plan import CHANGES_MATHEMATICS, InferencePlan, InferenceWorkload
from upshift.planning.inference.planner import plan_profile
from upshift.planning.inference.space import FIXED_BY_REQUEST
from upshift.planning.layout import Layout
from upshift.planning.optimizers import optimizers
from upshift.planning.plan import Plan, plain_default
from upshift.planning.planner import Planning
from upshift.planning.search import space
from upshift.planning.search.ranking import Candidate, cost_plan
from upshift.planning.search.search import search
from upshift.planning.search.space import parse_fixed, settable_fields
from upshift.planning.workload import Workload

TASKS = {
    "generate": InferenceWorkload(prompt_length=700, output_length=64, concurrency=4, allow=tuple(CHANGES_MATHEMATICS)),
    "encode": InferenceWorkload(task="encode", prompt_length=128, concurrency=8, allow=tuple(CHANGES_MATHEMATICS)),
}
INFERENCE_FIELDS = [name for name in InferencePlan.model_fields if name not in FIXED_BY_REQUEST]
EXAMPLES = {"optim_args": ["momentum=0.5", "momentum=0.9"], "mup_base": ["hidden_size=64", "hidden_size=128"]}


def values_of(kind: type, name: str) -> list[str]:
    """Return values of a field of a plan: every listed one, or several numbers."""
    if name in EXAMPLES:
        return EXAMPLES[name]
    if name == "optim":
        return list(optimizers())
    hint = get_type_hints(kind)[name]
    if hint is bool:
        return ["false", "true"]
    return [str(value) for value in get_args(hint) if value is not type(None) and not isinstance(value, type)] or ["1", "2", "8"]


def changes(answers: dict[str, Any]) -> bool:
    """Return whether two values gave two answers, or all but one were refused by name."""
    accepted = [answer for answer in answers.values() if not isinstance(answer, RequestError)]
    return len({str(answer) for answer in accepted}) == len(accepted)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", INFERENCE_FIELDS)
def test_a_field_changes_the_inference_plans_or_is_refused(task: str, name: str) -> None:
    answers: dict[str, Any] = {}
    for value in values_of(InferencePlan, name):
        try:
            document = plan_profile(LLAMA_8B, describe("4xh100"), TASKS[task], (f"{name}={value}",)).document()
        except (RequestError, NothingFits) as problem:
            assert name in str(problem)
            answers[value] = problem
            continue
        plans = [row["plan"] for row in document["plans"]]
        assert {str(plan[name]).lower() for plan in plans} == {value}
        answers[value] = document["plans"][0]["predicted"], [plan | {name: None} for plan in plans]
    answers.pop("fp16", None)  # it costs what bf16 costs
    assert changes(answers), f"{name} changes no number"


@cache
def training(on: str, sequence_length: int, fixed: tuple[str, ...]) -> Planning:
    host = describe(on)
    profile = make_profile(longest=sequence_length)
    workload = Workload(sequence_length=sequence_length, global_batch=2)
    ranking = search(host, profile, workload, fixed=parse_fixed(fixed, host, profile, workload))
    default = cost_plan(plain_default(host, profile, workload), host=host, profile=profile, workload=workload)
    assert isinstance(default, Candidate)
    return Planning(host, profile, workload, ranking, default)


@pytest.mark.parametrize("name", settable_fields())
def test_every_training_plan_has_the_value_of_a_field(name: str) -> None:
    kind = Layout if name in Layout.model_fields else Plan
    answers: dict[str, bool] = {}
    for value in values_of(kind, name)[:3]:
        try:
            ranking = training("2xh100", 1024, (f"{name}={value}",)).ranking
        except RequestError as problem:
            answers[value] = name in str(problem) or value in str(problem)
            continue
        plans = [entry.plan for entry in (*ranking.candidates[:20], *ranking.rejected[:20])]
        values = {str(getattr(plan.layout if kind is Layout else plan, name)).lower() for plan in plans}
        answers[value] = values == {value}
    assert len(answers) > 1 and all(answers.values()), answers


def test_what_the_planner_fixed_is_fixed_for_the_questions_too() -> None:
    """Nothing fits without a field that no search takes by itself. Before, each question had no plan to compare with."""
    offload = "activation_offload=true"
    planning = replace(training("1xh100", 98304, (offload,)), added=(offload,))
    trace: Any = lambda length, variants: planning.profile  # noqa: E731
    other = explain_choice(planning, "optim=adamw_torch", fixed=(), trace=trace)
    assert other.outcome != "does not fit" and other.plan is not None and other.plan.activation_offload
    without = explain_choice(planning, "activation_offload=false", fixed=(), trace=trace)
    assert without.outcome == "does not fit" and without.plan is not None and not without.plan.activation_offload
    prices = shadow_prices(planning, fixed=("optim=adamw_torch",))
    assert any(price.plan is not None and price.plan.activation_offload for price in prices)


def test_a_place_on_the_disk_is_taken_for_every_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "disk_rate", lambda files: 2e9)
    monkeypatch.setattr(questions, "find_host", lambda name: describe("epyc-9654-768gb"))
    source = ModelSource(reference="made up", directory=tmp_path, config={})
    workload = Workload(sequence_length=1024, global_batch=2)
    fixed = ("weight_offload=disk",)
    host = questions.Request(source, workload, None, fixed, as_json=True).host()
    assert space.read_fixed(fixed, host, workload, quantized=False) == {"weight_offload": "disk"}
    described = questions.Request(source, workload, "epyc-9654-768gb", fixed, as_json=True).host()
    with pytest.raises(RequestError, match="weight_offload=disk is not possible here"):
        space.read_fixed(fixed, described, workload, quantized=False)
