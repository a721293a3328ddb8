"""Export a causal language model of transformers as an OpenVINO model that keeps its keys and values between calls, and
round its weights.

Inputs: input_ids [R, S], attention_mask [R, T], position_ids [R, S] if the model takes them, and beam_idx [R], the rows of the
cache that these rows continue. Output: logits [R, 1, V] of the last token. The form and the names are those of OpenVINO's own
tools (optimum-intel's stateful models), so OpenVINO's generation library reads the model too. It is made here because those tools
need an older transformers."""

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
from upshift.text import one_line

ANY = -1  # a dynamic size
MAX_TRACE_DIFFERENCE = 1e-3  # relative to the largest output: a trace runs the same kernels in the same order


def convert_stateful(
    step: Any,
    example: tuple[Any, ...],
    other_example: tuple[Any, ...],
    *,
    token_inputs: Sequence[str],
    states: Sequence[Any],
    other_inputs: Mapping[str, Sequence[int]],
) -> Any:
    """Convert a torch module to an OpenVINO model with states.

    Args:
        step: returns logits, then the next keys and values. Its inputs are token inputs, states, other inputs.
        example: inputs for the trace.
        other_example: inputs of other sizes, to check the trace.
        token_inputs: names of the token inputs, [R, S] each. The model may not use the last ones.
        states: keys and values of the example.
        other_inputs: shapes of the other inputs by name.
    """
    converted = convert(step, example, other_example)
    state_input_shapes = state_shapes(states, "past_key_values")
    used_inputs = token_inputs[: len(converted.inputs) - len(state_input_shapes) - len(other_inputs)]
    outputs_by_state = {name: name.replace("past_key_values", "present") for name in state_input_shapes}
    input_shapes = dict.fromkeys(used_inputs, [ANY, ANY]) | state_input_shapes | dict(other_inputs)
    name_ports(converted, input_shapes, ["logits", *outputs_by_state.values()])
    _make_stateful(converted, outputs_by_state, row_input=token_inputs[0])
    return converted


def convert(step: Any, example: tuple[Any, ...], other_example: tuple[Any, ...]) -> Any:
    """Convert a torch module to an OpenVINO model.

    ``other_example`` holds inputs of other sizes and tokens than the example. Raise RequestError if the trace computes wrong
    outputs for it, because a size or a branch became a constant."""
    import openvino
    import torch

    with torch.no_grad():
        traced = torch.jit.trace(step.eval(), example, strict=False, check_trace=False)
        _check_trace(traced, step, other_example)
        return openvino.convert_model(traced, example_input=example, extension=operators())


def _check_trace(traced_step: Any, step: Any, other_inputs: tuple[Any, ...]) -> None:
    """Raise RequestError if the trace computes other outputs than the module."""
    import torch

    try:
        output_pairs = zip(traced_step(*other_inputs), step(*other_inputs), strict=True)
        differences = [
            (traced_output - output).abs().max() / output.abs().max().clamp(min=1.0) for traced_output, output in output_pairs
        ]
        largest_difference = float(torch.stack(differences).max())
        difference = f"differs by {largest_difference:.1e}"
    except RuntimeError as error:  # shapes that do not match
        largest_difference = float("inf")
        difference = one_line(error, limit=None)[-120:]
    if not largest_difference <= MAX_TRACE_DIFFERENCE:
        raise RequestError(
            f"a trace of this model is wrong for other lengths or tokens ({difference}), so OpenVINO cannot run it"
        )


def keys_and_values(cache: Any) -> tuple[Any, ...]:
    """Return keys and values of the first layer, then of the next layers."""
    return tuple(states for layer in cache.layers for states in (layer.keys, layer.values))


