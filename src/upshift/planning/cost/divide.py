"""Compute the trace of one rank that shares every layer with others: tensor, sequence and context parallelism.

Every number of a trace is a + c / t on ``t`` ranks: each rank has ``a``, and all ranks together divide ``c``. The traces of one
rank and of one of two ranks (ModelProfile.step, tensor_parallel=2) give both. The terms of ``rise`` stand in the same order in
the two.
"""

from __future__ import annotations

import math

from upshift.models.profile import ModelProfile, PassCost, Polynomial, Segment, StackTrace, StepTrace

GATHERED_INPUTS = 2  # of attention and of the feed-forward part: sequence parallelism gathers them, autograd keeps them
HALF_BYTES = 2


def divide(
    whole: StepTrace, half: StepTrace, ranks: int, *, sequence_parallel: bool, hidden_size: int, keeps_inputs: bool = True
) -> StepTrace:
    """Return the trace of one of ``ranks`` tensor-parallel ranks.

    Sequence parallelism also divides what each rank had whole, but for the inputs of the layers' first matrices. Ranks gather
    these inputs. A plain layer keeps them for the backward pass. A recomputed layer, and every layer if ``keeps_inputs`` is
    false, gathers them again (Korthikanti et al. 2022, section 4.2.2).
    """
    kept = _gathered(ranks, hidden_size) if sequence_parallel else None
    ways = whole.gaps_recomputed
    return whole.model_copy(
        update={
            "tensor_parallel": ranks,
            "gaps": tuple(_segment(one, two, ranks) for one, two in zip(whole.gaps, half.gaps, strict=True)),
            "gaps_recomputed": {
                way: tuple(_segment(one, two, ranks) for one, two in zip(gaps, half.gaps_recomputed[way], strict=True))
                for way, gaps in ways.items()
            },
            "stacks": tuple(
                _stack(one, two, ranks, kept, keeps=keeps_inputs) for one, two in zip(whole.stacks, half.stacks, strict=True)
            ),
        }
    )


def _stack(one: StackTrace, two: StackTrace, ranks: int, kept: Polynomial | None, *, keeps: bool) -> StackTrace:
    return StackTrace(
        plain=tuple(_layer(a, b, ranks, kept, keeps=keeps) for a, b in zip(one.plain, two.plain, strict=True)),
        recomputed={
            way: tuple(_layer(a, b, ranks, kept, keeps=False) for a, b in zip(layers, two.recomputed[way], strict=True))
            for way, layers in one.recomputed.items()
        },
    )


def _gathered(ranks: int, hidden_size: int) -> Polynomial:
    """Return the bytes that stay whole beside the part that sequence parallelism divides: each rank keeps 1 - 1/t of them more.
    """
    return Polynomial(bs=GATHERED_INPUTS * HALF_BYTES * hidden_size * (1.0 - 1.0 / ranks))


def _layer(one: Segment, two: Segment, ranks: int, kept: Polynomial | None, *, keeps: bool) -> Segment:
    if kept is None:
        return _segment(one, two, ranks)
    nothing = Polynomial()
    return Segment(
        forward=_shared_tokens(one.forward, two.forward, ranks, left=kept if keeps else nothing, rise=kept),
        backward=_shared_tokens(
            one.backward, two.backward, ranks, left=scaled(kept, -1.0) if keeps else nothing, rise=nothing if keeps else kept
        ),
        backward_accumulating=_shared_tokens(
            one.backward_accumulating, two.backward_accumulating, ranks,
            left=scaled(kept, -1.0) if keeps else nothing, rise=nothing if keeps else kept,
        ),
        compiled=None if one.compiled is None else total(scaled(one.compiled, 1.0 / ranks), kept if keeps else nothing),
    )  # fmt: skip


def divide_experts(profile: ModelProfile, trace: StepTrace, ranks: int) -> StepTrace:
    """Return the trace of one of ``ranks`` ranks that share experts.

    Each rank has its part of what does not grow with tokens in the experts: weights, their gradients and kernels. It still has
    as many tokens for its experts.
    """
    stacks, number = [], 0
    for stack, traced in zip(profile.stacks, trace.stacks, strict=True):
        parts = [1.0] * len(traced.plain)
        for index in stack.assignment:
            experts = experts_of(profile, number, number + 1) / max(stack.layer_trainable[index], 1)
            parts[index] = 1.0 - min(experts, 1.0) * (1.0 - 1.0 / ranks)
            number += 1
        recomputed = {
            way: tuple(of_constants(layer, part) for layer, part in zip(layers, parts, strict=True))
            for way, layers in traced.recomputed.items()
        }
        plain = tuple(of_constants(layer, part) for layer, part in zip(traced.plain, parts, strict=True))
        stacks.append(StackTrace(plain=plain, recomputed=recomputed))
    return trace.model_copy(update={"stacks": tuple(stacks)})


