"""Place the segments that one rank runs, in forward order: which trace it follows, and where each traced layer stands.

Adapt a layer's segment to torch.compile: it keeps what the compiler's partition keeps, and moves less memory.

Predict what layers keep and move through memory if norms, rotary embedding and gated activations are one kernel each.

Such a kernel keeps its input and none of its intermediate results (Liger Kernel, arXiv 2410.10989; Transformer Engine). So
between the passes a layer keeps for every token the inputs and outputs of its matrix products, and the input of each norm. It
keeps no fp32 copies, no rotated and unrotated queries, and no activation beside the gate. The sizes follow from the shapes of
the weights:

- A matrix's side that is not the hidden size is kept, as the product's result or as another product's input. Of a square matrix
  one side is kept.
- Sides of the hidden size are the outputs of norms, which are kept once for all matrices that read them, or they go into the
  residual sum.
- If a token is sent to several experts, each expert keeps it, with its own copy of the norm's output.
- Attention is one kernel too, whatever the traced one was. Nothing that grows with the square of the length is ever in memory. A
  causal kernel computes half of the scores. The backward pass computes the scores again.

A kernel between two products reads or writes each of these once in the forward pass. In the backward pass it reads them and
writes their gradients. Beside them are the residual sums, and the copies of tokens for experts, which are sorted on their way.
Where gradients stay in fp32, the product that makes a weight's gradient also adds it up (Megatron-LM's gradient accumulation
fusion).

Ignored: the copies that a kernel makes to have its input contiguous, and keys of latent attention that are joined from two
parts.

Predict the segment with the head and the loss if the loss has a kernel of its own, or if ranks divide its words.

The traced segment holds some live bytes for every word and token: bf16 logits, their fp32 copy, log-probabilities, gradients.

- loss_kernel=compiled: fp32 values live in registers alone. The logits stay, and in the backward pass their gradient beside
  them.
- loss_kernel=fused: the gradient takes the place of the logits (Transformer Engine's and Liger Kernel's cross entropy).
- vocabulary_parallel: a rank has the logits of its own words alone (Megatron-LM's vocab_parallel_cross_entropy, Shoeybi et al.
  2019, section 3; torch.distributed.tensor.parallel.loss_parallel). With sequence parallelism ranks gather the head's input.
  torch's loss_parallel computes the loss and its gradient operator by operator: at their height, with one fp32 value more.
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
from upshift.planning.cost.memo import Known
from upshift.planning.cost.optimizer import trained_shapes
from upshift.planning.cost.partition import (
    GATHERED_INPUTS,
    MASTERED_BYTES,
    REDUCED_BYTES,
    Stage,
    compute_bytes,
    divide,
    divide_experts,
    keep_more,
    of_constants,
    scaled,
    total,
)
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import PACKED_KERNELS
from upshift.planning.workload import Workload


def compiled_trace(trace: StepTrace) -> StepTrace:
    """Return the trace of the same step with every layer compiled."""
    return trace.model_copy(update={"stacks": tuple(_stack(stack) for stack in trace.stacks)})


def _stack(stack: StackTrace) -> StackTrace:
    return StackTrace(
        plain=tuple(when_compiled(plain, plain) for plain in stack.plain),
        recomputed={
            way: tuple(when_compiled(layer, plain) for layer, plain in zip(layers, stack.plain, strict=True))
            for way, layers in stack.recomputed.items()
        },
    )


def when_compiled(segment: Segment, plain: Segment) -> Segment:
    """Return the segment of the compiled layer, or ``segment`` if nothing says what the compiled layer keeps.

    ``plain``: the segment of the same layer without recomputation. The temporaries of fused kernels are taken to be those of the
    operators that they replace, which is more.
    """
    if plain.compiled is None:
        return segment
    stays = total(plain.forward.left, scaled(plain.forward.released, -1.0))
    less = total(stays, scaled(plain.compiled, -1.0))
    if segment is not plain:  # the backward pass makes it again, and holds less at its highest
        return segment.model_copy(
            update={
                "backward": _lower(segment.backward, less),
                "backward_accumulating": _lower(segment.backward_accumulating, less),
                "gradients_go": _without(segment.gradients_go, less),
            }
        )
    forward = _lower(segment.forward, total(less, plain.forward.released))
    forward = forward.model_copy(
        update={"left": plain.compiled, "released": Polynomial(), "rise": (*forward.rise, plain.compiled)}
    )
    return Segment(
        forward=forward, backward=_frees_less(segment.backward, less),
        backward_accumulating=_frees_less(segment.backward_accumulating, less), compiled=plain.compiled,
        gradients_go=segment.gradients_go,
    )  # fmt: skip


def _lower(cost: PassCost, less: Polynomial) -> PassCost:
    return cost.model_copy(update={"rise": tuple(total(term, scaled(less, -1.0)) for term in cost.rise)})


def _without(gone: ReleasedGradients | None, less: Polynomial) -> ReleasedGradients | None:
    if gone is None:
        return None
    rise = tuple(total(term, scaled(less, -1.0)) for term in gone.rise)
    moments = tuple((size, total(live, scaled(less, -1.0))) for size, live in gone.moments)
    return ReleasedGradients(rise=rise, moments=moments, born=gone.born)


def _frees_less(cost: PassCost, less: Polynomial) -> PassCost:
    return cost.model_copy(update={"left": total(cost.left, less)})


STATISTICS_BYTES = 4  # attention keeps the logarithm of each head's sum in fp32
SUM_WORDS = 2 * 3  # of the residual stream: two sums a layer, each reads two and writes one
# Copies of a token for its experts: written, read when their results are summed; between ranks each exchange is between an order
# by experts and one by ranks, and sorting reads and writes them (Megatron Core's MoEAlltoAllTokenDispatcher).
COPIED, COPIED_BETWEEN_RANKS = 2, 6
TRACED_WORDS, FUSED_WORDS = 3, 2  # of a gradient that is added up: by a separate operator, by the product itself


def fused_trace(profile: ModelProfile, trace: StepTrace, plan: Plan) -> StepTrace:
    """Return the trace of the same step with the kernels of every layer fused."""
    kept, fused = Polynomial(bs=kept_bytes(profile, plan)), _Fused.of(profile, plan)
    stacks = tuple(
        StackTrace(
            plain=tuple(fused.layer(layer, again=0).model_copy(update={"compiled": kept}) for layer in stack.plain),
            recomputed={way: tuple(fused.layer(layer, again=1) for layer in layers) for way, layers in stack.recomputed.items()},
        )
        for stack in trace.stacks
    )
    gaps = tuple(map(fused.gap, trace.gaps))
    again = {way: tuple(map(fused.gap, gaps)) for way, gaps in trace.gaps_recomputed.items()}
    return compiled_trace(trace.model_copy(update={"stacks": stacks, "gaps": gaps, "gaps_recomputed": again}))


@dataclass(frozen=True)
class _Fused:
    forward: float  # bytes that a layer moves, of a token
    backward: float
    accumulating: float  # bytes moved to add to a gradient, over those traced
    visible: float  # share of the scores that attention computes

    @classmethod
    def of(cls, profile: ModelProfile, plan: Plan) -> _Fused:
        forward, backward = moved_bytes(profile, plan)
        fused = FUSED_WORDS * REDUCED_BYTES / (TRACED_WORDS * MASTERED_BYTES) if plan.layout.master_weights else 1.0
        return cls(forward, backward, fused, 0.5 if profile.objective == "causal-lm" else 1.0)

    def layer(self, layer: Segment, *, again: int) -> Segment:
        """Return the layer with fused kernels. ``again``: how often the backward pass repeats the forward pass."""
        scores = scaled(layer.forward.matmul_flops, 0.5)
        backward = self.backward + again * self.forward
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
                "left": linear(cost.left), "released": linear(cost.released), "rise": tuple(map(linear, cost.rise)),
                "matmul_flops": linear(products), "matmul_bytes": linear(cost.matmul_bytes),
                "attention_flops": total(cost.attention_flops, scaled(attention, self.visible)),
                "moved_bytes": Polynomial(one=cost.moved_bytes.one, bs=moved),
            }
        )  # fmt: skip

    def _accumulating(self, cost: PassCost) -> PassCost:
        moved = cost.moved_bytes
        return cost.model_copy(update={"moved_bytes": moved._replace(one=moved.one * self.accumulating)})


def kept_bytes(profile: ModelProfile, plan: Plan) -> float:
    """Return the bytes that one layer (the mean of all) keeps for each token, on one of the ranks that share the layer."""
    layout, hidden = plan.layout, float(profile.hidden_size or 0)
    norms = GATHERED_INPUTS * hidden
    outputs = norms / (_sharing_tokens(plan) if layout.gather_again else 1)
    heads = profile.heads[0] if profile.heads else 0
    inner = (_widths(profile, hidden) + _copies(profile, hidden)) / layout.tensor_parallel
    kept = inner + norms / _sharing_tokens(plan) + outputs
    return compute_bytes(plan) * kept + STATISTICS_BYTES * heads / layout.tensor_parallel


def moved_bytes(profile: ModelProfile, plan: Plan) -> tuple[float, float]:
    """Return the bytes that one layer (the mean of all) moves for each token, forward and backward.

    The bytes are those of one of the ranks that share the layer.
    """
    layout, hidden, size = plan.layout, float(profile.hidden_size or 0), compute_bytes(plan)
    passes = COPIED if layout.expert_parallel == 1 else COPIED_BETWEEN_RANKS
    copies = passes * _copies(profile, hidden) / layout.tensor_parallel
    kept = _widths(profile, hidden) / layout.tensor_parallel + 2 * GATHERED_INPUTS * hidden / _sharing_tokens(plan)
    beside = SUM_WORDS * hidden / _sharing_tokens(plan) + copies
    return size * (kept + beside), size * (2 * kept + beside)


def _sharing_tokens(plan: Plan) -> int:
    """Return the number of ranks among which the tokens between the matrices are divided."""
    return plan.layout.tensor_parallel if plan.layout.sequence_parallel else 1


def _widths(profile: ModelProfile, hidden: float) -> float:
    """Return the elements of a token around the matrix products of one layer, without those of the hidden size between the
    products."""
    total = 0.0
    for shape in trained_shapes(profile):
        if len(shape.shape) == 2 and shape.shape[0] != profile.vocab_size:
            inner = [size for size in shape.shape if size != hidden]
            total += shape.count * (sum(inner) if inner else hidden)
        elif len(shape.shape) == 3 and profile.experts is not None:
            sides = sum(size for size in shape.shape[1:] if size != hidden)
            total += shape.count * sides * profile.experts.per_token
    return total / max(profile.num_layers, 1)


def _copies(profile: ModelProfile, hidden: float) -> float:
    """Return the elements of a token's copies for its experts. Each layer with experts has two stacks of matrices, in and out of
    them."""
    if profile.experts is None:
        return 0.0
    mixtures = sum(shape.count for shape in trained_shapes(profile) if len(shape.shape) == 3) / 2.0
    return hidden * profile.experts.per_token * mixtures / max(profile.num_layers, 1)


MOST_BYTES = 32  # at most, for a word of a token, or for an element of its hidden state
LABEL_BYTES = 64  # of a token's labels, beside these bytes
FULL_BYTES = 4  # of an fp32 value
# Words of the logits' size that a loss kernel moves, forward and backward: compiled, they are read for the sum of exponentials
# and for the loss, then read and their gradient written; fused, read once and the gradient written over them.
MOVED_WORDS = {"compiled": (2.0, 2.0), "fused": (2.0, 0.0)}


def with_own_loss(profile: ModelProfile, trace: StepTrace, plan: Plan) -> StepTrace:
    """Return the trace with the plan's way of computing the loss.

    Return the same trace if that is the model's own way, over all words.
    """
    if plan.loss_kernel == "eager" and not plan.layout.vocabulary_parallel:
        return trace
    head = _Head(profile.vocab_size or 0, profile.hidden_size or 0, plan)
    declared = "embedding_rowwise" in profile.declares.tensor_parallel_plan.values()
    part = 1.0 / plan.layout.tensor_parallel if plan.layout.vocabulary_parallel and not declared else 1.0

    def divided(gaps: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return (of_constants(gaps[0], part), *gaps[1:-1], head.segment(gaps[-1]))

    again = {way: divided(gaps) for way, gaps in trace.gaps_recomputed.items()}
    return trace.model_copy(update={"gaps": divided(trace.gaps), "gaps_recomputed": again})


def bytes_a_word(size: float, vocabulary: int, hidden: int) -> float:
    """Return how many of ``size`` bytes a token belong to each word of the vocabulary.

    It is the multiple of 2 that leaves the fewest whole elements of hidden states, or the nearest if no multiple leaves whole
    ones.
    """
    words = range(-MOST_BYTES, MOST_BYTES + 1, 2)
    rests = [(abs(rest := round((size - word * vocabulary) / hidden)), rest, word) for word in words]
    exact = [entry for entry in rests if abs(size - entry[2] * vocabulary - entry[1] * hidden) <= LABEL_BYTES]
    whole = [entry for entry in exact if entry[0] <= MOST_BYTES]
    return float(min(whole or rests)[2])


@dataclass(frozen=True)
class _Head:
    vocabulary: int
    hidden: int
    plan: Plan

    @property
    def _ranks(self) -> int:
        return self.plan.layout.tensor_parallel if self.plan.layout.vocabulary_parallel else 1

    @property
    def _gathered(self) -> Polynomial:
        """Return the bytes of the other ranks' tokens in the head's input; nothing where each rank has all tokens."""
        layout = self.plan.layout
        others = 1.0 - 1.0 / layout.tensor_parallel if layout.vocabulary_parallel and layout.sequence_parallel else 0.0
        return Polynomial(bs=compute_bytes(self.plan) * self.hidden * others)

    def segment(self, gap: Segment) -> Segment:
        nothing, gathered = Polynomial(), self._gathered
        left, again = (nothing, gathered) if self.plan.layout.gather_again else (gathered, nothing)
        entered = bytes_a_word(gap.forward.left.bs, self.vocabulary, self.hidden)
        size = compute_bytes(self.plan)
        most = {"eager": float(MOST_BYTES), "compiled": 2.0 * size, "fused": 1.0 * size}[self.plan.loss_kernel]
        stays = min(entered, most if self.plan.loss_kernel == "eager" else size)
        before, after, freed = (0.0, 0.0), (entered, stays), scaled(left, -1.0)
        return Segment(
            forward=self._moves(
                self._pass(gap.forward, before, stays if self.plan.loss_kernel != "eager" else most, left, gathered), 0
            ),
            backward=self._moves(self._pass(gap.backward, after, most, freed, again), 1),
            backward_accumulating=self._moves(self._pass(gap.backward_accumulating, after, most, freed, again), 1),
        )

    def _moves(self, cost: PassCost, direction: int) -> PassCost:
        """Return the cost with the bytes of logits that the kernel moves. The norm before the head, small beside them, is left
        out."""
        if self.plan.loss_kernel == "eager":
            return cost
        words = MOVED_WORDS[self.plan.loss_kernel][direction] * compute_bytes(self.plan) * self.vocabulary / self._ranks
        return cost.model_copy(update={"moved_bytes": cost.moved_bytes._replace(bs=words)})

    def _pass(self, cost: PassCost, entered: tuple[float, float], most: float, left: Polynomial, rise: Polynomial) -> PassCost:
        """Return the cost of a pass with the plan's way of computing the loss.

        ``entered``: bytes of a word that are live before the pass, as traced and now. ``most``: bytes of a word that may be live
        in it.
        """

        def now(size: Polynomial) -> Polynomial:
            word = bytes_a_word(size.bs, self.vocabulary, self.hidden)
            live = min(max(entered[0] + word, 0.0), most)
            if self.plan.loss_kernel == "eager" and live > 2 * FULL_BYTES:
                live += FULL_BYTES
            rest = (size.bs - word * self.vocabulary) / (self._ranks if self.plan.layout.sequence_parallel else 1)
            words = (live - entered[1]) * self.vocabulary / self._ranks
            return size._replace(one=size.one / self._ranks, bs=rest + words)

        def work(size: Polynomial) -> Polynomial:
            return scaled(size, 1.0 / self._ranks)

        return cost.model_copy(
            update={
                "left": total(now(cost.left), left), "rise": tuple(total(now(term), rise) for term in cost.rise),
                "released": work(cost.released), "matmul_flops": work(cost.matmul_flops),
                "moved_bytes": work(cost.moved_bytes), "matmul_bytes": work(cost.matmul_bytes),
            }
        )  # fmt: skip


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
    """Return a recomputed layer that also keeps its random state, which fake tensors do not show.

    GPUs have their own few bytes.
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
