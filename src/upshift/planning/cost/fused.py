"""Predict what layers keep and move through memory if norms, rotary embedding and gated activations are one kernel each.

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
"""

from __future__ import annotations

from dataclasses import dataclass

from upshift.models.profile import ModelProfile, PassCost, Polynomial, Segment, StackTrace, StepTrace
from upshift.planning.cost.compiled import compiled_trace
from upshift.planning.cost.divide import GATHERED_INPUTS, scaled, total
from upshift.planning.cost.optimizer import trained_shapes
from upshift.planning.cost.share import MASTERED_BYTES, REDUCED_BYTES, compute_bytes
from upshift.planning.plan import Plan

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
            recomputed={
                way: tuple(fused.layer(layer, again=1) for layer in layers) for way, layers in stack.recomputed.items()
            },
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
