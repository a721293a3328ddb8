"""What a step moves, exchanges and waits for, by hand-computed bytes and seconds."""

from __future__ import annotations

from typing import Any

import pytest
from made_profile import FEED_FORWARD, HIDDEN, LAYERS, VOCABULARY, make_profile

from upshift.hardware import describe
from upshift.models.profile import Experts, ModelProfile, Polynomial
from upshift.planning.cost.loss_head import apply_loss_kernel
from upshift.planning.cost.rates import product_efficiency
from upshift.planning.cost.segments import fused_trace, moved_bytes_per_token
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.search.ranking import Candidate, Coster
from upshift.planning.workload import Workload

PROFILE = make_profile()
EXPERT, COUNT, CHOSEN = 512, 8, 2
AROUND, NORMS, SUMS = 4 * HIDDEN + 3 * FEED_FORWARD, 4 * HIDDEN, 6 * HIDDEN


def plan_of(layout: Layout, ranks: int = 8, **choices: Any) -> Plan:
    plain: dict[str, Any] = {"precision": "bf16", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    host = describe(f"{ranks // 8}x8xh100" if ranks > 8 else "8xh100").fingerprint
    return Plan(
        device="cuda", host=host, model="feed", sequence_length=4096, num_processes=ranks, layout=layout, **plain | choices
    )  # fmt: skip


def mixture() -> ModelProfile:
    """Every layer has experts; the shapes of its first two parameters are theirs."""
    sizes = ((COUNT, 2 * EXPERT, HIDDEN), (COUNT, HIDDEN, EXPERT))
    shapes = tuple(
        shape.model_copy(update={"shape": size, "count": LAYERS})
        for shape, size in zip(PROFILE.parameters.trainable_shapes, sizes, strict=False)
    )
    experts = Experts(count=COUNT, parameters=PROFILE.parameters.layers // 2, per_token=CHOSEN)
    parameters = PROFILE.parameters.model_copy(update={"trainable_shapes": shapes})
    return PROFILE.model_copy(update={"parameters": parameters, "experts": experts})


def terms(profile: ModelProfile, plan: Plan, host: str = "8xh100") -> dict[str, float]:
    workload = Workload(sequence_length=4096, global_batch=plan.global_batch)
    found = Coster(describe(host), profile, workload).cost(plan)
    assert isinstance(found, Candidate)
    return found.time.terms


def test_fused_kernels_move_what_is_around_products_once_forward_and_twice_backward() -> None:
    plan = plan_of(Layout(), fused_kernels=True)
    kept, sums = AROUND + NORMS, SUMS
    assert moved_bytes_per_token(PROFILE, plan) == (2 * (kept + sums), 2 * (2 * kept + sums))
    shared = plan_of(Layout(tensor_parallel=4, sequence_parallel=True), fused_kernels=True)
    assert moved_bytes_per_token(PROFILE, shared) == ((kept + sums) / 2, (2 * kept + sums) / 2)
    trace = PROFILE.step(precision="bf16", attention="sdpa", masked=False)
    assert trace is not None
    stack = fused_trace(PROFILE, trace, plan).stacks[0]
    assert stack.plain[0].forward.moved_bytes.bs == 2 * (kept + sums)
    assert stack.recomputed["full"][0].backward.moved_bytes.bs == 2 * (kept + sums) + 2 * (2 * kept + sums)


def test_copies_for_experts_are_sorted_on_their_way_between_ranks() -> None:
    """Written and read; between ranks sorted before or after each of two exchanges, two more of either."""
    alone, shared = (
        moved_bytes_per_token(
            mixture(), plan_of(Layout(fully_shard="optimizer", shard_size=8, expert_parallel=ranks), fused_kernels=True)
        )
        for ranks in (1, 2)
    )
    copies = 2 * CHOSEN * HIDDEN
    assert (shared[0] - alone[0], shared[1] - alone[1]) == (4 * copies, 4 * copies)


def test_gradients_in_fp32_are_added_to_by_the_product() -> None:
    """8 bytes a parameter for 6: read and written in fp32, where bf16 ones were read twice and written."""
    trace = PROFILE.step(precision="bf16-pure", attention="sdpa", masked=False)
    assert trace is not None
    layouts = (Layout(fully_shard="optimizer", shard_size=8, master_weights=mastered) for mastered in (False, True))
    plain, added = (fused_trace(PROFILE, trace, plan_of(layout, fused_kernels=True)) for layout in layouts)
    for one, two in ((plain.stacks[0].plain[0], added.stacks[0].plain[0]), (plain.gaps[-1], added.gaps[-1])):
        moved = [segment.backward_accumulating.moved_bytes.one for segment in (one, two)]
        assert moved[1] == pytest.approx(moved[0] * 8 / 6)


def test_one_kernel_computes_half_of_the_scores_and_again_backward() -> None:
    trace = PROFILE.step(precision="bf16", attention="sdpa", masked=False)
    assert trace is not None
    layer = trace.stacks[0].plain[0]

    def scored(cost: Any, flops: float) -> Any:
        return cost.model_copy(update={"matmul_flops": Polynomial(bs=1.0, bss=flops), "attention_flops": Polynomial()})

    passes = {"forward": scored(layer.forward, 4.0), "backward_accumulating": scored(layer.backward_accumulating, 8.0)}
    stack = trace.stacks[0].model_copy(update={"plain": (layer.model_copy(update=passes),)})
    found = fused_trace(PROFILE, trace.model_copy(update={"stacks": (stack,)}), plan_of(Layout(), fused_kernels=True))
    fused = found.stacks[0].plain[0]
    assert (fused.forward.attention_flops.bss, fused.backward_accumulating.attention_flops.bss) == (2.0, 5.0)
    assert fused.forward.matmul_flops == fused.backward_accumulating.matmul_flops == Polynomial(bs=1.0)


@pytest.mark.parametrize(("kernel", "forward", "backward"), [("compiled", 4, 4), ("fused", 4, 0)])
def test_losses_move_logits_as_often_as_their_kernels_do(kernel: str, forward: int, backward: int) -> None:
    trace = PROFILE.step(precision="bf16", attention="sdpa", masked=False)
    assert trace is not None
    gap = apply_loss_kernel(PROFILE, trace, plan_of(Layout(), loss_kernel=kernel)).gaps[-1]
    assert gap.forward.moved_bytes.bs == forward * VOCABULARY
    assert gap.backward_accumulating.moved_bytes.bs == backward * VOCABULARY


def test_only_ranks_with_the_same_experts_exchange_them() -> None:
    """Among 8 ranks that share experts none has another's gradients to sum: half of the layers' parameters stay there."""
    layouts = [Layout(fully_shard="optimizer", shard_size=8, expert_parallel=ranks, overlap=False) for ranks in (1, 8)]
    one, eight = (terms(mixture(), plan_of(layout))["gradient exchange"] for layout in layouts)
    parameters = PROFILE.parameters
    assert eight == pytest.approx(one * (1.0 - parameters.layers / 2 / parameters.total), rel=0.02)


def test_products_of_experts_fill_the_device_together() -> None:
    """Of 2 experts a token: as efficient as one product with all of their tokens."""
    shapes = mixture().parameters.trainable_shapes
    dense = tuple(shape.model_copy(update={"shape": shape.shape[1:], "count": LAYERS}) for shape in shapes)
    alone = PROFILE.model_copy(update={"parameters": PROFILE.parameters.model_copy(update={"trainable_shapes": dense})})
    plan = plan_of(Layout())
    twice = plan.model_copy(update={"per_device_train_batch_size": CHOSEN})
    assert product_efficiency("h100-sxm", mixture(), plan) == product_efficiency("h100-sxm", alone, twice)


def test_ranks_wait_for_the_slowest_node() -> None:
    """1 % of a step for each doubling of the nodes; nothing on one."""
    layout = Layout(fully_shard="weights", shard_size=8)
    assert "waiting for the slowest node" not in terms(PROFILE, plan_of(layout))
    found = terms(PROFILE, plan_of(layout, ranks=32), "4x8xh100")
    waited = found.pop("waiting for the slowest node")
    assert waited == pytest.approx(0.02 * sum(found.values()))
