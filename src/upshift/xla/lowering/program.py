"""Run an exported graph with TensorFlow's operations.

Each call takes the weights as an argument. So several programs, such as prefill and step, share one set of weights, and weights
may be symbolic if a program is only compiled. Operators that are not lowered are reported before anything is traced.
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
    "convolution",
    "creation",
    "elementwise",
    "indexing",
    "matmul",
    "normalization",
    "reductions",
    "shape",
)
for _family in FAMILIES:
    import_module(f"upshift.xla.lowering.{_family}")

CHECKS = (  # torch's run-time checks; a program of static shapes was checked when it was exported
    "aten._assert_tensor_metadata.default",
    "aten._assert_scalar.default",
    "aten._assert_async.msg",
    "aten.sym_constrain_range_for_size.default",
    "aten.sym_constrain_range.default",
)
IGNORED_ARGUMENTS = ("dtype", "device", "layout", "pin_memory", "memory_format", "non_blocking", "generator", "implicit")
WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER)


class UnloweredOp(RequestError):
    """Report operators of the graph that are not lowered. ``missing`` maps each one to the module that uses it first."""

    def __init__(self, missing: Mapping[str, str]) -> None:
        self.missing = dict(missing)
        listing = ", ".join(f"{name} (in {module})" for name, module in missing.items())
        super().__init__(f"not lowered to TensorFlow: {listing}; train or run this model without --backend xla")


class Program:
    """Hold a lowered graph. ``inputs`` names its inputs, and ``weights`` its weights, by their Hugging Face names."""

    def __init__(self, exported: ExportedProgram, *, strip: str) -> None:
        _check_lowered(exported.graph.nodes)
        self._nodes = list(exported.graph.nodes)
        self._outputs = exported.graph_signature.output_specs
        self._weights: dict[str, str] = {}  # placeholder -> name in the model's state_dict
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
        """Run the program and return its results, in the order of the module's outputs.

        Args:
            inputs: the values in the order of ``self.inputs``.
            weights: tensors by their Hugging Face names. They are cast to the dtype that the module has them in.
            seed: two integers, for programs that draw random numbers.
        """
        assert len(inputs) == len(self.inputs), f"{len(inputs)} inputs for {self.inputs}"
        seed_token = SEED.set(seed)
        try:
            return self._run_graph(inputs, weights)
        finally:
            SEED.reset(seed_token)

    def _run_graph(self, inputs: Sequence[Any], weights: Mapping[str, Any]) -> list[tf.Tensor]:
        inputs_by_name = dict(zip(self.inputs, inputs, strict=True))
        values: dict[str, Any] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                values[node.name] = self._placeholder(node, inputs_by_name, weights)
            elif node.op == "call_function":
                values[node.name] = _lower_node(node, values)
            elif node.op == "output":
                results = _resolve(node.args[0], values)
        specified = zip(self._outputs, results, strict=True)
        return [value for spec, value in specified if spec.kind is OutputKind.USER_OUTPUT]

    def _placeholder(self, node: Node, inputs_by_name: Mapping[str, Any], weights: Mapping[str, Any]) -> Any:
        if node.name in inputs_by_name:
            value = inputs_by_name[node.name]
            return tf.convert_to_tensor(value) if value is not None else None
        if node.name in self._weights:
            return tf.cast(tf.convert_to_tensor(weights[self._weights[node.name]]), DTYPES[node.meta["val"].dtype])
        return as_constant(self._constants[node.name])


def lower(exported: ExportedProgram, *, strip: str = "model.") -> Program:
    """Lower an exported module. Raise UnloweredOp if an operator is not lowered.

    ``strip``: the prefix to remove from the names of weights, if the model is a submodule of the exported module."""
    return Program(exported, strip=strip)


def as_constant(tensor: torch.Tensor) -> tf.Tensor:
    """Return a torch tensor as a constant of TensorFlow."""
    numbers = tensor.detach()
    if numbers.dtype == torch.bfloat16:  # numpy has no bfloat16
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


def _lower_node(node: Node, values: Mapping[str, Any]) -> Any:
    name = str(node.target)
    if name in CHECKS:
        return None
    arguments = [_resolve(argument, values) for argument in node.args]
    named = {key: _resolve(value, values) for key, value in node.kwargs.items() if key not in IGNORED_ARGUMENTS}
    try:
        return LOWERINGS[name](node, *arguments, **named)
    except NotImplementedError as error:
        raise UnloweredOp({name: f"{module_of(node)}; {error}"}) from None


def _resolve(argument: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, Node):
        return values[argument.name]
    if isinstance(argument, list | tuple):
        return [_resolve(item, values) for item in argument]
    return argument
