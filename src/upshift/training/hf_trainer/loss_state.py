"""Record and restore the state that a script's loss, data set and collator keep between calls.

A loss that counts its calls, or updates a moving average, returns other values when a batch is computed in parts. Measuring the
loss and sampling the data must leave no trace in the training. The search covers attributes, objects and functions of the
script that they refer to, buffers of modules, and generators of random numbers.
"""

from __future__ import annotations

import copy
import random
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from upshift.internals.torch_names import tree_leaves

MAX_VALUES = 5000
MAX_CONTAINER_ITEMS = 1000  # of one container; a longer one holds data, and no state
MAX_TENSOR_ELEMENTS = 10**6  # of one tensor
MAX_DEPTH = 8
LIBRARIES = frozenset(
    {"accelerate", "builtins", "collections", "datasets", "functools", "numpy", "peft", "pathlib", "tokenizers", "torch",
     "transformers", "typing", "upshift"}
)  # fmt: skip
TRAINER_ATTRIBUTES = frozenset(
    {"accelerator", "args", "callback_handler", "control", "data_collator", "eval_dataset", "lr_scheduler", "model",
     "model_wrapped", "optimizer", "processing_class", "state", "train_dataset"}
)  # fmt: skip

EXCHANGES = ("c10d", "_c10d_functional")  # namespaces of operators
RANDOM_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


def is_library_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES


