"""Adapt a layer's segment to torch.compile: it keeps what the compiler's partition keeps, and moves less memory."""

from __future__ import annotations

from upshift.models.profile import GradientsGo, PassCost, Polynomial, Segment, StackTrace, StepTrace
from upshift.planning.cost.divide import scaled, total


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


def _without(gone: GradientsGo | None, less: Polynomial) -> GradientsGo | None:
    if gone is None:
        return None
    rise = tuple(total(term, scaled(less, -1.0)) for term in gone.rise)
    moments = tuple((size, total(live, scaled(less, -1.0))) for size, live in gone.moments)
    return GradientsGo(rise=rise, moments=moments, born=gone.born)


def _frees_less(cost: PassCost, less: Polynomial) -> PassCost:
    return cost.model_copy(update={"left": total(cost.left, less)})
