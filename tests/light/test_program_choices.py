"""Choices that training programs make beside a layout, by hand-computed bytes: master weights, who gathers and keeps what, losses
of their own words or kernel, fused kernels. None is taken unasked."""

from __future__ import annotations

from typing import Any

import pytest
from made_profile import FEED_FORWARD, HIDDEN, LAYERS, VOCABULARY, cost, make_profile

from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.models.profile import Experts, Polynomial, Segment
from upshift.planning.cost.communication import Transfer, Volumes
from upshift.planning.cost.loss_head import apply_loss_kernel, bytes_per_word
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.parallel_trace import expert_parallel_trace
from upshift.planning.cost.partition import deciding_stages, share_of
from upshift.planning.cost.segments import fused_trace, plan_trace, saved_bytes_per_token
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import conflict
from upshift.planning.search.ranking import Candidate, Coster
from upshift.planning.search.search import search
from upshift.planning.search.space import parse_fixed
from upshift.planning.workload import Workload

PROFILE, HOST = make_profile(), describe("8xh100")
WORKLOAD = Workload(sequence_length=4096, global_batch=64)
TOKENS = 4096


def plan_of(layout: Layout, **choices: Any) -> Plan:
    plain: dict[str, Any] = {"precision": "bf16", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    return Plan(
        device="cuda",
        host=HOST.fingerprint,
        model="feed",
        sequence_length=TOKENS,
        num_processes=8,
        layout=layout,
        **plain | choices,
    )


def peak(plan: Plan, profile: Any = PROFILE) -> float:
    found = Coster(HOST, profile, WORKLOAD).cost(plan)
    assert isinstance(found, Candidate)
    return found.memory.peak


def test_master_weights_take_6_bytes_a_parameter_and_12_divided() -> None:
    """Megatron Core user guide, "Distributed Optimizer": bf16 parameters, fp32 gradients: 6 + 12 / d."""
    plan = plan_of(Layout(fully_shard="optimizer", shard_size=8, master_weights=True))
    share, total = share_of(PROFILE, plan, deciding_stages(PROFILE, plan)[0]), PROFILE.parameters.total
    assert (share.weights, share.gradients) == (2.0 * total, 4.0 * total)
    assert share.optimizer == pytest.approx(12.0 * total / 8, rel=1e-6)  # and a step count a tensor
    plain = plan_of(Layout(fully_shard="optimizer", shard_size=8))
    assert share_of(PROFILE, plain, deciding_stages(PROFILE, plain)[0]).weights == 4.0 * total
    assert peak(plan) < peak(plain)


def gradients_of(plan: Plan) -> tuple[Transfer, ...]:
    return Volumes(PROFILE, plan, deciding_stages(PROFILE, plan)[0], Memo()).gradients()


def test_gradients_in_bf16_take_4_bytes_a_parameter_and_16_divided() -> None:
    """The same guide, "fp16 param, fp16 grads": 4 + 16 / d. The last 4 / d are fp32 copies while a rank updates its part."""
    masters = Layout(fully_shard="optimizer", shard_size=8, master_weights=True)
    plan, total = plan_of(masters.model_copy(update={"bf16_gradients": True})), PROFILE.parameters.total
    share = share_of(PROFILE, plan, deciding_stages(PROFILE, plan)[0])
    assert share.weights + share.gradients == 4.0 * total
    assert share.optimizer + share.workspace == pytest.approx(16.0 * total / 8, rel=1e-6)
    with_fp32 = plan_of(masters)
    assert peak(plan) < peak(with_fp32)
    reduced = [
        sum(transfer.num_bytes for transfer in gradients_of(one) if transfer.operation == name)
        for one in (plan, with_fp32)
        for name in ("reduce_scatter", "all_gather")
    ]
    assert reduced == [2.0 * total, 2.0 * total, 4.0 * total, 2.0 * total]


def test_gradients_in_bf16_are_for_programs_that_sum_them_so() -> None:
    text = ("bf16_gradients=true",)
    with pytest.raises(RequestError, match="bf16_gradients=true is not possible with Upshift; use false"):
        parse_fixed(text, HOST, PROFILE, WORKLOAD)
    megatron = WORKLOAD.changed(program="megatron")
    found = search(HOST, PROFILE, megatron, fixed=parse_fixed(text, HOST, PROFILE, megatron)).candidates
    assert found and all(one.plan.layout.bf16_gradients and one.plan.layout.master_weights for one in found)


def test_experts_that_ranks_share_are_divided_among_fewer() -> None:
    """Of 8 ranks that share experts none has a copy of another's: nothing of them is left to divide."""
    mixture = PROFILE.model_copy(update={"experts": Experts(count=8, parameters=PROFILE.parameters.layers // 2, per_token=2)})
    held = {}
    for degree in (1, 2, 8):
        plan = plan_of(Layout(fully_shard="optimizer", shard_size=8, expert_parallel=degree))
        held[degree] = share_of(mixture, plan, deciding_stages(mixture, plan)[0]).optimizer
    assert held[1] == pytest.approx(held[2]) == pytest.approx(held[8])  # an eighth of the whole, however it is shared


def test_experts_of_other_ranks_have_no_gradients_and_kernels_here() -> None:
    """Three quarters of each layer are experts; a fourth of those, and the rest, stay: 7 sixteenths."""
    experts = 3 * LAYERS * PROFILE.stacks[0].layer_trainable[0] // 4
    mixture = PROFILE.model_copy(update={"experts": Experts(count=8, parameters=experts, per_token=2)})
    trace = PROFILE.step(precision="bf16", attention="sdpa", masked=False)
    assert trace is not None
    layer = trace.stacks[0].plain[0]
    backward = layer.backward.model_copy(update={"rise": (Polynomial(one=1600.0, bs=3.0),), "num_kernels": 32})
    stack = trace.stacks[0].model_copy(update={"plain": (layer.model_copy(update={"backward": backward}),)})
    found = expert_parallel_trace(mixture, trace.model_copy(update={"stacks": (stack,)}), 4).stacks[0].plain[0]
    assert found.backward.rise == (Polynomial(one=700.0, bs=3.0),) and found.backward.num_kernels == 14
    assert found.forward.left == layer.forward.left  # all of it grows with tokens


def test_a_stage_has_the_parameters_of_its_own_layers() -> None:
    """The first half of the layers has no experts; the other half has all of them, a quarter on each of four ranks."""
    total, dense = PROFILE.parameters.layers, PROFILE.parameters.layers // 8
    small, large = dense // (LAYERS // 2), (total - dense) // (LAYERS // 2)
    experts = total - 2 * dense
    mixture = PROFILE.model_copy(
        update={
            "experts": Experts(count=8, parameters=experts, per_token=2),
            "stacks": (
                PROFILE.stacks[0].model_copy(
                    update={"assignment": (0,) * (LAYERS // 2) + (1,) * (LAYERS // 2), "layer_trainable": (small, large)}
                ),
            ),
        }
    )
    plan = plan_of(Layout(pipeline_parallel=2, expert_parallel=4))
    first, last = (share_of(mixture, plan, stage).weights / 4 for stage in deciding_stages(mixture, plan))
    outside = PROFILE.parameters.embedding  # and as many in the head
    assert first == pytest.approx(dense + outside, rel=1e-6)
    assert last == pytest.approx(total - dense - experts + experts / 4 + outside, rel=1e-6)


@pytest.mark.parametrize(("vocabulary", "hidden"), [(128256, 4096), (128256, 8192), (128256, 16384), (32000, 2048)])
@pytest.mark.parametrize("word", [-4, 0, 2, 4, 8, 10])
@pytest.mark.parametrize("state", [-6, 0, 2, 10])
def test_bytes_of_words_are_told_from_those_of_hidden_states(vocabulary: int, hidden: int, word: int, state: int) -> None:
    assert bytes_per_word(float(word * vocabulary + state * hidden + 8), vocabulary, hidden) == word


def head() -> Segment:
    """As it is traced: log-probabilities stay in fp32; logits and their fp32 copy, then two gradients are live beside them."""
    forward = cost(left=4.0 * VOCABULARY, rise=10.0 * VOCABULARY, flops=8.0, moved=16.0)
    backward = cost(left=-4.0 * VOCABULARY, rise=8.0 * VOCABULARY, flops=16.0, moved=32.0)
    return Segment(forward=forward, backward=backward, backward_accumulating=backward)


@pytest.mark.parametrize(
    ("kernel", "ranks", "forward", "entered", "backward"),
    [
        ("eager", 1, 10, 4, 12),
        ("compiled", 1, 2, 2, 4),
        ("fused", 1, 2, 2, 2),
        ("eager", 4, 3.5, 1, 4),
        ("fused", 4, 0.5, 0.5, 0.5),
    ],
)
def test_live_bytes_of_a_word(kernel: str, ranks: int, forward: float, entered: float, backward: float) -> None:
    layout = Layout(tensor_parallel=ranks, vocabulary_parallel=ranks > 1)
    plan = plan_of(layout, loss_kernel=kernel)
    trace = PROFILE.step(precision="bf16", attention="sdpa", masked=False)
    assert trace is not None
    gap = apply_loss_kernel(PROFILE, trace.model_copy(update={"gaps": (trace.gaps[0], head())}), plan).gaps[-1]
    assert gap.forward.rise[0].bs == forward * VOCABULARY
    assert gap.forward.left.bs == entered * VOCABULARY == -gap.backward.left.bs
    assert gap.forward.left.bs + gap.backward.rise[0].bs == backward * VOCABULARY
    assert gap.forward.matmul_flops.bs == 8.0 / ranks


def test_fused_kernels_keep_what_is_around_matrix_products() -> None:
    """Q, K, V, O: 4 x 2048; gate, up and what goes down: 3 x 8192; two norms' inputs and outputs: 4 x 2048; 16 sums in fp32."""
    elements = 4 * HIDDEN + 3 * FEED_FORWARD + 4 * HIDDEN
    assert saved_bytes_per_token(PROFILE, plan_of(Layout(), fused_kernels=True)) == 2 * elements + 4 * 16
    shared = Layout(tensor_parallel=4, sequence_parallel=True, gather_again=True)
    assert saved_bytes_per_token(PROFILE, plan_of(shared, fused_kernels=True)) == (2 * elements + 4 * 16) / 4
    gathered = Layout(tensor_parallel=4, sequence_parallel=True)
    more = saved_bytes_per_token(PROFILE, plan_of(gathered, fused_kernels=True)) - saved_bytes_per_token(
        PROFILE, plan_of(shared, fused_kernels=True)
    )
    assert more == 2 * 2 * HIDDEN * 3 / 4
    trace = PROFILE.step(precision="bf16", attention="sdpa", masked=False)
    assert trace is not None
    plan = plan_of(Layout(), fused_kernels=True)
    layer = fused_trace(PROFILE, trace, plan).stacks[0].plain[0]
    assert layer.forward.left == Polynomial(bs=saved_bytes_per_token(PROFILE, plan))
    assert layer.backward.left.bs == -layer.forward.left.bs


def test_a_token_is_kept_by_each_of_its_experts() -> None:
    shapes = tuple(
        shape.model_copy(update={"shape": size, "count": LAYERS})
        for shape, size in zip(PROFILE.parameters.trainable_shapes, ((8, 2 * 512, HIDDEN), (8, HIDDEN, 512)), strict=False)
    )
    mixture = PROFILE.model_copy(
        update={
            "parameters": PROFILE.parameters.model_copy(update={"trainable_shapes": shapes}),
            "experts": Experts(count=8, parameters=LAYERS * 8 * 3 * 512 * HIDDEN, per_token=2),
        }
    )
    elements = 2 * (3 * 512 + HIDDEN) + 4 * HIDDEN
    assert saved_bytes_per_token(mixture, plan_of(Layout(), fused_kernels=True)) == 2 * elements + 4 * 16


def test_gathering_again_holds_two_whole_inputs_of_a_layer_less() -> None:
    tensor = {"fully_shard": "optimizer", "shard_size": 2, "tensor_parallel": 4, "sequence_parallel": True}
    kept, again = (plan_trace(PROFILE, plan_of(Layout(**tensor, gather_again=g)), WORKLOAD) for g in (False, True))  # type: ignore[arg-type]
    assert kept is not None and again is not None
    layers = [trace.stacks[0].plain[0] for trace in (kept, again)]
    assert layers[0].forward.left.bs - layers[1].forward.left.bs == 2 * 2 * HIDDEN * 3 / 4
    assert layers[0].forward.rise == layers[1].forward.rise
    times = [Coster(HOST, PROFILE, WORKLOAD).cost(plan_of(Layout(**tensor, gather_again=g))) for g in (False, True)]  # type: ignore[arg-type]
    waits = [found.time.terms["tensor parallel"] for found in times if isinstance(found, Candidate)]
    assert 1.2 < waits[1] / waits[0] < 1.35  # five transfers for four, of which those of what enters layers are wider


def test_what_is_not_hidden_takes_longer() -> None:
    hidden, waited = (
        Coster(HOST, PROFILE, WORKLOAD).cost(plan_of(Layout(fully_shard="optimizer", shard_size=8, overlap=overlap)))
        for overlap in (True, False)
    )
    assert isinstance(hidden, Candidate) and isinstance(waited, Candidate)
    assert waited.time.total > hidden.time.total and waited.memory == hidden.memory


def test_attention_in_one_kernel_keeps_no_scores() -> None:
    trace = PROFILE.step(precision="bf16", attention="sdpa", masked=False)
    assert trace is not None
    layer = trace.stacks[0].plain[0]
    scores = Polynomial(bss=512.0)
    forward = layer.forward.model_copy(update={"left": scores, "rise": (scores,), "moved_bytes": scores})
    stack = trace.stacks[0].model_copy(update={"plain": (layer.model_copy(update={"forward": forward}),)})
    found = fused_trace(PROFILE, trace.model_copy(update={"stacks": (stack,)}), plan_of(Layout(), fused_kernels=True))
    fused = found.stacks[0].plain[0].forward
    assert not any(term.bss for term in (fused.left, fused.moved_bytes, *fused.rise))


def test_none_of_them_is_chosen_unasked() -> None:
    found = search(describe("4xh100"), PROFILE, WORKLOAD, fixed={})
    assert found.candidates
    for plan in (candidate.plan for candidate in found.candidates):
        assert not plan.fused_kernels and plan.loss_kernel == "eager" and plan.layout.overlap
        assert not (plan.layout.master_weights or plan.layout.gather_again or plan.layout.vocabulary_parallel)


def test_all_of_them_can_be_asked_for() -> None:
    asked = ("master_weights=true", "gather_again=true", "vocabulary_parallel=true", "fused_kernels=true", "loss_kernel=fused")
    fixed = parse_fixed(asked, HOST, PROFILE, WORKLOAD)
    found = search(HOST, PROFILE, WORKLOAD, fixed=fixed)
    assert found.candidates
    for plan in (candidate.plan for candidate in found.candidates):
        layout = plan.layout
        assert layout.master_weights and layout.fully_shard == "optimizer" and layout.gather_again and layout.vocabulary_parallel
        assert plan.fused_kernels and plan.loss_kernel == "fused" and plan.torch_compile == "off" and plan.precision == "bf16"


def test_one_device_cannot_have_what_no_engine_runs() -> None:
    for text in ("fused_kernels=true", "loss_kernel=fused"):
        with pytest.raises(RequestError, match="several CUDA devices alone"):
            parse_fixed((text,), describe("1xh100"), PROFILE, WORKLOAD)


def test_what_excludes_each_other_is_said() -> None:
    master = Layout(fully_shard="optimizer", shard_size=8, master_weights=True)
    for plan, words in (
        (plan_of(master, precision="fp32"), "master_weights"),
        (plan_of(Layout(), fused_kernels=True, torch_compile="layer"), "nothing to fuse"),
        (plan_of(Layout(), loss_kernel="compiled", loss_chunk_tokens=512), "all logits at once"),
        (plan_of(Layout(), recompute_granularity="alternate", activation_checkpointing=1, torch_compile="layer"), "alternate"),
    ):
        assert words in (conflict(plan, clips_gradients=True) or "")