def of_constants(layer: Segment, part: float) -> Segment:
    """Return the layer with ``part`` of what does not grow with tokens: weights, their gradients and kernels."""

    def less(polynomial: Polynomial) -> Polynomial:
        return polynomial._replace(one=polynomial.one * part)

    def of_pass(cost: PassCost) -> PassCost:
        return cost.model_copy(
            update={
                "left": less(cost.left), "released": less(cost.released), "rise": tuple(map(less, cost.rise)),
                "moved_bytes": less(cost.moved_bytes), "matmul_bytes": less(cost.matmul_bytes),
                "num_kernels": round(cost.num_kernels * part),
            }
        )  # fmt: skip

    return layer.model_copy(
        update={
            "forward": of_pass(layer.forward), "backward": of_pass(layer.backward),
            "backward_accumulating": of_pass(layer.backward_accumulating),
        }
    )  # fmt: skip


def experts_of(profile: ModelProfile, first: int, last: int) -> float:
    """Return the number of parameters of all experts in layers ``first`` to ``last`` (exclusive)."""
    if profile.experts is None:
        return 0.0
    have_them = mixtures(profile)
    return profile.experts.parameters * sum(have_them[first:last]) / max(sum(have_them), 1)


def mixtures(profile: ModelProfile) -> list[bool]:
    """Return for every layer whether it has experts. A layer that is smaller than the mean layer's experts has none."""
    mean = profile.experts.parameters / max(profile.num_layers, 1) if profile.experts else math.inf
    return [size >= mean for size in layer_sizes(profile)]


def layer_sizes(profile: ModelProfile) -> list[int]:
    """Return the number of trained parameters of every layer."""
    return [stack.layer_trainable[index] for stack in profile.stacks for index in stack.assignment]


def keep_more(layer: Segment, extra: Polynomial, *, keeps: bool) -> Segment:
    """Return a layer whose forward pass makes ``extra`` more bytes for the backward pass.

    If ``keeps`` is false, as in a recomputed layer, the backward pass makes these bytes again.
    """
    nothing = Polynomial()
    left, again = (extra, nothing) if keeps else (nothing, extra)

    def more(cost: PassCost, left: Polynomial, rise: Polynomial) -> PassCost:
        return cost.model_copy(update={"left": total(cost.left, left), "rise": tuple(total(term, rise) for term in cost.rise)})

    freed = scaled(left, -1.0)
    return Segment(
        forward=more(layer.forward, left, extra), backward=more(layer.backward, freed, again),
        backward_accumulating=more(layer.backward_accumulating, freed, again),
    )  # fmt: skip


def _segment(one: Segment, two: Segment, ranks: int) -> Segment:
    return Segment(
        forward=_pass(one.forward, two.forward, ranks),
        backward=_pass(one.backward, two.backward, ranks),
        backward_accumulating=_pass(one.backward_accumulating, two.backward_accumulating, ranks),
        compiled=None if one.compiled is None or two.compiled is None else _between(one.compiled, two.compiled, ranks),
    )


def _pass(one: PassCost, two: PassCost, ranks: int) -> PassCost:
    return PassCost(
        left=_between(one.left, two.left, ranks),
        released=_between(one.released, two.released, ranks),
        rise=tuple(_between(first, second, ranks) for first, second in zip(one.rise, two.rise, strict=True)),
        matmul_flops=_between(one.matmul_flops, two.matmul_flops, ranks),
        attention_flops=_between(one.attention_flops, two.attention_flops, ranks),
        moved_bytes=_between(one.moved_bytes, two.moved_bytes, ranks),
        matmul_bytes=_between(one.matmul_bytes, two.matmul_bytes, ranks),
        num_kernels=two.num_kernels,
    )


def _shared_tokens(one: PassCost, two: PassCost, ranks: int, *, left: Polynomial, rise: Polynomial) -> PassCost:
    """Return the cost with everything divided among the ranks. ``left`` and ``rise`` are the bytes that each rank has beside its
    part."""
    divided = _pass(one, two, ranks)
    return divided.model_copy(
        update={
            "left": total(scaled(one.left, 1.0 / ranks), left),
            "rise": tuple(total(scaled(term, 1.0 / ranks), rise) for term in one.rise),
            "moved_bytes": scaled(one.moved_bytes, 1.0 / ranks),
        }
    )


def _between(one: Polynomial, two: Polynomial, ranks: int) -> Polynomial:
    """Return a + c / ranks, given ``one`` = a + c and ``two`` = a + c / 2."""
    share = 2.0 * (1.0 - 1.0 / ranks)
    return Polynomial(*(first + (second - first) * share for first, second in zip(one, two, strict=True)))


def scaled(polynomial: Polynomial, factor: float) -> Polynomial:
    return Polynomial(*(term * factor for term in polynomial))


def total(one: Polynomial, two: Polynomial) -> Polynomial:
    return Polynomial(*(first + second for first, second in zip(one, two, strict=True)))
