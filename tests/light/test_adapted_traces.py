"""Traces of layers that are compiled, divided or recomputed: what a layer leaves is freed again, and figures by hand."""

from __future__ import annotations

import pytest
from made_profile import FEED_FORWARD, HIDDEN, LAYERS, VOCABULARY, make_profile
from made_requests import model_of

from upshift.models.profile import PassCost, Polynomial, ReleasedGradients, Segment, StackTrace, StepTrace
from upshift.planning.cost.activation_checkpointing import RANDOM_STATE
from upshift.planning.cost.loss_head import apply_loss_kernel
from upshift.planning.cost.parallel_trace import add_saved_bytes, expert_elements, expert_parallel_trace, tensor_parallel_trace
from upshift.planning.cost.segments import (
    PlacedSegment,
    chunk_scratch_bytes,
    compiled_segment,
    place_segments,
    plan_trace,
)
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.workload import LengthHistogram, Workload

PROFILE = make_profile()
NOTHING = Polynomial()


def pass_of(left: float, *rises: float, released: float = 0.0) -> PassCost:
    return PassCost(
        left=Polynomial(bs=left), released=Polynomial(bs=released), rise=tuple(Polynomial(bs=rise) for rise in rises),
        matmul_flops=NOTHING, attention_flops=NOTHING, moved_bytes=Polynomial(bs=16.0), matmul_bytes=NOTHING, num_kernels=1,
    )  # fmt: skip


def segment_of(left: float, *, released: float = 0.0, compiled: float | None = None) -> Segment:
    """Return a segment whose backward pass frees what its forward pass leaves."""
    backward = pass_of(released - left, 50.0, 70.0)
    gradients_go = ReleasedGradients(rise=(Polynomial(bs=60.0),), moments=((9, Polynomial(bs=65.0)),), born=Polynomial(one=36.0))
    return Segment(
        forward=pass_of(left, 120.0, 80.0, released=released), backward=backward, backward_accumulating=backward,
        gradients_go=gradients_go, compiled=None if compiled is None else Polynomial(bs=compiled),
    )  # fmt: skip


PLAIN = segment_of(100.0, released=10.0, compiled=30.0)
REMADE = segment_of(8.0)


def left_over(segment: Segment) -> list[float]:
    """Return what each backward pass leaves of the bytes that the forward pass left, in every coefficient."""
    kept = [left - released for left, released in zip(segment.forward.left, segment.forward.released, strict=True)]
    passes = (segment.backward, segment.backward_accumulating)
    return [left + freed for cost in passes for left, freed in zip(kept, cost.left, strict=True)]


def trace_of(head: Segment = PLAIN) -> StepTrace:
    gaps = (REMADE, head)
    return StepTrace(
        precision="bf16", attention="sdpa", masked=False, tensor_parallel=1, gaps=gaps, gaps_recomputed={"full": gaps},
        chunked_gap=gaps[1], stacks=(StackTrace(plain=(PLAIN,), recomputed={"full": (REMADE,)}),),
    )  # fmt: skip


def plan_of(**fields: object) -> Plan:
    plain = {"device": "cuda", "host": "h", "model": "m", "sequence_length": 1024, "per_device_train_batch_size": 2}
    return Plan(**{**plain, "precision": "bf16", **fields})  # type: ignore[arg-type]


def segments_of(trace: StepTrace) -> list[Segment]:
    stack = trace.stacks[0]
    return [*trace.gaps, *stack.plain, *stack.recomputed["full"]]


def divided(ranks: int, *, saves_inputs: bool) -> StepTrace:
    return tensor_parallel_trace(
        trace_of(), trace_of(), ranks, sequence_parallel=True, hidden_size=HIDDEN, saves_inputs=saves_inputs
    )