def _state_accessors(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the functions that read and set the state of one of RANDOM_GENERATORS."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return generator.get_state, generator.set_state


def refuse_exchanges(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of torch. Raise RuntimeError if it exchanges data with other ranks, because these may not take part."""
    if operator.namespace in EXCHANGES:
        raise RuntimeError("the script's code exchanges data with other ranks")
    return operator(*args, **kwargs)


class DataWatch:
    """Watch the operators of torch that draw batches: whether they use a device, or exchange data with other ranks."""

    def __init__(self) -> None:
        self.device = ""  # the first device beside the CPU
        self.exchanges = False  # whether an exchange was refused

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator. Raise RuntimeError if it exchanges data with other ranks, because these may not take part."""
        self.exchanges = self.exchanges or operator.namespace in EXCHANGES
        result = refuse_exchanges(operator, args, kwargs)
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                self.device = self.device or value.device.type
        return result


@contextmanager
def state_at_step(trainer: Any, step: int, total_steps: int) -> Iterator[None]:
    """Set the Trainer's ``state`` to a step of the training while open, because a loss may read it."""
    state = trainer.state
    trainer.state = copy.copy(state)
    trainer.state.global_step = step
    trainer.state.max_steps = total_steps
    trainer.state.epoch = trainer.args.num_train_epochs * step / max(total_steps, 1)
    try:
        yield
    finally:
        trainer.state = state


@contextmanager
def without_logging(trainer: Any) -> Iterator[dict[str, None]]:
    """Replace the Trainer's ``log`` while open, so that a loss that is only measured reaches neither the log nor callbacks.

    Yield the names that the loss tried to log, in order.
    """
    script_log = vars(trainer).get("log")
    names = dict[str, None]()
    trainer.log = lambda logs, *arguments, **named: names.update(dict.fromkeys(logs))
    try:
        yield names
    finally:
        del trainer.log
        if script_log is not None:
            trainer.log = script_log


class Tracker(NamedTuple):
    """Functions of a library that record a value: those of a module, or of a class in it, whose whole names match a pattern."""

    module: str
    class_name: str
    pattern: str


TRACKERS = (
    Tracker("torch.utils.tensorboard", "SummaryWriter", r"add_\w+"),
    Tracker("tensorboardX", "SummaryWriter", r"add_\w+"),
    Tracker("wandb", "", "log"),
    Tracker("wandb", "Run", "log|log_artifact"),
    Tracker("mlflow", "", r"log_\w+|set_tags?"),
    Tracker("trackio", "", "log"),
    Tracker("trackio", "Run", "log"),
    Tracker("swanlab", "", "log"),
)


@contextmanager
def muted_trackers() -> Iterator[list[str]]:
    """Let the trackers that this process has imported record nothing while open. Yield the names of the functions called."""
    calls: list[str] = []
    with ExitStack() as stack:
        for tracker in TRACKERS:
            owner: Any = sys.modules.get(tracker.module)
            if tracker.class_name:
                owner = getattr(owner, tracker.class_name, None)
            if owner is None:
                continue
            names = [name for name, value in vars(owner).items() if callable(value) and re.fullmatch(tracker.pattern, name)]
            for name in names:
                stack.callback(setattr, owner, name, vars(owner)[name])
                shown_name = f"{tracker.class_name or tracker.module}.{name}"
                setattr(owner, name, _recording(shown_name, calls))
        yield calls


def _recording(name: str, calls: list[str]) -> Callable[..., None]:
    """Return a function that appends the name to ``calls`` and does nothing else."""

    def record(*arguments: Any, **named: Any) -> None:
        if name not in calls:
            calls.append(name)

    return record


@dataclass
class Traces:
    """Say whether a measured loss would leave something behind if it were not undone."""

    reason: str | None = None  # why a plan may not call it for other rows


class StateSnapshot:
    """A record of the state of some objects and functions at one moment."""

    def __init__(self, *, without: frozenset[str] = frozenset(), **roots: Any) -> None:
        """Record the state of ``roots``, which map names to objects.

        Record all attributes of a root, whatever its class, except those named in ``without``.
        """
        self._seen: set[int] = set()
        self._records: list[tuple[str, Callable[[], bool], Callable[[], None]]] = []  # name, has_changed, restore_value
        self._alive: list[Any] = []  # an id belongs to one object only while the object is alive
        for root_name, root in roots.items():
            if isinstance(root, nn.Module | types.FunctionType | types.MethodType) or not hasattr(root, "__dict__"):
                self._visit(root_name, root, 1)
                continue
            self._seen.add(id(root))  # its methods refer back to it
            self._record_mapping(root_name, vars(root))
            for name, value in vars(root).items():
                if name not in without:
                    self._visit(name, value, 1)

    def changed(self) -> str | None:
        """Return the name of the first value that has changed, or None."""
        return next((name for name, has_changed, _ in self._records if has_changed()), None)

    def restore(self) -> None:
        for _, has_changed, restore_value in self._records:
            if has_changed():
                restore_value()

    def _visit(self, name: str, value: Any, depth: int) -> None:
        if id(value) in self._seen or len(self._seen) > MAX_VALUES or depth > MAX_DEPTH:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        for child_name, child in self._children(name, value):
            self._visit(child_name, child, depth + 1)

    def _children(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Record one value. Yield the names and values that it refers to."""
        if isinstance(value, Tensor):
            self._record_tensor(name, value)
        elif isinstance(value, dict | list | set | deque | tuple) and len(value) <= MAX_CONTAINER_ITEMS:
            yield from self._container_children(name, value)
        elif isinstance(value, RANDOM_GENERATORS):
            self._record_generator(name, *_state_accessors(value))
        elif isinstance(value, nn.Module):
            yield from self._module_children(name, value)
        elif isinstance(value, types.MethodType):
            yield from ((name, value.__func__), (name, value.__self__))
        elif isinstance(value, types.FunctionType):
            yield from self._function_children(name, value)
        elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType) and not is_library_class(type(value)):
            self._record_mapping(name, vars(value))
            yield from ((f"{name}.{key}", item) for key, item in vars(value).items())

    def _container_children(
        self, name: str, container: dict[Any, Any] | list[Any] | set[Any] | deque[Any] | tuple[Any, ...]
    ) -> Iterator[tuple[str, Any]]:
        if isinstance(container, dict):
            self._record_mapping(name, container)
            yield from ((f"{name}[{key!r}]", item) for key, item in container.items())
            return
        if not isinstance(container, tuple):
            self._record_items(name, container)
        yield from ((name, item) for item in container)

    def _module_children(self, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        for submodule_name, submodule in module.named_modules():
            for key, buffer in submodule.named_buffers(recurse=False):
                self._record_tensor(f"{name}.{submodule_name}.{key}".replace("..", "."), buffer)
            for key, parameter in submodule.named_parameters(recurse=False):
                self._record_gradient(f"the gradient of {submodule_name}.{key}", parameter)
            if not is_library_class(type(submodule)):
                attributes = {key: item for key, item in vars(submodule).items() if not key.startswith("_")}
                self._record_mapping(submodule_name or name, vars(submodule))
                yield from ((f"{submodule_name or name}.{key}", item) for key, item in attributes.items() if key != "config")
                yield submodule_name or name, type(submodule).forward

    def _function_children(self, name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        if function.__module__.partition(".")[0] in LIBRARIES:
            return
        for cell_name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # the cell is still empty
            self._record_cell(cell_name, cell)
            yield cell_name, value
        yield from ((name, default) for default in function.__defaults__ or ())
        yield from self._code_globals(function.__code__, function.__globals__)

    def _code_globals(self, code: types.CodeType, namespace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name in code.co_names:
            if name in namespace and not isinstance(namespace[name], type | types.ModuleType):
                self._record_global(name, namespace)
                yield name, namespace[name]
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code_globals(constant, namespace)

    def _record(self, name: str, has_changed: Callable[[], bool], restore_value: Callable[[], None]) -> None:
        self._records.append((name, has_changed, restore_value))

    def _record_tensor(self, name: str, tensor: Tensor) -> None:
        if tensor.numel() <= MAX_TENSOR_ELEMENTS and not tensor.is_meta:
            recorded = tensor.detach().clone()
            self._record(name, lambda: not _is_equal(tensor.detach(), recorded), lambda: _copy_back(tensor, recorded))

    def _record_gradient(self, name: str, parameter: nn.Parameter) -> None:
        recorded = parameter.grad
        self._record(name, lambda: parameter.grad is not recorded, lambda: setattr(parameter, "grad", recorded))

    def _record_mapping(self, name: str, mapping: dict[Any, Any]) -> None:
        recorded = dict(mapping)

        def has_changed() -> bool:
            return mapping.keys() != recorded.keys() or not all(
                _is_unchanged(mapping[key], value) for key, value in recorded.items()
            )

        def restore_value() -> None:
            mapping.clear()
            mapping.update(recorded)

        self._record(name, has_changed, restore_value)

    def _record_items(self, name: str, items: list[Any] | set[Any] | deque[Any]) -> None:
        recorded = list(items)

        def has_changed() -> bool:
            return len(items) != len(recorded) or not all(
                _is_unchanged(item, recorded_item) for item, recorded_item in zip(items, recorded, strict=True)
            )

        def restore_value() -> None:
            items.clear()
            items.update(recorded) if isinstance(items, set) else items.extend(recorded)

        self._record(name, has_changed, restore_value)

    def _record_cell(self, name: str, cell: types.CellType) -> None:
        recorded = cell.cell_contents
        self._record(
            name, lambda: not _is_unchanged(cell.cell_contents, recorded), lambda: setattr(cell, "cell_contents", recorded)
        )

    def _record_global(self, name: str, namespace: dict[str, Any]) -> None:
        recorded = namespace[name]
        self._record(
            name, lambda: not _is_unchanged(namespace.get(name), recorded), lambda: namespace.__setitem__(name, recorded)
        )

    def _record_generator(self, name: str, get_state: Callable[[], Any], set_state: Callable[[Any], Any]) -> None:
        recorded = get_state()
        self._record(name, lambda: not _is_equal(get_state(), recorded), lambda: set_state(recorded))


def _is_unchanged(value: Any, recorded: Any) -> bool:
    """Return whether a name still refers to the same object, or to an equal number or text."""
    if value is recorded:
        return True
    return type(value) is type(recorded) and isinstance(value, int | float | str | bytes | bool) and value == recorded


def _is_equal(value: Any, recorded: Any) -> bool:
    if isinstance(value, Tensor):
        return value.shape == recorded.shape and torch.equal(value, recorded)
    if isinstance(value, np.ndarray):
        return bool(np.array_equal(value, recorded))
    if isinstance(value, Mapping):
        return value.keys() == recorded.keys() and all(_is_equal(value[key], recorded[key]) for key in value)
    if isinstance(value, tuple):
        return len(value) == len(recorded) and all(
            _is_equal(item, recorded_item) for item, recorded_item in zip(value, recorded, strict=True)
        )
    return bool(value == recorded)


@torch.no_grad()
def _copy_back(tensor: Tensor, recorded: Tensor) -> None:
    tensor.copy_(recorded)
