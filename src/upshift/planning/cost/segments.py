"""Place the segments that one rank runs, and adapt their traces to compilation and fused kernels.

Compiled layers: a layer saves what the compiler's partition saves, and moves less memory.

Fused kernels: norms, rotary embedding and gated activations are one kernel each. Such a kernel saves its input and none of its
intermediate results (Liger Kernel, arXiv 2410.10989; Transformer Engine). So between the passes a layer keeps for every token the
inputs and outputs of its matrix products, and the input of each norm. It keeps no fp32 copies, no rotated and unrotated queries,
and no activation beside the gate. The sizes follow from the shapes of the weights:

- A matrix's side that is not the hidden size is kept, as the product's result or as another product's input. One side of a
  square matrix is kept.
- Sides of the hidden size are the outputs of norms, which are kept once for all matrices that read them, or they go into the
  residual sum.
- If a token is sent to several experts, each expert keeps it, with its own copy of the norm's output.
- Attention is one kernel too, whatever the traced one was. Nothing that grows with the square of the length is ever in memory. A
  causal kernel computes half of the scores. The backward pass computes the scores again.

A kernel between two products reads or writes each of these once in the forward pass. In the backward pass it reads them and
writes their gradients. The residual sums add to this, and so do the copies of tokens for experts, which are sorted on their way.
If gradients stay in fp32, the product that makes a weight's gradient also adds it up (Megatron-LM's gradient accumulation
fusion). Two things are ignored: the copies that a kernel makes to have its input contiguous, and keys of latent attention that
are joined from two parts.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from upshift.models.profile import (
    LOSS_CHUNK_TOKENS,
    ModelProfile,
    PassCost,
    Polynomial,
    ReleasedGradients,
    Segment,
    StackTrace,
    StepTrace,
)
from upshift.planning.cost.activation_checkpointing import num_recomputed, runs_of_layers, with_random_state
from upshift.planning.cost.loss_head import apply_loss_kernel
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.optimizer import trained_shapes
from upshift.planning.cost.parallel_trace import (
    GATHERED_INPUTS,
    add,
    add_left,
    add_saved_bytes,
    expert_parallel_trace,
    scale,
    tensor_parallel_trace,
)
from upshift.planning.cost.partition import MASTERED_BYTES, Stage, compute_bytes, summed_bytes
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import PACKED_KERNELS
from upshift.planning.workload import Workload


def compiled_trace(trace: StepTrace) -> StepTrace:
    """Return the trace of the same step with every layer compiled."""
    return trace.model_copy(update={"stacks": tuple(_compile_stack(stack) for stack in trace.stacks)})


def _compile_stack(stack: StackTrace) -> StackTrace:
    return StackTrace(
        plain=tuple(compiled_segment(plain, plain) for plain in stack.plain),
        recomputed={
            granularity: tuple(compiled_segment(*pair) for pair in zip(layers, stack.plain, strict=True))
            for granularity, layers in stack.recomputed.items()
        },
    )


def compiled_segment(segment: Segment, plain: Segment) -> Segment:
    """Return the segment of the compiled layer, or ``segment`` if it is unknown what the compiled layer saves.

    ``plain``: the segment of the same layer without recomputation. The temporaries of fused kernels are taken to be those of the
    operators that they replace, which is an upper bound.
    """
    if plain.compiled is None:
        return segment
    stays = add(plain.forward.left, scale(plain.forward.released, -1.0))
    saving = add(stays, scale(plain.compiled, -1.0))
    if segment is not plain:  # the backward pass recomputes the layer, and holds less at its peak
        return segment.model_copy(
            update={
                "backward": _lower_rise(segment.backward, saving),
                "backward_accumulating": _lower_rise(segment.backward_accumulating, saving),
                "gradients_go": _lower_gradient_moments(segment.gradients_go, saving),
            }
        )
    forward = _lower_rise(segment.forward, add(saving, plain.forward.released))
    forward = forward.model_copy(
        update={"left": plain.compiled, "released": Polynomial(), "rise": (*forward.rise, plain.compiled)}
    )
    return Segment(
        forward=forward,
        backward=add_left(segment.backward, saving),
        backward_accumulating=add_left(segment.backward_accumulating, saving),
        compiled=plain.compiled,
        gradients_go=segment.gradients_go,
    )


def _lower_rise(cost: PassCost, saving: Polynomial) -> PassCost:
    return cost.model_copy(update={"rise": tuple(add(term, scale(saving, -1.0)) for term in cost.rise)})


def _lower_gradient_moments(gradients_go: ReleasedGradients | None, saving: Polynomial) -> ReleasedGradients | None:
    if gradients_go is None:
        return None
    rise = tuple(add(term, scale(saving, -1.0)) for term in gradients_go.rise)
    moments = tuple((size, add(live, scale(saving, -1.0))) for size, live in gradients_go.moments)
    return ReleasedGradients(rise=rise, moments=moments, born=gradients_go.born)


STATISTICS_BYTES = 4  # attention saves the logarithm of each head's sum in fp32
SUM_WORDS = 2 * 3  # of the residual stream: two sums a layer, each reads two words and writes one
# How often the copies of a token for its experts are moved: written, and read when their results are summed. Between ranks each
# exchange is between an order by experts and one by ranks, and sorting reads and writes them (Megatron Core's
# MoEAlltoAllTokenDispatcher).
COPY_PASSES = 2
COPY_PASSES_BETWEEN_RANKS = 6
TRACED_WORDS = 3  # words moved to add up a gradient by a separate operator
FUSED_WORDS = 2  # the same by the matrix product itself


def fused_trace(profile: ModelProfile, trace: StepTrace, plan: Plan) -> StepTrace:
    """Return the trace of the same step with the kernels of every layer fused."""
    saved = Polynomial(bs=saved_bytes_per_token(profile, plan))
    kernels = _FusedKernels.of(profile, plan)
    stacks = []
    for stack in trace.stacks:
        plain = tuple(kernels.layer(layer, repeats=0).model_copy(update={"compiled": saved}) for layer in stack.plain)
        recomputed = {
            granularity: tuple(kernels.layer(layer, repeats=1) for layer in layers)
            for granularity, layers in stack.recomputed.items()
        }
        stacks.append(StackTrace(plain=plain, recomputed=recomputed))
    gaps = tuple(map(kernels.gap, trace.gaps))
    gaps_recomputed = {granularity: tuple(map(kernels.gap, gaps)) for granularity, gaps in trace.gaps_recomputed.items()}
    update = {"stacks": tuple(stacks), "gaps": gaps, "gaps_recomputed": gaps_recomputed}
    return compiled_trace(trace.model_copy(update=update))


@dataclass(frozen=True)
class _FusedKernels:
    """The memory traffic and the work of the fused kernels of a plan's layers."""

    forward: float  # bytes that a layer moves for a token
    backward: float
    accumulating: float  # bytes moved to add to a gradient, over those of the trace
    visible: float  # share of the scores that attention computes

    @classmethod
    def of(cls, profile: ModelProfile, plan: Plan) -> _FusedKernels:
        forward, backward = moved_bytes_per_token(profile, plan)
        accumulating = FUSED_WORDS * summed_bytes(plan) / (TRACED_WORDS * MASTERED_BYTES) if plan.layout.master_weights else 1.0
        return cls(forward, backward, accumulating, 0.5 if profile.objective == "causal-lm" else 1.0)

    def layer(self, layer: Segment, *, repeats: int) -> Segment:
        """Return the layer with fused kernels. ``repeats``: how often the backward pass repeats the forward pass."""
        scores = scale(layer.forward.matmul_flops, 0.5)
        backward = self.backward + repeats * self.forward
        return layer.model_copy(
            update={
                "forward": self._pass(layer.forward, self.forward, Polynomial()),
                "backward": self._pass(layer.backward, backward, scores),
                "backward_accumulating": self._accumulating(self._pass(layer.backward_accumulating, backward, scores)),
            }
        )

    def gap(self, gap: Segment) -> Segment:
        return gap.model_copy(update={"backward_accumulating": self._accumulating(gap.backward_accumulating)})

    def _pass(self, cost: PassCost, moved: float, scores: Polynomial) -> PassCost:
        """Return the cost of a pass whose kernels move ``moved`` bytes for each token.

        ``scores``: FLOPs to compute the scores again, in the terms that grow with the square of the length.
        """

        def linear(size: Polynomial) -> Polynomial:
            return size._replace(ss=0.0, bss=0.0)

        products = cost.matmul_flops
        attention = Polynomial(ss=products.ss + scores.ss, bss=products.bss + scores.bss)
        return cost.model_copy(
            update={
                "left": linear(cost.left),
                "released": linear(cost.released),
                "rise": tuple(map(linear, cost.rise)),
                "matmul_flops": linear(products),
                "matmul_bytes": linear(cost.matmul_bytes),
                "attention_flops": add(cost.attention_flops, scale(attention, self.visible)),
                "moved_bytes": Polynomial(one=cost.moved_bytes.one, bs=moved),
            }
        )

    def _accumulating(self, cost: PassCost) -> PassCost:
        moved = cost.moved_bytes
        return cost.model_copy(update={"moved_bytes": moved._replace(one=moved.one * self.accumulating)})


