"""Trace and convert a model of transformers into one that keeps its keys and values between calls. The form and the
names are those of OpenVINO's own tools (optimum-intel's stateful models). It is made here because those tools need an
older transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.internals.openvino_names import STATEFUL

ANY = -1  # a size that differs from call to call
TRACED_DIFFERENCE = 1e-3  # of the largest output: the same kernels, in one order


def convert_stateful(
    step: Any,
    example: tuple[Any, ...],
    other: tuple[Any, ...],
    *,
    plain: Sequence[str],
    past: Sequence[Any],
    beside: Mapping[str, Sequence[int]],
) -> Any:
    """Convert a model to one with states.

    ``step`` gives logits and the keys and values that come next. Its inputs are ``plain`` (names of tokens first,
    then of what the model may not take), ``past`` (keys and values), and ``beside`` (shapes by name)."""
    converted = convert(step, example, other)
    shapes = shapes_of(past, "past_key_values")
    taken = plain[: len(converted.inputs) - len(shapes) - len(beside)]
    kept = {name: name.replace("past_key_values", "present") for name in shapes}
    name_ports(converted, dict.fromkeys(taken, [ANY, ANY]) | shapes | dict(beside), ["logits", *kept.values()])
    _keep_inside(converted, kept, rows=plain[0])
    return converted


def convert(step: Any, example: tuple[Any, ...], other: tuple[Any, ...]) -> Any:
    """Convert a torch module. ``other`` holds inputs of other sizes and tokens than the example's. Raise RequestError
    if a size, or a choice by value, became a constant of the trace: the model would be wrong without a word."""
    import openvino
    import torch

    from upshift.inference.generation.engines.openvino_operators import operators

    with torch.no_grad():
        traced = torch.jit.trace(step.eval(), example, strict=False, check_trace=False)
        _check(traced, step, other)
        return openvino.convert_model(traced, example_input=example, extension=operators())


def _check(traced: Any, step: Any, other: tuple[Any, ...]) -> None:
    import torch

    try:
        pairs = zip(traced(*other), step(*other), strict=True)
        worst = float(torch.stack([(one - same).abs().max() / same.abs().max().clamp(min=1.0) for one, same in pairs]).max())
        said = f"differs by {worst:.1e}"
    except RuntimeError as error:  # shapes that do not fit each other
        worst, said = float("inf"), " ".join(str(error).split())[-120:]
    if not worst <= TRACED_DIFFERENCE:
        raise RequestError(f"a trace of this model is wrong for other lengths or tokens ({said}), so OpenVINO cannot run it")


def keys_and_values(cache: Any) -> tuple[Any, ...]:
    """Return keys and values of the first layer, then of the next."""
    return tuple(states for layer in cache.layers for states in (layer.keys, layer.values))


def shapes_of(states: Sequence[Any], prefix: str) -> dict[str, list[int]]:
    """Return the shapes of keys and values by their names, with any number of rows and tokens."""
    names = [f"{prefix}.{layer}.{kind}" for layer in range(len(states) // 2) for kind in ("key", "value")]
    return {name: [ANY, one.shape[1], ANY, one.shape[3]] for name, one in zip(names, states, strict=True)}


def name_ports(model: Any, inputs: Mapping[str, Sequence[int]], outputs: Sequence[str]) -> None:
    """Name the inputs and outputs, both in the model's order. ``inputs`` holds the shapes by name."""
    import openvino

    for port, (name, shape) in zip(model.inputs, inputs.items(), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(list(shape)))
    for port, name in zip(model.outputs, outputs, strict=True):
        port.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()


def _keep_inside(model: Any, past: Mapping[str, str], rows: str) -> None:
    """Turn inputs into states. ``past`` maps these inputs to the outputs that they are in the next call. ``rows`` is
    an input with as many rows. A new input, ``beam_idx`` [R], says which rows of the states these rows go on with."""

    _reorder(model, past)
    STATEFUL.get()(model, dict(past))
    _start_empty(model, rows)
    model.validate_nodes_and_infer_types()


def _reorder(model: Any, past: Mapping[str, str]) -> None:
    import openvino
    from openvino import opset13

    order = opset13.parameter([ANY], dtype=openvino.Type.i32, name="beam_idx")
    order.output(0).get_tensor().set_names({"beam_idx"})
    model.add_parameters([order])
    for name in past:
        port = model.input(name)
        readers = port.get_target_inputs()
        ordered = opset13.gather(port, order, opset13.constant(0))
        for reader in readers:
            reader.replace_source_output(ordered.output(0))
    model.validate_nodes_and_infer_types()


def _start_empty(model: Any, rows: str) -> None:
    """Give a state that was reset as many rows as the input, and no tokens."""
    from openvino import opset13

    zero = opset13.constant(np.array(0, dtype=np.int64))
    count = opset13.gather(opset13.shape_of(model.input(rows), output_type="i64"), opset13.constant(np.array([0])), zero)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, width = node.get_output_partial_shape(0)
            sizes = [opset13.constant(np.array([size], dtype=np.int64)) for size in (heads.get_length(), 0, width.get_length())]
            kind = node.get_output_element_type(0).to_dtype()
            empty = opset13.broadcast(opset13.constant(0.0, dtype=kind), opset13.concat([count, *sizes], 0))
            node.set_arguments([empty.output(0)])
