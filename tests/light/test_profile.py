"""Where a step's time goes, on made-up spans: nested operators, exchanges, the loss head, a device; and what would help."""

from __future__ import annotations

import pytest
from made_profile import make_profile

from upshift.hardware import describe
from upshift.planning.analysis.bottleneck import Measured, find_changes, sum_by_kind
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.search.search import search
from upshift.planning.workload import Workload
from upshift.training.profiling.breakdown import (
    DATA_RANGE,
    HEAD_RANGE,
    STEP_RANGE,
    UPDATE_RANGE,
    HostBreakdown,
    Span,
    TimeBreakdown,
    break_down_device,
    kind_of_operator,
    subtract_recording,
)

BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


def ms(seconds: dict[str, float]) -> dict[str, int]:
    return {kind: round(1e9 * value) for kind, value in seconds.items() if value > 0}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix products"), ("mkldnn::_linear_pointwise", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"), ("upshift::block_attention", "attention"),
        ("aten::native_layer_norm", "norms and elementwise"), ("CompiledFunction", "norms and elementwise"),
        ("gloo:all_reduce", "communication"), ("c10d::allreduce_", "communication"),
        ("aten::view", "idle and dispatch"), ("AddmmBackward0", "idle and dispatch"), ("aten::linear", "idle and dispatch"),
    ],
)  # fmt: skip
def test_kinds_of_operators(name: str, kind: str) -> None:
    assert kind_of_operator(name) == kind


def test_the_innermost_has_the_time_and_all_of_it_is_somewhere() -> None:
    spans = [
        Span("before", 0, 50),
        Span(STEP_RANGE, 100, 1100),
        Span(DATA_RANGE, 100, 200), Span("aten::copy_", 120, 180),
        Span("aten::linear", 200, 400), Span("aten::addmm", 210, 390, 1),
        Span("aten::_flash_attention", 400, 500), Span("aten::mm", 410, 490),
        Span(HEAD_RANGE, 500, 600), Span("aten::mm", 500, 580, 7),
        Span(BACKWARD, 600, 700, 7), Span("aten::mm", 610, 700),
        Span(BACKWARD, 700, 800, 1), Span("aten::mm", 700, 800),
        Span(UPDATE_RANGE, 800, 1000), Span("aten::addcdiv_", 800, 850), Span("c10d::allreduce_", 850, 860),
    ]  # fmt: skip
    found = HostBreakdown(spans, [Span("gloo:all_reduce", 860, 950), Span("gloo:all_reduce", 900, 950)]).compute()
    assert ms(found.seconds) == {
        "data": 100, "matrix products": 180 + 100, "attention": 100, "head and loss": 80 + 90, "optimizer": 50 + 50,
        "communication": 10 + 90, "idle and dispatch": 20 + 20 + 10 + 100,
    }  # fmt: skip
    assert sum(found.seconds.values()) == pytest.approx(1000e-9)
    assert ms(found.head) == {"matrix products": 170}


def test_a_device_waits_for_what_is_not_hidden() -> None:
    kernels = [
        Span("sm90_xmma_gemm_bf16", 0, 100), Span("ncclDevKernel_AllReduce", 50, 150), Span("flash_fwd_kernel", 160, 200),
        Span("elementwise_kernel", 200, 220), Span("vectorized_elementwise_kernel", 300, 340),
    ]  # fmt: skip
    found = break_down_device(kernels, updates=[Span(UPDATE_RANGE, 290, 400)], steps=[Span(STEP_RANGE, 0, 400)])
    assert ms(found.seconds) == {
        "matrix products": 100, "attention": 40, "norms and elementwise": 20, "optimizer": 40, "communication": 50,
        "idle and dispatch": 10 + 80 + 60,
    }  # fmt: skip


def test_recording_is_taken_off_and_the_step_is_whole() -> None:
    account = TimeBreakdown(
        {"matrix products": 2.0, "idle and dispatch": 4.0}, {}, {"matrix products": 10, "idle and dispatch": 90}, {}
    )
    left = subtract_recording(account, profiled=6.0, plain=4.0)
    assert sum(left.values()) == pytest.approx(4.0)
    assert left["matrix products"] == pytest.approx(2.0, rel=1e-3)  # what recording takes is around small operators


def best_with(**fixed: object) -> Planning:
    workload = Workload(sequence_length=1024, global_batch=32)
    profile, host = make_profile(), describe("1xa100-80gb")
    ranking = search(host, profile, workload, fixed=fixed)
    return Planning(host, profile, workload, ranking, ranking.candidates[0])


@pytest.fixture(scope="module")
def planning() -> Planning:
    return best_with(precision="fp32", torch_compile="off")


def measured(planning: Planning, **times: float) -> Measured:
    """As predicted, but for some kinds."""
    seconds = sum_by_kind(planning.default.time.terms)
    seconds |= {kind: seconds.get(kind, 0.0) * factor for kind, factor in times.items()}
    return Measured(planning.host, planning.profile, planning.workload, planning.default, seconds)


def test_what_would_help_is_what_the_planner_finds(planning: Planning) -> None:
    here = measured(planning)
    changes = find_changes(here)
    assert changes[0].choice == "precision" and changes[0].values["precision"] == "bf16" and not changes[0].allow
    assert [change.gain for change in changes] == sorted((change.gain for change in changes), reverse=True)
    [other] = search(
        planning.host, planning.profile, planning.workload, fixed=dict(_fixed(planning.default.plan), precision="bf16")
    ).candidates  # fmt: skip
    assert changes[0].gain == pytest.approx(here.total(planning.default) / here.total(other) - 1)
    assert not [one for one in find_changes(here, fixed=("precision",)) if "precision" in one.values]


def test_what_was_measured_decides_what_helps() -> None:
    """Where elementwise work takes twice as long as the rates say, what fuses it brings more."""
    uncompiled = best_with(precision="bf16", torch_compile="off")
    gains = [
        {change.choice: change.gain for change in find_changes(measured(uncompiled, **{"norms and elementwise": factor}))}
        for factor in (1.0, 2.0)
    ]
    assert gains[1]["compilation"] > 1.2 * gains[0]["compilation"] > 0


def test_waiting_for_data_is_no_choice_of_a_plan(planning: Planning) -> None:
    here = measured(planning)
    seconds = here.seconds | {"data": sum(here.seconds.values())}
    waiting = Measured(here.host, here.profile, here.workload, here.candidate, seconds)
    gain = find_changes(here)[0].gain
    assert find_changes(waiting)[0].gain == pytest.approx(2 / (1 + 1 / (1 + gain)) - 1, rel=1e-3)


def _fixed(plan: Plan) -> dict[str, object]:
    names = (
        "attention", "torch_compile", "optim", "optim_args", "activation_checkpointing", "recompute_granularity", "packing",
        "loss_chunk_tokens", "per_device_train_batch_size", "optimizer_in_backward",
    )  # fmt: skip
    return {name: getattr(plan, name) for name in names}
