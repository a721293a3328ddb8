"""flex_attention, FlashAttention 2 and 3: legal where they run, chosen for packed sequences, costed by what is visible."""

from __future__ import annotations

from typing import Any

import pytest
from made_profile import make_profile

from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.models.profile import ModelProfile
from upshift.planning.cost.memory import predict_memory
from upshift.planning.cost.segments import plan_trace
from upshift.planning.cost.time import predict_time
from upshift.planning.plan import Plan
from upshift.planning.search import constraints
from upshift.planning.search.constraints import PACKED_KERNELS
from upshift.planning.search.enumerate import enumerate_plans
from upshift.planning.search.space import parse_fixed
from upshift.planning.workload import LengthHistogram, Workload

LENGTHS = LengthHistogram(sequence_length=4096, lengths=(256, 512, 4096), counts=(100, 50, 1), num_tokens=55_296)
MIXED = Workload(sequence_length=4096, global_batch=16, lengths=LENGTHS, total_steps=100)
EVEN = Workload(sequence_length=4096, global_batch=16, total_steps=100)


@pytest.fixture
def profile() -> ModelProfile:
    made = make_profile()
    steps = tuple(step.changed(masked=masked) for step in made.steps for masked in (False, True))
    return made.changed(steps=steps, declares=made.declares.changed(attention_kernels=("sdpa", *PACKED_KERNELS)))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "find_spec", lambda library: object())


def kernels(host: str, profile: ModelProfile, workload: Workload, **fixed: Any) -> set[tuple[str, bool]]:
    return {(plan.attention, plan.packing) for plan in enumerate_plans(describe(host), profile, workload, fixed=fixed)}


def test_they_are_in_the_space_for_packed_sequences_only(profile: ModelProfile, installed: None) -> None:
    plain = {("sdpa", False), ("sdpa", True)}
    packed = {(name, True) for name in PACKED_KERNELS}
    assert kernels("1xh100", profile, MIXED) == plain | packed
    assert kernels("1xa100-80gb", profile, MIXED) == plain | packed - {("flash_attention_3", True)}
    assert kernels("1xh100", profile, EVEN) == {("sdpa", False)}
    assert kernels("1xh100", profile, EVEN, attention="flash_attention_2") == {("flash_attention_2", False)}
    plans = list(enumerate_plans(describe("1xh100"), profile, MIXED))
    assert {plan.precision for plan in plans if plan.attention == "flash_attention_2"} == {"bf16"}
    assert {plan.flattens for plan in plans if plan.attention == "flash_attention_2"} == {True}
    assert {plan.flattens for plan in plans if plan.attention == "flex_attention"} == {False}


def test_what_cannot_run_is_refused_with_the_next_step(profile: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "find_spec", lambda library: None)
    undeclared = make_profile()
    for name, host, model, words in (
        ("flash_attention_2", "1xh100", profile, "the library flash_attn is not installed: pip install flash-attn"),
        ("flash_attention_3", "1xh100", profile, "the library flash_attn_interface is not installed: build the hopper"),
        ("flash_attention_3", "1xa100-80gb", profile, "it needs compute capability 9.0 to below 10.0, and this device's is 8.0"),
        ("flex_attention", "1xh100", undeclared, "TestForCausalLM does not declare it"),
        ("flash_attention_2", "8xh100", profile, "not installed"),
    ):
        with pytest.raises(RequestError, match=f"attention={name} is not possible here; use one of sdpa.*{words}"):
            parse_fixed((f"attention={name}",), describe(host), model, MIXED)


def test_16_bits_and_whole_recomputation(profile: ModelProfile, installed: None) -> None:
    with pytest.raises(RequestError, match="flash_attention_2 computes in 16 bits only; use precision=bf16 or fp16"):
        list(enumerate_plans(describe("1xh100"), profile, MIXED, fixed={"attention": "flash_attention_2", "precision": "fp32"}))


@pytest.mark.parametrize("name", PACKED_KERNELS)
def test_only_what_is_visible_costs_time(name: str, profile: ModelProfile) -> None:
    host = describe("1xh100")
    plain = Plan(
        device="cuda", host="", model="", sequence_length=4096, per_device_train_batch_size=4, gradient_accumulation_steps=4,
        precision="bf16", packing=True,
    )  # fmt: skip
    plan = plain.changed(attention=name)
    trace = plan_trace(profile, plan, MIXED)
    assert trace is not None and (trace.attention, trace.masked) == ("sdpa", False)
    masked = plan_trace(profile, plain, MIXED)
    assert masked is not None and masked.masked
    mine, theirs = predict_time(profile, trace, plan, MIXED, host), predict_time(profile, masked, plain, MIXED, host)
    assert mine is not None and theirs is not None
    assert mine.terms["attention"] < 0.5 * theirs.terms["attention"]
    assert predict_memory(profile, trace, plan).peak == predict_memory(profile, masked, plain).peak  # made equal here
