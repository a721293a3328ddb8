"""Where a step's time goes, on made-up spans: nested operators, exchanges, the loss head, a device; and what would help."""

from __future__ import annotations

import pytest

from upshift.training.profiling.account import (
    DATA_RANGE,
    HEAD_RANGE,
    STEP_RANGE,
    UPDATE_RANGE,
    Account,
    HostTime,
    Span,
    device_time,
    kind_of,
    without_recording,
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
    assert kind_of(name) == kind


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
    found = HostTime(spans, [Span("gloo:all_reduce", 860, 950), Span("gloo:all_reduce", 900, 950)]).account()
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
    found = device_time(kernels, updates=[Span(UPDATE_RANGE, 290, 400)], steps=[Span(STEP_RANGE, 0, 400)])
    assert ms(found.seconds) == {
        "matrix products": 100, "attention": 40, "norms and elementwise": 20, "optimizer": 40, "communication": 50,
        "idle and dispatch": 10 + 80 + 60,
    }  # fmt: skip


def test_recording_is_taken_off_and_the_step_is_whole() -> None:
    account = Account(
        {"matrix products": 2.0, "idle and dispatch": 4.0}, {}, {"matrix products": 10, "idle and dispatch": 90}, {}
    )
    left = without_recording(account, profiled=6.0, plain=4.0)
    assert sum(left.values()) == pytest.approx(4.0)
    assert left["matrix products"] == pytest.approx(2.0, rel=1e-3)  # what recording takes is around small operators