def adapted_segments() -> list[Segment]:
    extra = Polynomial(one=3.0, bs=5.0)
    loss_kernels = [plan_of(loss_kernel=kernel) for kernel in ("compiled", "fused")]
    layouts = [Layout(tensor_parallel=4, vocabulary_parallel=True, sequence_parallel=shared) for shared in (False, True)]
    loss_plans = [*loss_kernels, *(plan_of(num_processes=4, layout=layout) for layout in layouts)]
    remade_layers = plan_of(device="cpu", activation_checkpointing=LAYERS // 2)
    placed = place_segments(PROFILE, trace_of(), remade_layers)
    return [
        compiled_segment(PLAIN, PLAIN), compiled_segment(REMADE, PLAIN), add_saved_bytes(PLAIN, extra, saves=True),
        add_saved_bytes(PLAIN, extra, saves=False), *segments_of(divided(4, saves_inputs=True)),
        *segments_of(divided(4, saves_inputs=False)), *(item.segment for item in placed),
        *(apply_loss_kernel(PROFILE, trace_of(), plan).gaps[0] for plan in loss_plans),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(adapted_segments())))
def test_the_backward_pass_frees_what_the_forward_pass_leaves(number: int) -> None:
    """However a layer is changed: a rest would add up over layers and steps."""
    assert left_over(adapted_segments()[number]) == pytest.approx([0.0] * 12)


def test_a_compiled_layer_saves_what_the_partition_saves() -> None:
    """90 bytes a token stay without it, 30 with it: 60 less, in the peaks too."""
    compiled = compiled_segment(PLAIN, PLAIN)
    assert (compiled.forward.left, compiled.forward.released) == (Polynomial(bs=30.0), NOTHING)
    assert [rise.bs for rise in compiled.forward.rise] == [120.0 - 70.0, 80.0 - 70.0, 30.0]
    assert [rise.bs for rise in compiled.backward.rise] == [50.0, 70.0]
    assert compiled.gradients_go == PLAIN.gradients_go
    unknown = segment_of(100.0)
    assert compiled_segment(unknown, unknown) is unknown


def test_a_compiled_layer_that_is_recomputed_holds_less_in_its_backward_pass() -> None:
    compiled = compiled_segment(REMADE, PLAIN)
    assert compiled.forward == REMADE.forward
    for cost in (compiled.backward, compiled.backward_accumulating):
        assert [rise.bs for rise in cost.rise] == [50.0 - 60.0, 70.0 - 60.0]
    gradients_go = compiled.gradients_go
    assert gradients_go is not None
    assert (gradients_go.rise[0].bs, gradients_go.moments[0], gradients_go.born.one) == (0.0, (9, Polynomial(bs=5.0)), 36.0)


@pytest.mark.parametrize("saves", [True, False])
def test_more_bytes_are_saved_or_made_again(saves: bool) -> None:
    found = add_saved_bytes(PLAIN, Polynomial(bs=5.0), saves=saves)
    assert found.forward.left.bs == (105.0 if saves else 100.0)
    assert [rise.bs for rise in found.forward.rise] == [125.0, 85.0]
    assert [rise.bs for rise in found.backward.rise] == ([50.0, 70.0] if saves else [55.0, 75.0])


@pytest.mark.parametrize(("saves", "left", "backward"), [(True, 6144.0, 0.0), (False, 0.0, 6144.0)])
def test_sequence_parallel_ranks_gather_inputs_of_a_layer(saves: bool, left: float, backward: float) -> None:
    """Two inputs of 2,048 elements in bf16, of which four ranks lack three quarters: 6,144 bytes a token."""
    layer = divided(4, saves_inputs=saves).stacks[0].plain[0]
    assert layer.forward.left.bs == 100.0 / 4 + left
    assert (layer.forward.moved_bytes.bs, layer.backward.moved_bytes.bs) == (16.0 / 4, 16.0 / 4)
    assert layer.forward.released.bs == 10.0 / 4
    assert [rise.bs for rise in layer.forward.rise] == [120.0 / 4 + 6144.0, 80.0 / 4 + 6144.0]
    assert [rise.bs for rise in layer.backward.rise] == [50.0 / 4 + backward, 70.0 / 4 + backward]
    remade = divided(4, saves_inputs=saves).stacks[0].recomputed["full"][0]
    assert remade.forward.left.bs == 8.0 / 4
    assert [rise.bs for rise in remade.backward.rise] == [50.0 / 4 + 6144.0, 70.0 / 4 + 6144.0]