def saved_bytes_per_token(profile: ModelProfile, plan: Plan) -> float:
    """Return the bytes that one layer (the mean of all) saves for each token, on one of the ranks that share the layer."""
    layout = plan.layout
    hidden = float(profile.hidden_size or 0)
    norm_inputs = GATHERED_INPUTS * hidden
    norm_outputs = norm_inputs / (_ranks_sharing_tokens(plan) if layout.gather_again else 1)
    heads = profile.heads[0] if profile.heads else 0
    inner = (_product_widths(profile, hidden) + _expert_copies(profile, hidden)) / layout.tensor_parallel
    saved_elements = inner + norm_inputs / _ranks_sharing_tokens(plan) + norm_outputs
    return compute_bytes(plan) * saved_elements + STATISTICS_BYTES * heads / layout.tensor_parallel


def moved_bytes_per_token(profile: ModelProfile, plan: Plan) -> tuple[float, float]:
    """Return the bytes that one layer (the mean of all) moves for each token, forward and backward.

    The bytes are those of one of the ranks that share the layer.
    """
    layout = plan.layout
    hidden = float(profile.hidden_size or 0)
    element_size = compute_bytes(plan)
    copy_passes = COPY_PASSES if layout.expert_parallel == 1 else COPY_PASSES_BETWEEN_RANKS
    copies = copy_passes * _expert_copies(profile, hidden) / layout.tensor_parallel
    saved = _product_widths(profile, hidden) / layout.tensor_parallel + 2 * GATHERED_INPUTS * hidden / _ranks_sharing_tokens(plan)
    unsaved = SUM_WORDS * hidden / _ranks_sharing_tokens(plan) + copies
    return element_size * (saved + unsaved), element_size * (2 * saved + unsaved)


