"""Place the segments that one rank runs, in forward order: which trace it follows, and where each traced layer stands."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from upshift.models.profile import LOSS_CHUNK_TOKENS, ModelProfile, PassCost, Polynomial, Segment, StepTrace
from upshift.planning.attention import PACKED_KERNELS
from upshift.planning.cost.compiled import compiled_trace
from upshift.planning.cost.divide import divide, divide_experts, keep_more, scaled, total
from upshift.planning.cost.fused import fused_trace
from upshift.planning.cost.known import Known
from upshift.planning.cost.share import Stage, compute_bytes
from upshift.planning.cost.vocabulary import with_own_loss
from upshift.planning.plan import Plan
from upshift.planning.workload import Workload

RANDOM_STATE = Polynomial(one=5056.0)  # of the generator: torch.utils.checkpoint keeps one for each layer that it recomputes


@dataclass(frozen=True)
class Placed:
    """A run of ``count`` equal segments at its place in the full model.

    Each segment of a run leaves the same bytes, so the highest moment of a run is in its first or its last segment.
    """

    segment: Segment
    count: int
    parameters: int  # trained parameters of one segment
    is_loss: bool = False
    is_layer: bool = False
    scratch: float = 0.0  # bytes in the forward pass that the trace does not show
    is_recomputed: bool = False


def trace_for(profile: ModelProfile, plan: Plan, workload: Workload, *, known: Known | None = None) -> StepTrace | None:
    """Return the trace that the plan's tensors follow, on one of the ranks that share its layers.

    Return None where the profile has no such trace: the plan cannot be predicted.
    """
    layout = plan.layout
    key = (
        "trace", plan.traced_precision, plan.attention, plan.packing, plan.torch_compile != "off", plan.fused_kernels,
        plan.loss_kernel, layout.tensor_parallel, layout.sequence_parallel, layout.expert_parallel, layout.gather_again,
        layout.vocabulary_parallel,
    )  # fmt: skip
    return (known or Known()).get(key, lambda: _trace(profile, plan, workload))


def _trace(profile: ModelProfile, plan: Plan, workload: Workload) -> StepTrace | None:
    masked = plan.packing and workload.lengths is not None
    if profile.masks_padding and workload.lengths is not None:
        masked = True
    if plan.attention == "eager":
        masked = False  # it builds its mask in any case
    attention = plan.attention
    if attention in PACKED_KERNELS:
        attention, masked = "sdpa", False  # they keep what PyTorch's flash kernel keeps
    whole = profile.step(precision=plan.traced_precision, attention=attention, masked=masked)
    ranks = plan.layout.tensor_parallel
    if ranks > 1 and whole is not None:
        half = profile.step(precision=plan.traced_precision, attention=attention, masked=masked, tensor_parallel=2)
        if half is None:
            return None
        hidden, sequence_parallel = profile.hidden_size or 0, plan.layout.sequence_parallel
        keeps = not plan.layout.gather_again
        whole = divide(whole, half, ranks, sequence_parallel=sequence_parallel, hidden_size=hidden, keeps_inputs=keeps)
    if whole is not None and plan.layout.expert_parallel > 1:
        whole = divide_experts(profile, whole, plan.layout.expert_parallel)
    return None if whole is None else _fused(profile, with_own_loss(profile, whole, plan), plan)


def _fused(profile: ModelProfile, trace: StepTrace, plan: Plan) -> StepTrace:
    """Return the trace with kernels fused by torch.compile, or by kernels that are written for it."""
    if plan.fused_kernels:
        return fused_trace(profile, trace, plan)
    return compiled_trace(trace) if plan.torch_compile != "off" else trace


def place_segments(
    profile: ModelProfile, trace: StepTrace, plan: Plan, stage: Stage | None = None, *, known: Known | None = None
) -> list[Placed]:
    """Return every segment of the model, or of a stage of it, in forward order.

    The stage has its part of the plan's ``activation_checkpointing`` layers. Its first layers are the recomputed ones.
    """
    stage = stage or Stage(0, profile.num_layers, profile.num_layers)
    return (known or Known()).get(("placed", segments_key(trace, plan, stage)), lambda: _place(profile, trace, plan, stage))


def _place(profile: ModelProfile, trace: StepTrace, plan: Plan, stage: Stage) -> list[Placed]:
    head = profile.parameters.trainable_head
    outside = profile.parameters.trainable - profile.parameters.trainable_layers
    placed: list[Placed] = []
    to_recompute = -(-plan.activation_checkpointing * (stage.last - stage.first) // max(profile.num_layers, 1))
    recompute, way, passed = to_recompute > 0, plan.recompute_granularity, 0
    last = len(profile.stacks)
    for number, stack in enumerate(profile.stacks):
        gap = trace.gaps_recomputed[way][number] if recompute else trace.gaps[number]
        if stage.has_embedding or number:
            placed.append(Placed(gap, 1, outside - head if number == 0 else 0))
        traced = trace.stacks[number]
        mine = stack.assignment[max(stage.first - passed, 0) : max(stage.last - passed, 0)]
        passed += stack.num_layers
        for index, count in _runs(mine, to_recompute):
            recompute = to_recompute > 0
            to_recompute = max(to_recompute - count, 0)
            segment = _with_random_state(traced.recomputed[way][index], plan) if recompute else traced.plain[index]
            if plan.layout.context_parallel > 1 and plan.layout.context_kind == "ulysses":
                segment = keep_more(segment, _exchanged_back(profile, plan), keeps=not recompute)
            placed.append(Placed(segment, count, stack.layer_trainable[index], is_layer=True, is_recomputed=recompute))
    gap = trace.gaps_recomputed[way][last] if recompute else trace.gaps[last]
    scratch = 0.0
    if plan.loss_chunk_tokens and trace.chunked_gap is not None:
        gap, scratch = trace.chunked_gap, chunk_scratch_bytes(profile, plan)
    if stage.has_head:
        placed.append(Placed(gap, 1, head if last else outside, is_loss=True, scratch=scratch))
    return placed


def _with_random_state(layer: Segment, plan: Plan) -> Segment:
    """Return a recomputed layer that also keeps its random state, which fake tensors do not show. GPUs have their own few bytes.
    """
    if plan.device != "cpu":
        return layer
    freed = scaled(RANDOM_STATE, -1.0)
    return layer.model_copy(
        update={
            "forward": _leaving(layer.forward, RANDOM_STATE), "backward": _leaving(layer.backward, freed),
            "backward_accumulating": _leaving(layer.backward_accumulating, freed),
        }
    )  # fmt: skip


def _leaving(cost: PassCost, more: Polynomial) -> PassCost:
    return cost.model_copy(update={"left": total(cost.left, more)})


def _exchanged_back(profile: ModelProfile, plan: Plan) -> Polynomial:
    """Return the bytes of attention's result as it comes back from the ranks that computed its heads.

    The kernel's own result is kept beside it.
    """
    return Polynomial(bs=compute_bytes(plan) * (profile.hidden_size or 0) / plan.layout.tensor_parallel)


def chunk_scratch_bytes(profile: ModelProfile, plan: Plan) -> float:
    """Return the bytes that larger chunks than the traced ones hold.

    On a GPU they include two copies of the chunk's logits in fp32 and the product for the weight's gradient, which the traced
    CPU makes by blocks.
    """
    words, product_bytes = profile.vocab_size or 0, 4 if plan.precision in ("fp32", "tf32") else 2
    larger = max(plan.loss_chunk_tokens - LOSS_CHUNK_TOKENS, 0) * words * product_bytes
    if plan.device != "cuda":
        return float(larger)
    return float(larger + words * max(8 * plan.loss_chunk_tokens, product_bytes * (profile.hidden_size or 0)))


def _runs(assignment: tuple[int, ...], to_recompute: int) -> list[tuple[int, int]]:
    """Return runs of equal layers as (traced layer, how many in a row), cut where recomputation ends."""
    runs: list[tuple[int, int]] = []
    for layer, index in enumerate(assignment):
        if runs and runs[-1][0] == index and layer != to_recompute:
            runs[-1] = (index, runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


def rank_key(trace: StepTrace, plan: Plan, stage: Stage) -> tuple[Hashable, ...]:
    """Return a key of the plan.

    Plans with the same key run the same segments on the same tokens in a micro-batch of a rank at ``stage``.
    """
    return segments_key(trace, plan, stage), plan.per_device_train_batch_size, plan.sequence_length


def segments_key(trace: StepTrace, plan: Plan, stage: Stage) -> tuple[Hashable, ...]:
    """Return a key of the plan. Plans with the same key run the same segments on a rank at ``stage``, on any number of tokens."""
    layout = plan.layout
    return (
        trace.precision, trace.attention, trace.masked, layout.tensor_parallel, layout.sequence_parallel, layout.expert_parallel,
        layout.context_parallel, layout.context_kind, stage.first, stage.last,
        plan.activation_checkpointing, plan.recompute_granularity, plan.loss_chunk_tokens,
        plan.activation_offload, plan.precision, layout.gathers, layout.pipeline_parallel > 1,
        plan.torch_compile != "off", plan.fused_kernels, plan.loss_kernel, layout.gather_again, layout.vocabulary_parallel,
    )  # fmt: skip
