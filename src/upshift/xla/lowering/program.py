"""A lowered program: the exported graph walked with tensors of TensorFlow. What it computes with is given to each call, so that
several programs (prefill and step, say) share one set of weights, and weights may be symbols while a program is only compiled.

Decides before anything is traced whether every operator of the graph is lowered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import tensorflow as tf
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from upshift.errors import RequestError
from upshift.xla.lowering.creation import SEED
from upshift.xla.lowering.registry import DTYPES, LOWERINGS

FAMILIES = (
    "convolution", "creation", "elementwise", "indexing", "matmul", "normalization", "reductions", "shape",
)  # fmt: skip
for _family in FAMILIES:
    import_module(f"upshift.xla.lowering.{_family}")

CHECKS = (  # of torch at run time; what they check is known when a program of static shapes is exported
    "aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten._assert_async.msg",
    "aten.sym_constrain_range_for_size.default", "aten.sym_constrain_range.default",
)  # fmt: skip
NOT_OURS = ("dtype", "device", "layout", "pin_memory", "memory_format", "non_blocking", "generator", "implicit")
WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER)


class UnloweredOp(RequestError):
    """The graph has operators that are not lowered. ``missing`` maps ATen operators to the module that first uses
    each."""

    def __init__(self, missing: Mapping[str, str]) -> None:
        self.missing = dict(missing)
        told = ", ".join(f"{name} (in {where})" for name, where in missing.items())
        super().__init__(f"not lowered to TensorFlow: {told}; train or run this model without --backend xla")


class Program:
    def __init__(self, exported: ExportedProgram, *, strip: str) -> None:
        _check_lowered(exported.graph.nodes)
        self._nodes = list(exported.graph.nodes)
        self._outputs = exported.graph_signature.output_specs
        self._weights: dict[str, str] = {}  # placeholder -> name in Hugging Face's state_dict
        self._constants: dict[str, torch.Tensor] = {}
        self.inputs: tuple[str, ...] = ()
        state = exported.state_dict
        first_name: dict[int, str] = {}
        for spec in exported.graph_signature.input_specs:
            name = spec.arg.name
            target = spec.target
            if spec.kind is InputKind.USER_INPUT:
                self.inputs += (name,)
            elif spec.kind in WEIGHTS and target in state:
                tied = first_name.setdefault(id(state[target]), target)
                self._weights[name] = tied.removeprefix(strip)
            else:
                self._constants[name] = exported.constants[target]

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._weights.values()))

    def __call__(self, inputs: Sequence[Any], weights: Mapping[str, Any], *, seed: tf.Tensor | None = None) -> list[tf.Tensor]:
        """In the order of ``self.inputs``; the results in the order in which the module gives them. Weights are read here, in the
        dtype that the module has them in. ``seed``: two integers, for programs that draw random numbers."""
        assert len(inputs) == len(self.inputs), f"{len(inputs)} inputs for {self.inputs}"
        before = SEED.set(seed)
        try:
            return self._walk(inputs, weights)
        finally:
            SEED.reset(before)

    def _walk(self, inputs: Sequence[Any], weights: Mapping[str, Any]) -> list[tf.Tensor]:
        given = dict(zip(self.inputs, inputs, strict=True))
        values: dict[str, Any] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                values[node.name] = self._placeholder(node, given, weights)
            elif node.op == "call_function":
                values[node.name] = _lowered(node, values)
            elif node.op == "output":
                found = _resolved(node.args[0], values)
        of_user = zip(self._outputs, found, strict=True)
        return [value for spec, value in of_user if spec.kind is OutputKind.USER_OUTPUT]

    def _placeholder(self, node: Node, given: Mapping[str, Any], weights: Mapping[str, Any]) -> Any:
        if node.name in given:
            value = given[node.name]
            return tf.convert_to_tensor(value) if value is not None else None
        if node.name in self._weights:
            return tf.cast(tf.convert_to_tensor(weights[self._weights[node.name]]), DTYPES[node.meta["val"].dtype])
        return as_constant(self._constants[node.name])


def lower(exported: ExportedProgram, *, strip: str = "model.") -> Program:
    """Lower an exported module. ``strip`` is the prefix of weights' names if the model is a part of the exported
    module. Raise UnloweredOp."""
    return Program(exported, strip=strip)


def as_constant(tensor: torch.Tensor) -> tf.Tensor:
    numbers = tensor.detach()
    if numbers.dtype == torch.bfloat16:  # numpy has none
        return tf.cast(tf.constant(numbers.float().numpy()), tf.bfloat16)
    return tf.constant(numbers.numpy())


def _check_lowered(nodes: Any) -> None:
    missing: dict[str, str] = {}
    for node in nodes:
        name = str(node.target)
        if node.op == "call_function" and name not in LOWERINGS and name not in CHECKS:
            missing.setdefault(name, module_of(node))
    if missing:
        raise UnloweredOp(missing)


def module_of(node: Node) -> str:
    """Return the innermost module of the model that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "the model"
    path, kind = stack[-1]
    return f"{path or 'the model'}: {str(kind).rpartition('.')[2]}"


def _lowered(node: Node, values: Mapping[str, Any]) -> Any:
    name = str(node.target)
    if name in CHECKS:
        return None
    arguments = [_resolved(argument, values) for argument in node.args]
    named = {key: _resolved(value, values) for key, value in node.kwargs.items() if key not in NOT_OURS}
    try:
        return LOWERINGS[name](node, *arguments, **named)
    except NotImplementedError as error:
        raise UnloweredOp({name: f"{module_of(node)}; {error}"}) from None


def _resolved(argument: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, Node):
        return values[argument.name]
    if isinstance(argument, list | tuple):
        return [_resolved(one, values) for one in argument]
    return argument