# --- where segments are placed ---------------------------------------------------------------------------------------


def layers_of(plan: Plan) -> list[PlacedSegment]:
    return [item for item in place_segments(PROFILE, trace_of(), plan) if item.is_layer]


def test_the_first_layers_are_recomputed_and_keep_the_random_state() -> None:
    """5,056 bytes on a CPU. Gaps before and behind them are those beside recomputed layers."""
    beside = (segment_of(11.0), segment_of(12.0))
    trace = trace_of().changed(gaps_recomputed={"full": beside})
    some = place_segments(PROFILE, trace, plan_of(device="cpu", activation_checkpointing=7))
    assert [(item.count, item.is_recomputed, item.is_layer, item.is_loss) for item in some] == [
        (1, False, False, False), (7, True, True, False), (LAYERS - 7, False, True, False), (1, False, False, True),
    ]  # fmt: skip
    assert (some[0].segment, some[-1].segment) == (beside[0], PLAIN)
    assert some[1].segment.forward.left == Polynomial(one=RANDOM_STATE.one, bs=8.0)
    assert some[2].segment == PLAIN
    on_gpu = layers_of(plan_of(activation_checkpointing=7))
    assert on_gpu[0].segment == REMADE
    everything = place_segments(PROFILE, trace, plan_of(activation_checkpointing=LAYERS))
    assert [item.segment for item in everything] == [beside[0], REMADE, beside[1]]
    nothing = place_segments(PROFILE, trace, plan_of())
    assert [item.segment for item in nothing] == [REMADE, PLAIN, PLAIN]


def test_a_layer_keeps_the_result_that_comes_back_from_the_ranks_of_its_heads() -> None:
    """2 bytes of each of 2,048 elements; two tensor-parallel ranks have half of them."""
    for tensor, extra in ((1, 4096.0), (2, 2048.0)):
        layout = Layout(context_parallel=2, context_kind="ulysses", tensor_parallel=tensor)
        plan = plan_of(num_processes=2 * tensor, layout=layout, activation_checkpointing=7)
        remade, plain = layers_of(plan)
        assert plain.segment == add_saved_bytes(PLAIN, Polynomial(bs=extra), saves=True)
        assert remade.segment == add_saved_bytes(REMADE, Polynomial(bs=extra), saves=False)
        ring = plan.changed(layout=layout.changed(context_kind="ring"))
        assert [item.segment for item in layers_of(ring)] == [REMADE, PLAIN]


def test_larger_chunks_of_a_loss_hold_more_than_the_traced_ones() -> None:
    """Traced with 512 tokens. A GPU has two copies of a chunk's logits in fp32, or the product for the weight's gradient."""
    on_cpu = plan_of(device="cpu", loss_chunk_tokens=2048)
    assert chunk_scratch_bytes(PROFILE, on_cpu) == 1536 * VOCABULARY * 2
    assert chunk_scratch_bytes(PROFILE, on_cpu.changed(precision="fp32")) == 1536 * VOCABULARY * 4
    assert chunk_scratch_bytes(PROFILE, on_cpu.changed(loss_chunk_tokens=512)) == 0.0
    assert chunk_scratch_bytes(PROFILE, on_cpu.changed(loss_chunk_tokens=256)) == 0.0
    on_gpu = plan_of(loss_chunk_tokens=2048)
    assert chunk_scratch_bytes(PROFILE, on_gpu) == (1536 * 2 + 8 * 2048) * VOCABULARY
    assert chunk_scratch_bytes(PROFILE, plan_of(loss_chunk_tokens=256)) == 2 * HIDDEN * VOCABULARY
    assert chunk_scratch_bytes(PROFILE.changed(vocab_size=None), on_gpu) == 0.0
    placed = place_segments(PROFILE, trace_of(), on_gpu)
    assert [item.scratch for item in placed] == [0.0, 0.0, (1536 * 2 + 8 * 2048) * VOCABULARY]