def _ranks_sharing_tokens(plan: Plan) -> int:
    """Return the number of ranks among which the tokens between the matrices are divided."""
    return plan.layout.tensor_parallel if plan.layout.sequence_parallel else 1


def _product_widths(profile: ModelProfile, hidden: float) -> float:
    """Return the elements of a token around the matrix products of one layer.

    Elements of the hidden size between the products are left out.
    """
    elements = 0.0
    for shape in trained_shapes(profile):
        if len(shape.shape) == 2 and shape.shape[0] != profile.vocab_size:
            inner = [size for size in shape.shape if size != hidden]
            elements += shape.count * (sum(inner) if inner else hidden)
        elif len(shape.shape) == 3 and profile.experts is not None:
            expert_inner = sum(size for size in shape.shape[1:] if size != hidden)
            elements += shape.count * expert_inner * profile.experts.per_token
    return elements / max(profile.num_layers, 1)


def _expert_copies(profile: ModelProfile, hidden: float) -> float:
    """Return the elements of a token's copies for its experts.

    Each layer with experts has two stacks of matrices: one into the experts, and one out of them.
    """
    if profile.experts is None:
        return 0.0
    layers_with_experts = sum(shape.count for shape in trained_shapes(profile) if len(shape.shape) == 3) / 2.0
    return hidden * profile.experts.per_token * layers_with_experts / max(profile.num_layers, 1)


