"""Make a model of the same architecture deeper or shallower: a profile with another number of the traced layers."""

from __future__ import annotations

from upshift.models.profile import ModelProfile, Parameters, ParameterShape, Polynomial, Stack


def with_layers(profile: ModelProfile, layers: int) -> ModelProfile:
    """Return the profile with ``layers`` layers in its deepest stack, and in the others in proportion.

    The traced layers are repeated in their order. Everything outside the layers stays.
    """
    deepest = max((stack.num_layers for stack in profile.stacks), default=0)
    if layers == deepest or not deepest:
        return profile
    stacks = tuple(_stretched(stack, max(stack.num_layers * layers // deepest, 1)) for stack in profile.stacks)
    forward, backward = profile.forward_flops, profile.backward_flops
    for old, new, traced in zip(profile.stacks, stacks, profile.steps[0].stacks, strict=True):
        for index, segment in enumerate(traced.plain):
            more = new.assignment.count(index) - old.assignment.count(index)
            attention = segment.forward.attention_flops
            forward = _plus(forward, more, segment.forward.matmul_flops, attention)
            # A fused backward pass computes the scores again, which the convention leaves out: it is twice the forward pass.
            backward = _plus(backward, more, segment.backward.matmul_flops, attention, attention)
    ratio = (_weight(stacks), _weight(profile.stacks))
    divided, experts = profile.tensor_parallel, profile.experts
    kv = profile.kv_elements
    return profile.model_copy(
        update={
            "model_hash": f"{profile.model_hash}-{layers}-layers",
            "stacks": stacks,
            "parameters": _parameters(profile.parameters, ratio, layers=(sum(s.num_layers for s in stacks), profile.num_layers)),
            "tensor_parallel": divided and divided.changed(layers=_scaled(divided.layers, ratio)),
            "experts": experts and experts.changed(parameters=_scaled(experts.parameters, ratio)),
            "kv_elements": kv and Polynomial(*(term * layers / deepest for term in kv)),
            "forward_flops": forward,
            "backward_flops": backward,
        }
    )


def _stretched(stack: Stack, layers: int) -> Stack:
    return stack.changed(assignment=tuple(stack.assignment[layer % stack.num_layers] for layer in range(layers)))


def _weight(stacks: tuple[Stack, ...]) -> int:
    """Return the trained parameters of all layers, to scale sums over them, or the number of layers if none is trained."""
    trained = sum(stack.layer_trainable[index] for stack in stacks for index in stack.assignment)
    return trained or sum(stack.num_layers for stack in stacks)


def _scaled(total: int, ratio: tuple[int, int]) -> int:
    return (total * ratio[0] + ratio[1] // 2) // ratio[1]


def _plus(polynomial: Polynomial, count: int, *others: Polynomial) -> Polynomial:
    return Polynomial(*(old + count * sum(more) for old, *more in zip(polynomial, *others, strict=True)))


def _parameters(parameters: Parameters, ratio: tuple[int, int], *, layers: tuple[int, int]) -> Parameters:
    inside, trained = _scaled(parameters.layers, ratio), _scaled(parameters.trainable_layers, ratio)
    frozen = parameters.layers - parameters.trainable_layers
    return parameters.changed(
        total=parameters.total - parameters.layers + inside,
        layers=inside,
        trainable=parameters.trainable - parameters.trainable_layers + trained,
        trainable_layers=trained,
        always_fp32=_scaled(parameters.always_fp32, ratio),
        quantized=_scaled(parameters.quantized, ratio),
        quantized_bytes=_scaled(parameters.quantized_bytes, ratio),
        trainable_shapes=_shapes(parameters, parameters.trainable_shapes, parameters.trainable_layers, ratio, layers),
        frozen_shapes=_shapes(parameters, parameters.frozen_shapes, frozen, ratio, layers),
    )


def _shapes(
    parameters: Parameters, shapes: tuple[ParameterShape, ...], in_layers: int, ratio: tuple[int, int], layers: tuple[int, int]
) -> tuple[ParameterShape, ...]:
    """Return the shapes with the counts of the new number of layers.

    A shape stands so many times in each of equal layers, and a few times outside. Outside are the remainder of the division by
    the layers, and shapes as large as embedding or head. If that does not add up to the layers' parameters (``in_layers``), all
    counts are scaled alike.
    """
    new, old = layers
    outside = {parameters.embedding, parameters.head}
    inner = [0 if shape.elements in outside else shape.count // old for shape in shapes]
    found = sum(each * old * shape.elements for each, shape in zip(inner, shapes, strict=True))
    if found == in_layers:
        pairs = zip(inner, shapes, strict=True)
        return tuple(shape.changed(count=shape.count + each * (new - old)) for each, shape in pairs)
    return tuple(shape.changed(count=max(_scaled(shape.count, ratio), 1)) for shape in shapes)
