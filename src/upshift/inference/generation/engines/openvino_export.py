"""A causal language model of transformers as an OpenVINO model that keeps its keys and values between calls.

Inputs: input_ids [R, S], attention_mask [R, T], position_ids [R, S] where the model takes them, beam_idx [R]: rows of the cache
that these rows go on with. Output: logits [R, 1, V] of the last token. The form and the names that OpenVINO's own tools give
(optimum-intel's stateful models) and its generation library reads; made here because those tools need an older transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from upshift.inference.generation.model import load_model, plain_cache
from upshift.models.source import ModelSource

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
    """Of one text from its first token on."""
    row = np.array([ids], dtype=np.int64)
    given = {"input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(row.size)[None]}
    return {name: value for name, value in {**given, "beam_idx": np.zeros(1, dtype=np.int32)}.items() if name in names}


class _Traced(NamedTuple):
    model: Any
    names: list[str]  # of its inputs
    past: list[tuple[str, list[int]]]  # names of keys and values that come in, and [heads, width]


def export(source: ModelSource) -> Any:
    traced = _trace(load_model(source, "fp32"))
    _name(traced)
    _reorder(traced)
    from openvino._offline_transformations import apply_make_stateful_transformation

    apply_make_stateful_transformation(traced.model, {name: _new(name) for name, _ in traced.past})
    _start_empty(traced.model)
    traced.model.validate_nodes_and_infer_types()
    return traced.model


def _trace(model: Any) -> _Traced:
    import openvino
    import torch

    takes = inspect.signature(model.forward).parameters

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, *past: torch.Tensor) -> Any:
            more = {"position_ids": positions, "logits_to_keep": 1}
            known = {name: value for name, value in more.items() if name in takes}
            found = self.model(input_ids=ids, attention_mask=mask, past_key_values=plain_cache(past), use_cache=True, **known)
            return found.logits[:, -1:], *_keys_and_values(found.past_key_values)

    # Two rows, three places that are cached, two new ones: no number that is taken for a constant is another's.
    ids, mask, positions = torch.ones(2, 2, dtype=torch.long), torch.ones(2, 5, dtype=torch.long), torch.tensor([[3, 4], [3, 4]])
    with torch.no_grad():
        past = _keys_and_values(model(input_ids=torch.ones(2, 3, dtype=torch.long), use_cache=True).past_key_values)
        converted = openvino.convert_model(Step().eval(), example_input=(ids, mask, positions, *past))
    names = [f"past_key_values.{layer}.{kind}" for layer in range(len(past) // 2) for kind in ("key", "value")]
    plain = ["input_ids", "attention_mask", "position_ids"][
        : len(converted.inputs) - len(names)
    ]  # positions fall away where none are taken
    sizes = [[states.shape[1], states.shape[3]] for states in past]
    return _Traced(converted, plain + names, list(zip(names, sizes, strict=True)))


def _keys_and_values(cache: Any) -> tuple[Any, ...]:
    return tuple(states for layer in cache.layers for states in (layer.keys, layer.values))


def _new(name: str) -> str:
    return name.replace("past_key_values", "present")


def _name(traced: _Traced) -> None:
    import openvino

    sizes = dict(traced.past)
    for port, name in zip(traced.model.inputs, traced.names, strict=True):
        port.get_tensor().set_names({name})
        heads, width = sizes.get(name, (None, None))
        shape = [-1, -1] if heads is None else [-1, heads, -1, width]
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
    for port, name in zip(traced.model.outputs, ["logits", *(_new(name) for name, _ in traced.past)], strict=True):
        port.get_tensor().set_names({name})
    traced.model.validate_nodes_and_infer_types()


def _reorder(traced: _Traced) -> None:
    """Cached keys and values by ``beam_idx``, an input of its own."""
    import openvino
    from openvino import opset13

    order = opset13.parameter([-1], dtype=openvino.Type.i32, name="beam_idx")
    order.output(0).get_tensor().set_names({"beam_idx"})
    traced.model.add_parameters([order])
    for name, _ in traced.past:
        port = traced.model.input(name)
        readers = port.get_target_inputs()
        ordered = opset13.gather(port, order, opset13.constant(0))
        for reader in readers:
            reader.replace_source_output(ordered.output(0))
    traced.model.validate_nodes_and_infer_types()


def _start_empty(model: Any) -> None:
    """A state that was reset has as many rows as ``input_ids``, and no tokens."""
    from openvino import opset13

    zero = opset13.constant(np.array(0, dtype=np.int64))
    rows = opset13.gather(opset13.shape_of(model.input("input_ids"), output_type="i64"), opset13.constant(np.array([0])), zero)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, width = node.get_output_partial_shape(0)
            sizes = [opset13.constant(np.array([size], dtype=np.int64)) for size in (heads.get_length(), 0, width.get_length())]
            kind = node.get_output_element_type(0).to_dtype()
            empty = opset13.broadcast(opset13.constant(0.0, dtype=kind), opset13.concat([rows, *sizes], 0))
            node.set_arguments([empty.output(0)])