@dataclass(frozen=True)
class PlacedSegment:
    """A run of ``count`` equal segments, in the full model.

    Each segment of a run leaves the same bytes, so the peak of a run is in its first or its last segment.
    """

    segment: Segment
    count: int
    parameters: int  # trained parameters of one segment
    is_loss: bool = False
    is_layer: bool = False
    scratch: float = 0.0  # bytes in the forward pass that the trace does not show
    is_recomputed: bool = False


def plan_trace(profile: ModelProfile, plan: Plan, workload: Workload, *, memo: Memo | None = None) -> StepTrace | None:
    """Return the trace of a step with the plan's tensors, on one of the ranks that share its layers.

    Return None where the profile has no such trace. Such a plan cannot be predicted.
    """
    layout = plan.layout
    key = (
        "trace", plan.traced_precision, plan.attention, plan.packing, plan.torch_compile != "off", plan.fused_kernels,
        plan.loss_kernel, layout.tensor_parallel, layout.sequence_parallel, layout.expert_parallel, layout.gather_again,
        layout.vocabulary_parallel,
    )  # fmt: skip
    memo = memo or Memo()
    return memo.get_or_compute(key, lambda: _adapt_trace(profile, plan, workload))


def _adapt_trace(profile: ModelProfile, plan: Plan, workload: Workload) -> StepTrace | None:
    attention = plan.attention
    is_masked = (plan.packing or profile.masks_padding) and workload.lengths is not None
    if attention == "eager":
        is_masked = False  # it builds its mask in any case
    if attention in PACKED_KERNELS:
        attention = "sdpa"  # these kernels save what PyTorch's flash kernel saves
        is_masked = False
    trace = profile.step(precision=plan.traced_precision, attention=attention, masked=is_masked)
    ranks = plan.layout.tensor_parallel
    if trace is None:
        return None
    if ranks > 1:
        halved = profile.step(precision=plan.traced_precision, attention=attention, masked=is_masked, tensor_parallel=2)
        if halved is None:
            return None
        trace = tensor_parallel_trace(
            trace,
            halved,
            ranks,
            sequence_parallel=plan.layout.sequence_parallel,
            hidden_size=profile.hidden_size or 0,
            saves_inputs=not plan.layout.gather_again,
        )
    if plan.layout.expert_parallel > 1:
        trace = expert_parallel_trace(profile, trace, plan.layout.expert_parallel)
    return _fuse_kernels(profile, apply_loss_kernel(profile, trace, plan), plan)


def _fuse_kernels(profile: ModelProfile, trace: StepTrace, plan: Plan) -> StepTrace:
    """Return the trace with kernels fused by torch.compile, or by kernels that are written for it."""
    if plan.fused_kernels:
        return fused_trace(profile, trace, plan)
    return compiled_trace(trace) if plan.torch_compile != "off" else trace


def place_segments(
    profile: ModelProfile, trace: StepTrace, plan: Plan, stage: Stage | None = None, *, memo: Memo | None = None
) -> list[PlacedSegment]:
    """Return every segment of the model, or of a stage of it, in forward order.

    The stage has its part of the plan's ``activation_checkpointing`` layers. Its first layers are the recomputed ones.
    """
    stage = stage or Stage(0, profile.num_layers, profile.num_layers)
    memo = memo or Memo()
    key = ("placed", segments_key(trace, plan, stage))
    return memo.get_or_compute(key, lambda: _place_segments(profile, trace, plan, stage))