def state_shapes(states: Sequence[Any], prefix: str) -> dict[str, list[int]]:
    """Return the shapes of keys and values by name, with dynamic numbers of rows and tokens."""
    names = [f"{prefix}.{layer}.{kind}" for layer in range(len(states) // 2) for kind in ("key", "value")]
    return {name: [ANY, tensor.shape[1], ANY, tensor.shape[3]] for name, tensor in zip(names, states, strict=True)}


def name_ports(model: Any, inputs: Mapping[str, Sequence[int]], outputs: Sequence[str]) -> None:
    """Name the inputs and outputs in the model's order. ``inputs`` holds the shapes of the inputs by name."""
    import openvino

    for port, (name, shape) in zip(model.inputs, inputs.items(), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(list(shape)))
    for port, name in zip(model.outputs, outputs, strict=True):
        port.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()


def _make_stateful(model: Any, outputs_by_state: Mapping[str, str], row_input: str) -> None:
    """Turn inputs into states.

    ``outputs_by_state`` maps each of these inputs to the output that replaces it in the next call. ``row_input`` is an input
    with as many rows. A new input, ``beam_idx`` [R], selects the rows of the states that the rows continue."""
    _add_beam_index(model, outputs_by_state)
    STATEFUL.get()(model, dict(outputs_by_state))
    _start_empty(model, row_input)
    model.validate_nodes_and_infer_types()


def _add_beam_index(model: Any, state_inputs: Mapping[str, str]) -> None:
    import openvino
    from openvino import opset13

    beam_index = opset13.parameter([ANY], dtype=openvino.Type.i32, name="beam_idx")
    beam_index.output(0).get_tensor().set_names({"beam_idx"})
    model.add_parameters([beam_index])
    for name in state_inputs:
        port = model.input(name)
        readers = port.get_target_inputs()
        ordered = opset13.gather(port, beam_index, opset13.constant(0))
        for reader in readers:
            reader.replace_source_output(ordered.output(0))
    model.validate_nodes_and_infer_types()


def _start_empty(model: Any, row_input: str) -> None:
    """Let a state start with as many rows as the input ``row_input`` has, and no tokens."""
    from openvino import opset13

    zero = opset13.constant(np.array(0, dtype=np.int64))
    num_rows = opset13.gather(opset13.shape_of(model.input(row_input), output_type="i64"), opset13.constant(np.array([0])), zero)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, width = node.get_output_partial_shape(0)
            sizes = [opset13.constant(np.array([size], dtype=np.int64)) for size in (heads.get_length(), 0, width.get_length())]
            dtype = node.get_output_element_type(0).to_dtype()
            empty = opset13.broadcast(opset13.constant(0.0, dtype=dtype), opset13.concat([num_rows, *sizes], 0))
            node.set_arguments([empty.output(0)])


INT4_GROUP_SIZE = 128  # weights that share a scale


def int4_weights(model: Any, calibration: Sequence[Sequence[int]] = ()) -> Any:
    """Round the weights to 4 bits by groups.

    ``calibration`` holds token ids of texts that the rounding is fitted to."""
    import nncf

    fallback = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
    input_names = {name for port in model.inputs for name in port.names}
    fitting = {"dataset": nncf.Dataset([_inputs(ids, input_names) for ids in calibration]), "awq": True, "scale_estimation": True}
    return nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_SYM,
        group_size=INT4_GROUP_SIZE,
        ratio=1.0,
        advanced_parameters=fallback,
        **(fitting if calibration else {}),
    )


def _inputs(ids: Sequence[int], input_names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the model's inputs for one text."""
    id_row = np.array([ids], dtype=np.int64)
    inputs: dict[str, np.ndarray] = {
        "input_ids": id_row,
        "attention_mask": np.ones_like(id_row),
        "position_ids": np.arange(id_row.size)[None],
        "beam_idx": np.zeros(1, dtype=np.int32),
    }
    return {name: value for name, value in inputs.items() if name in input_names}


def export(source: ModelSource) -> Any:
    """Return the OpenVINO model in fp32."""
    model = load_model(source, "fp32")
    example = _make_example(model, rows=2, cached=3, new=2)  # no two sizes are equal, so that none becomes another in the trace
    other_example = _make_example(model, rows=3, cached=7, new=4)
    return convert_stateful(
        _make_step(model),
        example,
        other_example,
        token_inputs=("input_ids", "attention_mask", "position_ids"),
        states=example[3:],
        other_inputs={},
    )


def _make_example(model: Any, *, rows: int, cached: int, new: int) -> tuple[Any, ...]:
    """Return inputs with different tokens, so that a mixture of experts sends them to different experts.

    The first cached token of the first row is padding."""
    import torch

    tokens = torch.arange(rows * (cached + new)).reshape(rows, -1) % model.config.get_text_config(decoder=True).vocab_size
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    with torch.no_grad():
        cache = returned_cache(model(input_ids=tokens[:, :cached], attention_mask=mask[:, :cached], use_cache=True))
    positions = torch.arange(cached, cached + new).expand(rows, -1)
    return tokens[:, cached:], mask, positions, *keys_and_values(cache)


def _make_step(model: Any) -> Any:
    import torch

    parameters = inspect.signature(model.forward).parameters

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, *past: torch.Tensor) -> Any:
            optional = {"position_ids": positions, "logits_to_keep": 1}
            accepted = {name: value for name, value in optional.items() if name in parameters}
            cache = full_cache(past)
            output = self.model(input_ids=ids, attention_mask=mask, **with_cache(self.model, cache), **accepted)
            return output.logits[:, -1:], *keys_and_values(cache)

    return Step()


# Share of the weights before the last matrix that keeps 16 bits, from the first layer on, because errors there pass through all
# later layers. In a Llama of 12 layers with random weights, the first layer caused 0.73 of the loss of cosine with 8 bits
# everywhere, the first four 0.93, the last layer and the head 0.01 each (docs/log.md). Embeddings are looked up, not multiplied,
# so they cost no time.
FP16_SHARE = 1 / 3
MAX_INT8 = 127


def mixed_weights(model: Any) -> Any:
    """Round matrices to 8 bits, scaled by output channel, except for the first third of the weights. That third and all
    other weights are in fp16."""
    from openvino import opset13

    weight_products = [(node, node.input_value(1).get_node()) for node in model.get_ordered_ops() if _is_rounded(node)]
    sizes = [weights.data.size for _, weights in weight_products]
    num_fp16 = FP16_SHARE * sum(sizes[:-1])
    model = fp16_weights(model)  # first, because OpenVINO does not compress a model that has 8 bits already
    for index, (node, weights) in enumerate(weight_products):
        if sum(sizes[: index + 1]) <= num_fp16:
            continue
        int8_values, scales = quantize_to_int8(weights.data, outputs=0 if node.get_attributes()["transpose_b"] else 1)
        dequantized = opset13.multiply(opset13.convert(opset13.constant(int8_values), "f32"), opset13.constant(scales))
        node.input(1).replace_source_output(dequantized.output(0))
    model.validate_nodes_and_infer_types()
    return model


def _is_rounded(node: Any) -> bool:
    """Return whether the node is a product with a matrix of weights. Weights of several experts in one tensor are not
    rounded."""
    if node.get_type_name() != "MatMul":
        return False
    weights = node.input_value(1).get_node()
    return weights.get_type_name() == "Constant" and len(weights.get_output_shape(0)) == 2


def quantize_to_int8(weights: np.ndarray, *, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix as int8, and the scale of each output channel. ``outputs`` is the axis of the output channels."""
    scales = np.abs(weights).max(1 - outputs, keepdims=True).astype(np.float32) / MAX_INT8
    scales = np.where(scales > 0.0, scales, np.float32(1.0))
    return np.rint(weights / scales).astype(np.int8), scales


def operators() -> list[Any]:
    """Return conversions of torch operators that OpenVINO's converter does not know."""
    from openvino.frontend.pytorch import ConversionExtension

    return [ConversionExtension("aten::histc", _histc)]


def _histc(node: Any) -> Any:
    """Convert aten::histc, with which mixtures of experts count the tokens of each expert."""
    from openvino import opset13

    values = node.get_input(0)
    bins, lowest, highest = (float(node.get_values_from_const_input(index)) for index in (1, 2, 3))
    bins_per_unit = np.float32(bins / (highest - lowest))
    bin_index = opset13.floor(opset13.multiply(opset13.subtract(values, np.float32(lowest)), bins_per_unit))
    is_highest = opset13.equal(values, np.float32(highest))
    bin_index = opset13.select(is_highest, np.float32(bins - 1), bin_index)  # the highest value belongs to the last bin
    one_hot = opset13.one_hot(opset13.convert(bin_index, "i64"), np.int64(bins), np.float32(1.0), np.float32(0.0), -1)
    return opset13.reduce_sum(one_hot, np.array([0]), False).outputs()