# --- which trace a plan has ------------------------------------------------------------------------------------------


def test_a_mask_is_built_for_packed_rows_and_for_padding_that_attention_would_see() -> None:
    """Kernels that know packed sequences need none, eager attention builds one anyway, and full rows have nothing to mask."""
    profile = model_of("full", "causal-lm", longest=4096)
    full = Workload(sequence_length=1024, global_batch=16)
    lengths = LengthHistogram(sequence_length=1024, lengths=(512,), counts=(4,), num_tokens=2048)
    ragged = full.changed(lengths=lengths)

    def traced(plan: Plan, workload: Workload, *, padding: str = "unmasked") -> tuple[str, bool]:
        isolation = profile.isolation.changed(padding=padding)
        trace = plan_trace(profile.changed(isolation=isolation), plan, workload)
        assert trace is not None
        return trace.attention, trace.masked

    assert traced(plan_of(), ragged) == ("sdpa", False)
    assert traced(plan_of(), ragged, padding="masked") == ("sdpa", True)
    assert traced(plan_of(), full, padding="masked") == ("sdpa", False)
    assert traced(plan_of(packing=True), ragged) == ("sdpa", True)
    assert traced(plan_of(packing=True, attention="block"), ragged) == ("block", True)
    assert traced(plan_of(packing=True, attention="eager"), ragged) == ("eager", False)
    assert traced(plan_of(packing=True, attention="flex_attention"), ragged) == ("sdpa", False)
    assert plan_trace(profile.changed(steps=()), plan_of(), full) is None
    alone = profile.changed(steps=tuple(step for step in profile.steps if step.tensor_parallel == 1))
    assert plan_trace(alone, plan_of(num_processes=2, layout=Layout(tensor_parallel=2)), full) is None


def test_experts_are_counted_in_the_layers_that_have_them() -> None:
    """Eight layers without experts, which are smaller: the others have all of them."""
    mixture = model_of("mixture", "causal-lm", longest=4096)
    assert mixture.experts is not None
    experts = 3 * FEED_FORWARD * HIDDEN
    small = 4 * HIDDEN * HIDDEN
    stack = mixture.stacks[0].changed(
        traced_layers=(0, 8), assignment=(0,) * 8 + (1,) * (LAYERS - 8), layer_trainable=(small, small + experts)
    )
    profile = mixture.changed(stacks=(stack,), experts=mixture.experts.changed(parameters=(LAYERS - 8) * experts))
    assert expert_elements(profile, 0, 8) == 0.0
    assert expert_elements(profile, 8, 10) == 2 * experts
    assert expert_elements(profile, 0, LAYERS) == (LAYERS - 8) * experts
    assert expert_elements(PROFILE, 0, LAYERS) == 0.0
    only_experts = mixture.changed(stacks=(mixture.stacks[0].changed(layer_trainable=(experts,)),))
    assert expert_elements(only_experts, 0, 6) == 6 * experts
    constant = pass_of(10.0).changed(moved_bytes=Polynomial(one=1000.0, bs=1.0), num_kernels=100)
    layer = Segment(forward=constant, backward=constant, backward_accumulating=constant)
    trace = trace_of().changed(stacks=(StackTrace(plain=(layer, layer), recomputed={}),))
    plain, sparse = expert_parallel_trace(profile, trace, 4).stacks[0].plain
    share = 1.0 - experts / (small + experts) * 3 / 4
    assert plain == layer
    assert sparse.forward.moved_bytes == pytest.approx(Polynomial(one=1000.0 * share, bs=1.0))
    assert sparse.forward.num_kernels == round(100 * share)