def _place_segments(profile: ModelProfile, trace: StepTrace, plan: Plan, stage: Stage) -> list[PlacedSegment]:
    trained_head = profile.parameters.trainable_head
    trained_outside = profile.parameters.trainable - profile.parameters.trainable_layers
    num_stacks = len(profile.stacks)
    granularity = plan.recompute_granularity
    to_recompute = num_recomputed(profile, plan, stage)
    is_recomputed = to_recompute > 0
    exchanges_heads = plan.layout.context_parallel > 1 and plan.layout.context_kind == "ulysses"
    first_layer = 0  # of the stack
    placed: list[PlacedSegment] = []
    for number, stack in enumerate(profile.stacks):
        gap = trace.gaps_recomputed[granularity][number] if is_recomputed else trace.gaps[number]
        if stage.has_embedding or number:
            placed.append(PlacedSegment(gap, 1, trained_outside - trained_head if number == 0 else 0))
        traced = trace.stacks[number]
        stage_layers = stack.assignment[max(stage.first - first_layer, 0) : max(stage.last - first_layer, 0)]
        first_layer += stack.num_layers
        for index, count in runs_of_layers(stage_layers, to_recompute):
            is_recomputed = to_recompute > 0
            to_recompute = max(to_recompute - count, 0)
            segment = traced.plain[index]
            if is_recomputed:
                segment = with_random_state(traced.recomputed[granularity][index], plan)
            if exchanges_heads:
                segment = add_saved_bytes(segment, _exchanged_result(profile, plan), saves=not is_recomputed)
            placed.append(PlacedSegment(segment, count, stack.layer_trainable[index], is_layer=True, is_recomputed=is_recomputed))
    if stage.has_head:
        gap = trace.gaps_recomputed[granularity][num_stacks] if is_recomputed else trace.gaps[num_stacks]
        scratch = 0.0
        if plan.loss_chunk_tokens and trace.chunked_gap is not None:
            gap = trace.chunked_gap
            scratch = chunk_scratch_bytes(profile, plan)
        trained = trained_head if num_stacks else trained_outside
        placed.append(PlacedSegment(gap, 1, trained, is_loss=True, scratch=scratch))
    return placed


def _exchanged_result(profile: ModelProfile, plan: Plan) -> Polynomial:
    """Return the bytes of attention's result as it comes back from the ranks that computed its heads.

    The kernel's own result is kept beside it.
    """
    return Polynomial(bs=compute_bytes(plan) * (profile.hidden_size or 0) / plan.layout.tensor_parallel)


def chunk_scratch_bytes(profile: ModelProfile, plan: Plan) -> float:
    """Return the bytes that larger chunks than the traced ones hold.

    On a GPU they include two copies of the chunk's logits in fp32, and the product for the weight's gradient. The CPU of the
    trace makes this product by blocks.
    """
    vocabulary = profile.vocab_size or 0
    product_bytes = 4 if plan.precision in ("fp32", "tf32") else 2
    larger = max(plan.loss_chunk_tokens - LOSS_CHUNK_TOKENS, 0) * vocabulary * product_bytes
    if plan.device != "cuda":
        return float(larger)
    return float(larger + vocabulary * max(8 * plan.loss_chunk_tokens, product_bytes * (profile.hidden_size or 0)))


def micro_batch_key(trace: StepTrace, plan: Plan, stage: Stage) -> tuple[Hashable, ...]:
    """Return a key that is the same for plans whose ranks at ``stage`` run the same segments on as many tokens."""
    return segments_key(trace, plan, stage), plan.per_device_train_batch_size, plan.sequence_length


def segments_key(trace: StepTrace, plan: Plan, stage: Stage) -> tuple[Hashable, ...]:
    """Return a key that is the same for plans whose ranks at ``stage`` run the same segments, on any number of tokens."""
    layout = plan.layout
    trace_key = (trace.precision, trace.attention, trace.masked)
    context_key = (layout.context_parallel, layout.context_kind)
    tensor_key = (layout.tensor_parallel, layout.sequence_parallel, layout.gather_again, layout.vocabulary_parallel)
    layout_key = (layout.expert_parallel, layout.gathers, layout.pipeline_parallel > 1, *context_key, *tensor_key)
    recompute_key = (plan.activation_checkpointing, plan.recompute_granularity, plan.activation_offload)
    kernel_key = (plan.precision, plan.torch_compile != "off", plan.fused_kernels, plan.loss_kernel, plan.loss_chunk_tokens)
    return (trace_key, layout_key, recompute_key, kernel_key, stage.first, stage.last)
