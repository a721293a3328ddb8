"""Find, compare and restore what a script's loss, data set and collator keep between calls.

A loss that counts its calls, or moves an average on, gives other values when a batch is computed in parts. Looking at the loss
and at the data must leave no trace in the training. The search covers attributes, objects and functions of the script that
they lead to, buffers of modules, and generators of random numbers.
"""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_VALUES = 5000
MAX_CONTAINER_ITEMS = 1000  # of one container; a longer one is data
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


def is_library_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES


class StateSnapshot:
    """A record of all that some objects and functions keep at one moment."""

    def __init__(self, *, without: frozenset[str] = frozenset(), **roots: Any) -> None:
        """Record the state of ``roots``, which are given by name.

        All attributes of a root are recorded, whatever its class, except those named in ``without``.
        """
        self._seen: set[int] = set()
        self._kept: list[tuple[str, Callable[[], bool], Callable[[], None]]] = []  # name, has it changed, put it back
        self._alive: list[Any] = []  # an id is one object's while that lives
        for root_name, root in roots.items():
            if isinstance(root, nn.Module | types.FunctionType | types.MethodType) or not hasattr(root, "__dict__"):
                self._visit(root_name, root, 1)
                continue
            self._seen.add(id(root))  # methods among its values lead back to it
            self._keep_mapping(root_name, vars(root))
            for name, value in vars(root).items():
                if name not in without:
                    self._visit(name, value, 1)

    def changed(self) -> str | None:
        """Return the name of something that has changed, or None."""
        return next((name for name, has_changed, _ in self._kept if has_changed()), None)

    def restore(self) -> None:
        for _, has_changed, put_back in self._kept:
            if has_changed():
                put_back()

    def _visit(self, name: str, value: Any, depth: int) -> None:
        if id(value) in self._seen or len(self._seen) > MAX_VALUES or depth > MAX_DEPTH:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        for part_name, part in self._parts(name, value):
            self._visit(part_name, part, depth + 1)

    def _parts(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Keep one value. Yield the values that it leads to."""
        if isinstance(value, Tensor):
            self._keep_tensor(name, value)
        elif isinstance(value, dict) and len(value) <= MAX_CONTAINER_ITEMS:
            self._keep_mapping(name, value)
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
        elif isinstance(value, list | set | deque) and len(value) <= MAX_CONTAINER_ITEMS:
            self._keep_items(name, value)
            yield from ((name, item) for item in value)
        elif isinstance(value, tuple) and len(value) <= MAX_CONTAINER_ITEMS:
            yield from ((name, item) for item in value)
        elif isinstance(value, torch.Generator):
            self._keep_generator(name, value.get_state, value.set_state)
        elif isinstance(value, random.Random):
            self._keep_generator(name, value.getstate, value.setstate)
        elif isinstance(value, np.random.RandomState):
            self._keep_generator(name, value.get_state, value.set_state)
        elif isinstance(value, np.random.Generator):
            bits: Any = value.bit_generator
            self._keep_generator(name, lambda: bits.state, lambda state: setattr(bits, "state", state))
        elif isinstance(value, nn.Module):
            yield from self._parts_of_module(name, value)
        elif isinstance(value, types.MethodType):
            yield from ((name, value.__func__), (name, value.__self__))
        elif isinstance(value, types.FunctionType):
            yield from self._parts_of_function(name, value)
        elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType) and not is_library_class(type(value)):
            self._keep_mapping(name, vars(value))
            yield from ((f"{name}.{key}", item) for key, item in vars(value).items())

    def _parts_of_module(self, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        for part_name, part in module.named_modules():
            for key, buffer in part.named_buffers(recurse=False):
                self._keep_tensor(f"{name}.{part_name}.{key}".replace("..", "."), buffer)
            if not is_library_class(type(part)):
                own = {key: item for key, item in vars(part).items() if not key.startswith("_")}
                self._keep_mapping(part_name or name, vars(part))
                yield from ((f"{part_name or name}.{key}", item) for key, item in own.items() if key != "config")
                yield part_name or name, type(part).forward

    def _parts_of_function(self, name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        if function.__module__.partition(".")[0] in LIBRARIES:
            return
        for cell_name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # nothing is in it yet
            self._keep_cell(cell_name, cell)
            yield cell_name, value
        yield from ((name, default) for default in function.__defaults__ or ())
        yield from self._globals_of(function.__code__, function.__globals__)

    def _globals_of(self, code: types.CodeType, namespace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name in code.co_names:
            if name in namespace and not isinstance(namespace[name], type | types.ModuleType):
                self._keep_global(name, namespace)
                yield name, namespace[name]
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._globals_of(constant, namespace)

    def _keep(self, name: str, has_changed: Callable[[], bool], put_back: Callable[[], None]) -> None:
        self._kept.append((name, has_changed, put_back))

    def _keep_tensor(self, name: str, tensor: Tensor) -> None:
        if tensor.numel() <= MAX_TENSOR_ELEMENTS and not tensor.is_meta:
            before = tensor.detach().clone()
            self._keep(name, lambda: not _is_equal(tensor.detach(), before), lambda: _copy_back(tensor, before))

    def _keep_mapping(self, name: str, mapping: dict[Any, Any]) -> None:
        before = dict(mapping)

        def has_changed() -> bool:
            return mapping.keys() != before.keys() or not all(_is_unchanged(mapping[key], value) for key, value in before.items())

        def put_back() -> None:
            mapping.clear()
            mapping.update(before)

        self._keep(name, has_changed, put_back)

    def _keep_items(self, name: str, items: list[Any] | set[Any] | deque[Any]) -> None:
        before = list(items)

        def has_changed() -> bool:
            return len(items) != len(before) or not all(
                _is_unchanged(one, other) for one, other in zip(items, before, strict=True)
            )

        def put_back() -> None:
            items.clear()
            items.update(before) if isinstance(items, set) else items.extend(before)

        self._keep(name, has_changed, put_back)

    def _keep_cell(self, name: str, cell: types.CellType) -> None:
        before = cell.cell_contents
        self._keep(name, lambda: not _is_unchanged(cell.cell_contents, before), lambda: setattr(cell, "cell_contents", before))

    def _keep_global(self, name: str, namespace: dict[str, Any]) -> None:
        before = namespace[name]
        self._keep(name, lambda: not _is_unchanged(namespace.get(name), before), lambda: namespace.__setitem__(name, before))

    def _keep_generator(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        before = get()
        self._keep(name, lambda: not _is_equal(get(), before), lambda: put(before))


def _is_unchanged(value: Any, before: Any) -> bool:
    """Return whether a name still leads to the same object, or to an equal number or text."""
    if value is before:
        return True
    return type(value) is type(before) and isinstance(value, int | float | str | bytes | bool) and value == before


def _is_equal(value: Any, before: Any) -> bool:
    if isinstance(value, Tensor):
        return value.shape == before.shape and torch.equal(value, before)
    if isinstance(value, np.ndarray):
        return bool(np.array_equal(value, before))
    if isinstance(value, Mapping):
        return value.keys() == before.keys() and all(_is_equal(value[key], before[key]) for key in value)
    if isinstance(value, tuple):
        return len(value) == len(before) and all(_is_equal(one, other) for one, other in zip(value, before, strict=True))
    return bool(value == before)


@torch.no_grad()
def _copy_back(tensor: Tensor, before: Tensor) -> None:
    tensor.copy_(before)
