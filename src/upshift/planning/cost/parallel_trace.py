"""Divide the trace of a model's layers among tensor-parallel or expert-parallel ranks.

Every number of a tensor-parallel trace is a + c / t on ``t`` ranks: each rank has ``a``, and all ranks together divide ``c``.
The traces of one rank and of one of two ranks (ModelProfile.step, tensor_parallel=2) give both. The terms of ``rise`` are in the
same order in the two.
"""

from __future__ import annotations

import math

from upshift.models.profile import ModelProfile, PassCost, Polynomial, Segment, StackTrace, StepTrace

# The inputs of attention and of the feed-forward part: sequence parallelism gathers them, and autograd saves them.
GATHERED_INPUTS = 2
HALF_BYTES = 2


def tensor_parallel_trace(
    undivided: StepTrace, halved: StepTrace, ranks: int, *, sequence_parallel: bool, hidden_size: int, saves_inputs: bool = True
) -> StepTrace:
    """Return the trace of one of ``ranks`` tensor-parallel ranks.

    Sequence parallelism also divides what each rank has whole without it, except for the inputs of the layers' first matrices.
    Ranks gather these inputs. A plain layer saves them for the backward pass. A recomputed layer, and every layer if
    ``saves_inputs`` is false, gathers them again (Korthikanti et al. 2022, section 4.2.2).

    Args:
        undivided: the trace of one rank.
        halved: the trace of one of two tensor-parallel ranks.
    """
    gathered = _gathered_input_bytes(ranks, hidden_size) if sequence_parallel else None

    def divide_gaps(undivided_gaps: tuple[Segment, ...], halved_gaps: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return _divide_layers(undivided_gaps, halved_gaps, ranks, None, saves=False)

    return undivided.model_copy(
        update={
            "tensor_parallel": ranks,
            "gaps": divide_gaps(undivided.gaps, halved.gaps),
            "gaps_recomputed": {
                granularity: divide_gaps(gaps, halved.gaps_recomputed[granularity])
                for granularity, gaps in undivided.gaps_recomputed.items()
            },
            "stacks": tuple(
                _divide_stack(*pair, ranks, gathered, saves=saves_inputs)
                for pair in zip(undivided.stacks, halved.stacks, strict=True)
            ),
        }
    )


def _divide_stack(
    undivided: StackTrace, halved: StackTrace, ranks: int, gathered: Polynomial | None, *, saves: bool
) -> StackTrace:
    return StackTrace(
        plain=_divide_layers(undivided.plain, halved.plain, ranks, gathered, saves=saves),
        recomputed={
            granularity: _divide_layers(layers, halved.recomputed[granularity], ranks, gathered, saves=False)
            for granularity, layers in undivided.recomputed.items()
        },
    )


def _divide_layers(
    undivided: tuple[Segment, ...], halved: tuple[Segment, ...], ranks: int, gathered: Polynomial | None, *, saves: bool
) -> tuple[Segment, ...]:
    return tuple(_divide_layer(*pair, ranks, gathered, saves=saves) for pair in zip(undivided, halved, strict=True))


def _gathered_input_bytes(ranks: int, hidden_size: int) -> Polynomial:
    """Return the bytes of gathered inputs that a rank has beside its own part of them: a share of 1 - 1/t."""
    return Polynomial(bs=GATHERED_INPUTS * HALF_BYTES * hidden_size * (1.0 - 1.0 / ranks))


def _divide_layer(undivided: Segment, halved: Segment, ranks: int, gathered: Polynomial | None, *, saves: bool) -> Segment:
    if gathered is None:
        return _divide_segment(undivided, halved, ranks)
    nothing = Polynomial()
    saved = gathered if saves else nothing
    freed = scale(gathered, -1.0) if saves else nothing
    gathered_again = nothing if saves else gathered
    return Segment(
        forward=_divide_tokens(undivided.forward, halved.forward, ranks, left=saved, rise=gathered),
        backward=_divide_tokens(undivided.backward, halved.backward, ranks, left=freed, rise=gathered_again),
        backward_accumulating=_divide_tokens(
            undivided.backward_accumulating, halved.backward_accumulating, ranks, left=freed, rise=gathered_again
        ),
        compiled=None if undivided.compiled is None else add(scale(undivided.compiled, 1.0 / ranks), saved),
    )


def expert_parallel_trace(profile: ModelProfile, trace: StepTrace, ranks: int) -> StepTrace:
    """Return the trace of one of ``ranks`` ranks that share experts.

    In the experts a rank has its part of what does not grow with tokens: weights, their gradients and kernels. Its experts still
    compute as many tokens.
    """
    stacks = []
    layer_number = 0
    for stack, traced in zip(profile.stacks, trace.stacks, strict=True):
        factors = [1.0] * len(traced.plain)
        for index in stack.assignment:
            experts = expert_elements(profile, layer_number, layer_number + 1) / max(stack.layer_trainable[index], 1)
            factors[index] = 1.0 - min(experts, 1.0) * (1.0 - 1.0 / ranks)
            layer_number += 1
        recomputed = {granularity: _scale_layers(layers, factors) for granularity, layers in traced.recomputed.items()}
        plain = _scale_layers(traced.plain, factors)
        stacks.append(StackTrace(plain=plain, recomputed=recomputed))
    return trace.model_copy(update={"stacks": tuple(stacks)})


def _scale_layers(layers: tuple[Segment, ...], factors: list[float]) -> tuple[Segment, ...]:
    return tuple(scale_constants(layer, factor) for layer, factor in zip(layers, factors, strict=True))


def scale_constants(layer: Segment, factor: float) -> Segment:
    """Return the layer with everything that does not grow with tokens scaled: weights, their gradients and kernels."""

    def scale_constant(polynomial: Polynomial) -> Polynomial:
        return polynomial._replace(one=polynomial.one * factor)

    def scale_pass(cost: PassCost) -> PassCost:
        return cost.model_copy(
            update={
                "left": scale_constant(cost.left),
                "released": scale_constant(cost.released),
                "rise": tuple(map(scale_constant, cost.rise)),
                "moved_bytes": scale_constant(cost.moved_bytes),
                "matmul_bytes": scale_constant(cost.matmul_bytes),
                "num_kernels": round(cost.num_kernels * factor),
            }
        )

    return layer.model_copy(
        update={
            "forward": scale_pass(layer.forward),
            "backward": scale_pass(layer.backward),
            "backward_accumulating": scale_pass(layer.backward_accumulating),
        }
    )


def expert_elements(profile: ModelProfile, first: int, last: int) -> float:
    """Return the number of parameters of all experts in layers ``first`` to ``last`` (exclusive)."""
    if profile.experts is None:
        return 0.0
    has_experts = layers_with_experts(profile)
    return profile.experts.parameters * sum(has_experts[first:last]) / max(sum(has_experts), 1)


def layers_with_experts(profile: ModelProfile) -> list[bool]:
    """Return for every layer whether it has experts. A layer that is smaller than the experts of the mean layer has none."""
    mean_experts = profile.experts.parameters / max(profile.num_layers, 1) if profile.experts else math.inf
    return [size >= mean_experts for size in layer_sizes(profile)]


def layer_sizes(profile: ModelProfile) -> list[int]:
    """Return the number of trained parameters of every layer."""
    return [stack.layer_trainable[index] for stack in profile.stacks for index in stack.assignment]


def add_left(cost: PassCost, extra: Polynomial) -> PassCost:
    """Return the cost of a pass that leaves ``extra`` more bytes."""
    return cost.model_copy(update={"left": add(cost.left, extra)})


def add_saved_bytes(layer: Segment, extra: Polynomial, *, saves: bool) -> Segment:
    """Return a layer whose forward pass saves ``extra`` more bytes for the backward pass.

    If ``saves`` is false, as in a recomputed layer, the backward pass makes these bytes again.
    """
    nothing = Polynomial()
    saved = extra if saves else nothing
    remade = nothing if saves else extra

    def add_to_pass(cost: PassCost, left: Polynomial, rise: Polynomial) -> PassCost:
        return cost.model_copy(update={"left": add(cost.left, left), "rise": tuple(add(term, rise) for term in cost.rise)})

    freed = scale(saved, -1.0)
    return Segment(
        forward=add_to_pass(layer.forward, saved, extra),
        backward=add_to_pass(layer.backward, freed, remade),
        backward_accumulating=add_to_pass(layer.backward_accumulating, freed, remade),
    )


def _divide_segment(undivided: Segment, halved: Segment, ranks: int) -> Segment:
    compiled = None
    if undivided.compiled is not None and halved.compiled is not None:
        compiled = _interpolate(undivided.compiled, halved.compiled, ranks)
    return Segment(
        forward=_divide_pass(undivided.forward, halved.forward, ranks),
        backward=_divide_pass(undivided.backward, halved.backward, ranks),
        backward_accumulating=_divide_pass(undivided.backward_accumulating, halved.backward_accumulating, ranks),
        compiled=compiled,
    )


def _divide_pass(undivided: PassCost, halved: PassCost, ranks: int) -> PassCost:
    return PassCost(
        left=_interpolate(undivided.left, halved.left, ranks),
        released=_interpolate(undivided.released, halved.released, ranks),
        rise=tuple(_interpolate(first, second, ranks) for first, second in zip(undivided.rise, halved.rise, strict=True)),
        matmul_flops=_interpolate(undivided.matmul_flops, halved.matmul_flops, ranks),
        attention_flops=_interpolate(undivided.attention_flops, halved.attention_flops, ranks),
        moved_bytes=_interpolate(undivided.moved_bytes, halved.moved_bytes, ranks),
        matmul_bytes=_interpolate(undivided.matmul_bytes, halved.matmul_bytes, ranks),
        num_kernels=halved.num_kernels,
    )


def _divide_tokens(undivided: PassCost, halved: PassCost, ranks: int, *, left: Polynomial, rise: Polynomial) -> PassCost:
    """Return the cost with everything divided among the ranks.

    ``left`` and ``rise`` are the bytes that each rank has beside its part.
    """
    divided = _divide_pass(undivided, halved, ranks)
    return divided.model_copy(
        update={
            "left": add(scale(undivided.left, 1.0 / ranks), left),
            "released": scale(undivided.released, 1.0 / ranks),
            "rise": tuple(add(scale(term, 1.0 / ranks), rise) for term in undivided.rise),
            "moved_bytes": scale(undivided.moved_bytes, 1.0 / ranks),
        }
    )


def _interpolate(undivided: Polynomial, halved: Polynomial, ranks: int) -> Polynomial:
    """Return a + c / ranks, given ``undivided`` = a + c and ``halved`` = a + c / 2."""
    share = 2.0 * (1.0 - 1.0 / ranks)
    return Polynomial(*(first + (second - first) * share for first, second in zip(undivided, halved, strict=True)))


def scale(polynomial: Polynomial, factor: float) -> Polynomial:
    """Return the polynomial with every coefficient multiplied by ``factor``."""
    return Polynomial(*(term * factor for term in polynomial))


def add(left: Polynomial, right: Polynomial) -> Polynomial:
    """Return the sum of two polynomials."""
    return Polynomial(*(first + second for first, second in zip(left, right, strict=True)))
