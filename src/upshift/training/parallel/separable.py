"""Find out whether a model comes apart between any two of its layers, and which modules stand before and after them.

The model runs once, on a few tokens, with one of its layers. Only hidden states may depend on earlier weights and go from
layer to layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from upshift.errors import RequestError
from upshift.internals.torch_names import tree_leaves
from upshift.models.build import find_stacks
from upshift.models.measure import fake_masks

ROWS, WIDTH = 3, 7  # of the tokens that it runs on: a dimension that is one of them, or their product, grows with it
INSTEAD = "use fully_shard=weights, or tensor_parallel, in place of pipeline_parallel"


@dataclass
class Parts:
    """The paths of modules that have weights ``before`` the layers, with the shape of each output, and ``after`` them."""

    stack: str
    before: dict[str, Callable[[int, int], tuple[int, ...]]] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    hidden_shape: Callable[[int, int], tuple[int, ...]] = lambda rows, width: (rows, width)

    def tied(self, model: nn.Module) -> list[nn.Parameter]:
        """Return weights that modules before and after the layers share, in the order of the model."""
        after = {id(parameter) for path in self.after for parameter in model.get_submodule(path).parameters()}
        before = [parameter for path in self.before for parameter in model.get_submodule(path).parameters()]
        return [parameter for parameter in before if id(parameter) in after]


def find_parts(model: nn.Module) -> Parts:
    """Return the parts of a model with one stack of layers. Raise RequestError if it does not come apart."""
    ((stack, layers),) = find_stacks(model)
    parts = Parts(stack)
    siblings = _siblings(model, stack)
    outputs: dict[str, Any] = {}
    called: list[str] = []  # paths in their order, the stack among them

    def record(path: str, module: nn.Module, args: Any, output: Any) -> None:
        called.append(path)
        outputs[path] = output

    hooks = [module.register_forward_hook(partial(record, path)) for path, module in siblings.items()]
    try:
        with _one_layer(model, stack, layers, called) as hidden:
            _run(model)
    finally:
        for hook in hooks:
            hook.remove()
    parts.hidden_shape = _shape(hidden[0], "its layers", stack)
    start = called.index(stack)
    for path in siblings:
        if path in called[:start] and path in called[start:]:
            raise RequestError(f"the model's {path} is needed before and after its layers; {INSTEAD}")
        if path in called[:start]:
            parts.before[path] = _shape(outputs[path], path, stack)
        else:
            parts.after.append(path)
    return parts


def _siblings(model: nn.Module, stack: str) -> dict[str, nn.Module]:
    """Return modules with weights beside the stack and beside the modules that hold it, by path."""
    found: dict[str, nn.Module] = {}
    path, module = "", model
    for name in stack.split("."):
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            raise RequestError(f"the model has weights outside of its modules ({', '.join(own)}); {INSTEAD}")
        for other, child in module.named_children():
            if other != name and any(True for _ in child.parameters()):
                found[f"{path}{other}"] = child
        path, module = f"{path}{name}.", module.get_submodule(name)
    return found


@contextmanager
def _one_layer(model: nn.Module, stack: str, layers: nn.ModuleList, called: list[str]) -> Iterator[list[torch.Tensor]]:
    """Run the first layer while open, and return its output from every other layer. Yield the list that its input will be put
    into."""
    hidden: list[torch.Tensor] = []
    returned: list[Any] = []

    def run(number: int, layer: nn.Module, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("hidden_states")
        others = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor) and one is not given]
        if not isinstance(given, torch.Tensor) or any(one.requires_grad for one in others):
            raise RequestError(
                f"the layers of {stack} take more from what comes before them than hidden states, "
                f"so they cannot run in other processes; {INSTEAD}"
            )
        called.append(stack)
        if not returned:
            hidden.append(given)
            returned.append(whole(*args, **kwargs))
        return returned[0]

    for number, layer in enumerate(layers):
        layer.forward = partial(run, number, layer, layer.forward)
    try:
        yield hidden
    finally:
        for layer in layers:
            del layer.forward


def _run(model: nn.Module) -> None:
    device = next(model.parameters()).device
    ids = torch.zeros((ROWS, WIDTH), dtype=torch.long, device=device)
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    devices = [device] if device.type == "cuda" else []
    masks = fake_masks(masked=False) if device.type == "meta" else nullcontext()  # on the meta device their values cannot be read
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), masks:
        model(input_ids=ids, labels=ids, **extra)


def _shape(made: Any, what: str, stack: str) -> Callable[[int, int], tuple[int, ...]]:
    """Return a function for the shape of ``made`` with any number of rows and tokens a row."""
    if not isinstance(made, torch.Tensor):
        raise RequestError(f"{what} makes more than one tensor for {stack}; {INSTEAD}")
    dimensions = tuple(made.shape)

    def of(rows: int, width: int) -> tuple[int, ...]:
        grows = {ROWS: rows, WIDTH: width, ROWS * WIDTH: rows * width}
        return tuple(grows.get(dimension, dimension) for dimension in dimensions)

    return of
