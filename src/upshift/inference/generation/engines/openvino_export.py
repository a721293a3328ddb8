"""Export a causal language model of transformers as an OpenVINO model that keeps its keys and values between calls.

Inputs: input_ids [R, S], attention_mask [R, T], position_ids [R, S] where the model takes them, beam_idx [R]: rows of
the cache that these rows go on with. Output: logits [R, 1, V] of the last token. OpenVINO's generation library reads
it, too.

Trace and convert a model of transformers into one that keeps its keys and values between calls. The form and the
names are those of OpenVINO's own tools (optimum-intel's stateful models). It is made here because those tools need an
older transformers.

Choose which weights keep 16 bits beside others in 8: those that come first, as what is lost there goes through all
that follows.

In a Llama of 12 layers with random weights, the first layer had 0.73 of what the cosine of logits lost with 8 bits
everywhere, the first four 0.93, the last and the head 0.01 each (docs/log.md). Embeddings are looked up, not
multiplied: they cost no time.

Convert operators of torch that OpenVINO's converter does not know into those that it knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.inference.generation.model import full_cache, load_model
from upshift.inference.openvino_runtime import fp16_weights
from upshift.internals.openvino_names import STATEFUL
from upshift.models.kv_cache import returned_cache, with_cache
from upshift.models.source import ModelSource

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
    shapes = state_shapes(past, "past_key_values")
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


def state_shapes(states: Sequence[Any], prefix: str) -> dict[str, list[int]]:
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


GROUP_SIZE = 128  # weights that share a scale, of int4


def int4_weights(model: Any, texts: Sequence[Sequence[int]] = ()) -> Any:
    """``texts``: token ids that the rounding is fitted to."""
    import nncf

    fallback = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
    names = {name for port in model.inputs for name in port.names}
    fitted = {"dataset": nncf.Dataset([_inputs(ids, names) for ids in texts]), "awq": True, "scale_estimation": True}
    return nncf.compress_weights(
        model, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=GROUP_SIZE, ratio=1.0, advanced_parameters=fallback,
        **(fitted if texts else {}),
    )  # fmt: skip


def _inputs(ids: Sequence[int], names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the inputs of one text from its first token on."""
    row = np.array([ids], dtype=np.int64)
    given: dict[str, np.ndarray] = {
        "input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(row.size)[None],
        "beam_idx": np.zeros(1, dtype=np.int32),
    }  # fmt: skip
    return {name: value for name, value in given.items() if name in names}


def export(source: ModelSource) -> Any:
    model = load_model(source, "fp32")
    example = _example(model, rows=2, cached=3, new=2)  # no number that is taken for a constant is another's
    other = _example(model, rows=3, cached=7, new=4)
    plain = ("input_ids", "attention_mask", "position_ids")
    return convert_stateful(_step(model), example, other, plain=plain, past=example[3:], beside={})


def _example(model: Any, *, rows: int, cached: int, new: int) -> tuple[Any, ...]:
    """Return inputs of tokens that differ, so that a mixture of experts sends them different ways. The first cached
    token is padding."""
    import torch

    tokens = torch.arange(rows * (cached + new)).reshape(rows, -1) % model.config.get_text_config(decoder=True).vocab_size
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    with torch.no_grad():
        cache = returned_cache(model(input_ids=tokens[:, :cached], attention_mask=mask[:, :cached], use_cache=True))
    positions = torch.arange(cached, cached + new).expand(rows, -1)
    return tokens[:, cached:], mask, positions, *keys_and_values(cache)


def _step(model: Any) -> Any:
    import torch

    takes = inspect.signature(model.forward).parameters

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, *past: torch.Tensor) -> Any:
            more = {"position_ids": positions, "logits_to_keep": 1}
            known = {name: value for name, value in more.items() if name in takes}
            cache = full_cache(past)
            found = self.model(input_ids=ids, attention_mask=mask, **with_cache(self.model, cache), **known)
            return found.logits[:, -1:], *keys_and_values(cache)

    return Step()


FIRST = 1 / 3  # of the weights before the last matrix
LARGEST = 127


def mixed_weights(model: Any) -> Any:
    """Round matrices to 8 bits, scaled by output, but for the first third of them. That third, and all else, is in
    fp16."""
    from openvino import opset13

    products = [(node, node.input_value(1).get_node()) for node in model.get_ordered_ops() if _is_rounded(node)]
    sizes = [weights.data.size for _, weights in products]
    kept = FIRST * sum(sizes[:-1])
    model = fp16_weights(model)  # before: OpenVINO compresses nothing of a model that has 8 bits already
    for place, (node, weights) in enumerate(products):
        if sum(sizes[: place + 1]) <= kept:
            continue
        rounded, scales = quantize_to_int8(weights.data, outputs=0 if node.get_attributes()["transpose_b"] else 1)
        whole = opset13.multiply(opset13.convert(opset13.constant(rounded), "f32"), opset13.constant(scales))
        node.input(1).replace_source_output(whole.output(0))
    model.validate_nodes_and_infer_types()
    return model


def _is_rounded(node: Any) -> bool:
    """Return whether the node is a product with a matrix of weights. Those of several experts in one stay as they
    are."""
    if node.get_type_name() != "MatMul":
        return False
    weights = node.input_value(1).get_node()
    return weights.get_type_name() == "Constant" and len(weights.get_output_shape(0)) == 2


def quantize_to_int8(weights: np.ndarray, *, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix as int8, and a scale of each output. ``outputs`` is the axis of the outputs."""
    scales = np.abs(weights).max(1 - outputs, keepdims=True).astype(np.float32) / LARGEST
    scales = np.where(scales > 0.0, scales, np.float32(1.0))
    return np.rint(weights / scales).astype(np.int8), scales


def operators() -> list[Any]:
    from openvino.frontend.pytorch import ConversionExtension

    return [ConversionExtension("aten::histc", _histc)]


def _histc(node: Any) -> Any:
    """Convert aten::histc, with which mixtures of experts count the tokens of each expert."""
    from openvino import opset13

    values = node.get_input(0)
    bins, low, high = (float(node.get_values_from_const_input(place)) for place in (1, 2, 3))
    place = opset13.floor(opset13.multiply(opset13.subtract(values, np.float32(low)), np.float32(bins / (high - low))))
    place = opset13.select(opset13.equal(values, np.float32(high)), np.float32(bins - 1), place)  # its upper end is inside
    there = opset13.one_hot(opset13.convert(place, "i64"), np.int64(bins), np.float32(1.0), np.float32(0.0), -1)
    return opset13.reduce_sum(there, np.array([0]), False).outputs()
