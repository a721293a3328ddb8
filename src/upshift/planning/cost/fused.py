"""What layers keep when norms, rotary embedding and gated activations are one kernel each.

Such a kernel keeps its input and nothing of what it computes on the way (Liger Kernel, arXiv 2410.10989; Transformer Engine).
So between the passes a layer keeps, of every token, what goes into and comes out of its matrix products, and the input of each
norm: no fp32 copies, no rotated and unrotated queries, no activation beside the gate. Read off the shapes of the weights:

- a matrix's side that is not the hidden size is kept, as the product's result or as another one's input; of a square matrix one;
- sides of the hidden size are norms' outputs (kept once, whatever number of matrices reads them) or go into the residual sum;
- a token sent to several experts is kept by each, with its own copy of the norm's output;
- attention is one kernel too, whatever the traced one was: nothing that grows with the square of the length is ever in memory.

Ignored: what a kernel copies to have it contiguous, and keys of latent attention that are joined from two parts.
"""

from __future__ import annotations

from upshift.models.profile import ModelProfile, Polynomial, Segment, StackTrace, StepTrace
from upshift.planning.cost.compiled import compiled_trace
from upshift.planning.cost.divide import GATHERED_INPUTS, resized
from upshift.planning.cost.optimizer import trained_shapes
from upshift.planning.cost.share import compute_bytes
from upshift.planning.plan import Plan

STATISTICS_BYTES = 4  # attention keeps the logarithm of each head's sum in fp32


def fused_trace(profile: ModelProfile, trace: StepTrace, plan: Plan) -> StepTrace:
    """The same step with every layer's kernels fused."""
    kept = Polynomial(bs=kept_bytes(profile, plan))
    stacks = tuple(
        StackTrace(
            plain=tuple(_without_scores(layer).model_copy(update={"compiled": kept}) for layer in stack.plain),
            recomputed={way: tuple(map(_without_scores, layers)) for way, layers in stack.recomputed.items()},
        )
        for stack in trace.stacks
    )
    return compiled_trace(trace.model_copy(update={"stacks": stacks}))


def _without_scores(layer: Segment) -> Segment:
    """Where attention was traced as products around a softmax, as of heads whose keys are wider than their values."""
    return resized(layer, lambda size: size._replace(ss=0.0, bss=0.0))


def kept_bytes(profile: ModelProfile, plan: Plan) -> float:
    """Of one token, by one layer (the mean of all), on one of the ranks that share it."""
    layout, hidden = plan.layout, float(profile.hidden_size or 0)
    sharing = layout.tensor_parallel
    tokens = sharing if layout.sequence_parallel else 1  # among which the tokens between the matrices are divided
    norms = GATHERED_INPUTS * hidden
    outputs = norms / (tokens if layout.gather_again else 1)
    heads = profile.heads[0] if profile.heads else 0
    kept = _widths(profile, hidden) / sharing + norms / tokens + outputs
    return compute_bytes(plan) * kept + STATISTICS_BYTES * heads / sharing


def _widths(profile: ModelProfile, hidden: float) -> float:
    """Elements of a token around the matrix products of one layer, but for those of the hidden size between them."""
    total = 0.0
    for shape in trained_shapes(profile):
        if len(shape.shape) == 2 and shape.shape[0] != profile.vocab_size:
            inner = [size for size in shape.shape if size != hidden]
            total += shape.count * (sum(inner) if inner else hidden)
        elif len(shape.shape) == 3 and profile.experts is not None:
            sides = sum(size for size in shape.shape[1:] if size != hidden)
            total += shape.count * sides * profile.experts.per_token
    copies = hidden * profile.experts.per_token * _mixtures(profile) if profile.experts is not None else 0.0
    return (total + copies) / max(profile.num_layers, 1)


def _mixtures(profile: ModelProfile) -> float:
    """Layers with experts: each has two stacks of matrices, into the experts and out of them."""
    return sum(shape.count for shape in trained_shapes(profile) if len(shape.shape) == 3) / 2.0
