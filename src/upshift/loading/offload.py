"""Runs a model whose weights are partly on the disk: a module's weights are in memory while its forward runs.

Between its turns a weight on the disk is a read-only mapping of the file: its dtype, shape and content are there for whoever asks
(an embedding looks its rows up in it, a tied head's other end finds it), and no memory is taken. Writing to it ends the process.
Such weights are frozen. Where gradients pass through them, what autograd would keep of a weight is a note of where it lies, and
backward reads it again.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from upshift.errors import RequestError
from upshift.hardware.detect import detect
from upshift.loading.header import StoredTensor
from upshift.loading.layout import is_looked_up
from upshift.loading.place import CPU, DISK, Placement
from upshift.loading.reader import Reader, make_groups
from upshift.loading.tensors import dtype_of, shape_of


@dataclass(frozen=True)
class _Weight:
    parameter: nn.Parameter
    resting: Tensor  # mapped
    stored: StoredTensor


@dataclass(frozen=True)
class _Saved:
    """A view of a weight that autograd keeps: where it lies in which piece of which unit."""

    unit: _Unit
    piece: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Unit:
    """What is read together, and the modules that need it."""

    def __init__(self, offload: Offload, number: int, weights: Sequence[_Weight]) -> None:
        self.offload, self.number, self.weights = offload, number, weights
        self._inside = 0
        self._contexts: list[AbstractContextManager[Any]] = []

    def enter(self, module: nn.Module, arguments: Any) -> None:
        if any(weight.parameter.requires_grad for weight in self.weights):
            raise RequestError("weights on the disk are frozen and cannot be trained; train an adapter around them, such as LoRA")
        if self._inside == 0:
            pieces = self.offload.acquire(self.number)
            self._place(pieces)
            self._pointers = {piece.data_ptr(): number for number, piece in enumerate(pieces)}
        self._inside += 1
        context: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self._note, _look_up)
        context.__enter__()
        self._contexts.append(context)

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._inside == 0:  # what enters failed
            return
        self._contexts.pop().__exit__(None, None, None)
        self._inside -= 1
        if self._inside == 0:
            self._rest()
            self.offload.release(self.number)

    def _place(self, pieces: Sequence[Tensor]) -> None:
        with torch.inference_mode(False):
            for weight, (piece, start) in zip(self.weights, self.offload.starts[self.number], strict=True):
                content = pieces[piece][start : start + weight.stored.nbytes]
                weight.parameter.data = content.view(weight.resting.dtype).view(weight.resting.shape)

    def _rest(self) -> None:
        for weight in self.weights:
            weight.parameter.data = weight.resting

    def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A layer's forward that is made again in the backward pass, where no hook of the layer runs. What it saves are views of
        the buffer, which is kept until another unit is asked for."""
        if self._inside:
            return function(*arguments)
        self._place(self.offload.again(self.number))
        try:
            return function(*arguments)
        finally:
            self._rest()

    def _note(self, tensor: Tensor) -> Tensor | _Saved:
        piece = self._pointers.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None
        if piece is None:
            return tensor
        return _Saved(self, piece, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())


def _look_up(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    content = saved.unit.offload.again(saved.unit.number)[saved.piece].view(saved.dtype)
    return content.as_strided(saved.size, saved.stride, saved.offset)


class Offload:
    """The weights of one model that are on the disk."""

    def __init__(self, units: Sequence[Sequence[_Weight]], *, budget: int, keep_cached: bool) -> None:
        groups = make_groups([[weight.stored for weight in unit] for unit in units], budget)
        self.starts = []
        for group, unit in zip(groups, units, strict=True):
            found = {
                stored.name: (number, start)
                for number, piece in enumerate(group.pieces)
                for stored, start in zip(piece.tensors, piece.starts, strict=True)
            }
            self.starts.append([found[weight.stored.name] for weight in unit])
        self.reader = Reader(groups, budget=budget, keep_cached=keep_cached)
        self.units = [_Unit(self, number, weights) for number, weights in enumerate(units)]
        self.mapped_bytes = 0
        self._backward: tuple[int, list[Tensor]] | None = None

    def acquire(self, number: int) -> list[Tensor]:
        self._end_backward(number)
        return self.reader.acquire(number)

    def release(self, number: int) -> None:
        self.reader.release(number)

    def again(self, number: int) -> list[Tensor]:
        """For backward, which goes through one unit after another: until it comes to another one."""
        self._end_backward(number)
        if self._backward is None:
            self._backward = number, self.reader.acquire(number)
        return self._backward[1]

    def _end_backward(self, number: int) -> None:
        if self._backward is not None and self._backward[0] != number:
            last, self._backward = self._backward[0], None
            self.reader.release(last)


def dispatch(
    model: nn.Module, placement: Placement, stored: Mapping[str, StoredTensor], *, buffer_bytes: int | None = None
) -> None:
    """Leave on the disk what the placement has there; everything else has its weights already.

    ``stored``: for each such parameter, where bytes of its dtype and shape lie. ``buffer_bytes``: of what is read ahead, else as
    the placement says.
    """
    weights = _on_disk(model, placement, stored)
    if not weights:
        return
    free = detect().cpu
    total = sum(weight.stored.nbytes for weight in weights.values())
    keep_cached = free is None or free.free_memory_bytes is None or total < free.free_memory_bytes
    units, hooked = _units(model, placement, weights)
    budget = placement.stream_bytes.get(CPU, 0) if buffer_bytes is None else buffer_bytes
    model._upshift_offload = True  # type: ignore[assignment]
    if not units:
        return
    offload = Offload(units, budget=budget, keep_cached=keep_cached)
    for module, number in hooked:
        module.register_forward_pre_hook(offload.units[number].enter)
        module.register_forward_hook(offload.units[number].leave, always_call=True)
        module._upshift_unit = offload.units[number]  # type: ignore[assignment]
    weakref.finalize(model, offload.reader.close)
    offload.mapped_bytes = total
    model._upshift_offload = offload  # type: ignore[assignment]


def recompute_offloaded(model: nn.Module) -> None:
    """After activation checkpointing was switched on: transformers checkpoints a layer's forward inside of its hooks."""
    for module in model.modules():
        unit = getattr(module, "_upshift_unit", None)
        if unit is not None and hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = partial(_checkpointed, unit, module._gradient_checkpointing_func)


def _checkpointed(unit: _Unit, checkpoint: Callable[..., Any], function: Callable[..., Any], *arguments: Any) -> Any:
    return checkpoint(partial(unit.compute, function), *arguments)


def is_offloaded(model: nn.Module) -> bool:
    """Whether weights of it, or of a model inside it, are on the disk."""
    return any(hasattr(module, "_upshift_offload") for module in model.modules())


def mapped_bytes(model: nn.Module) -> int:
    """Of weights that are a file's pages between their turns."""
    return sum(offload.mapped_bytes for offload in _offloads(model))


def buffer_bytes(model: nn.Module) -> int:
    """The most that the buffers held at once."""
    return sum(offload.reader.most_held for offload in _offloads(model))


def _offloads(model: nn.Module) -> list[Offload]:
    found = (vars(module).get("_upshift_offload") for module in model.modules())
    return [offload for offload in found if isinstance(offload, Offload)]


def _on_disk(model: nn.Module, placement: Placement, stored: Mapping[str, StoredTensor]) -> dict[int, _Weight]:
    """By the parameter's id, tied ones once. Each becomes its mapping."""
    lookups = {id(weight) for module in model.modules() if is_looked_up(module) for weight in module.parameters(recurse=False)}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if placement.device_of(name) == DISK:
            names.setdefault(id(parameter), []).append(name)
    mapped = Mapped()
    found = {}
    for key, tied in names.items():
        parameter = model.get_parameter(tied[0])
        tensor = next((stored[name] for name in tied if name in stored), None)
        if tensor is None:
            raise RequestError(f"no file has {tied[0]!r} as the model needs it; give an offload_folder to convert it in")
        resting = mapped.tensor(tensor, looked_up=key in lookups)
        if (resting.dtype, resting.shape) != (parameter.dtype, parameter.shape):
            raise RequestError(f"{tensor.file}: {tensor.name} is {tensor.dtype} {tensor.shape}, not as {tied[0]!r} of the model")
        found[key] = _Weight(_at_rest(model, tied, parameter, resting), resting, tensor)
    return found


def _at_rest(model: nn.Module, names: Sequence[str], parameter: nn.Parameter, resting: Tensor) -> nn.Parameter:
    parameter.requires_grad_(False)
    if not parameter.is_meta:
        parameter.data = resting
        return parameter
    kept = nn.Parameter(resting, requires_grad=False)
    for name in names:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, kept)
    return kept


def _units(
    model: nn.Module, placement: Placement, weights: Mapping[int, _Weight]
) -> tuple[list[list[_Weight]], list[tuple[nn.Module, int]]]:
    """What is read together, and for which modules: one unit for a module of the placement and those that are tied to it."""
    units: list[list[_Weight]] = []
    hooked: list[tuple[nn.Module, int]] = []
    of: dict[int, int] = {}  # unit by weight
    by_parameter = {id(weight.parameter): weight for weight in weights.values()}
    modules = dict(model.named_modules())
    for place in placement.modules:
        module = modules.get(place.name)
        if place.device != DISK or not place.streams or module is None or is_looked_up(module):
            continue
        own = [by_parameter[key] for key in map(id, module.parameters()) if key in by_parameter]
        known = next((of[id(weight)] for weight in own if id(weight) in of), None)
        if known is None:
            known = len(units)
            units.append([])
        units[known] += [weight for weight in own if id(weight) not in of]
        of |= {id(weight): known for weight in own}
        hooked.append((module, known))
    return units, hooked


class Mapped:
    """Files as read-only memory, twice where rows are looked up: these are not read ahead."""

    def __init__(self) -> None:
        self._files: dict[tuple[Path, bool], mmap.mmap] = {}

    def tensor(self, stored: StoredTensor, *, looked_up: bool = False) -> Tensor:
        dtype, shape = dtype_of(stored), shape_of(stored)
        if stored.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        key = stored.file, looked_up
        if key not in self._files:
            with stored.file.open("rb") as file:
                self._files[key] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if looked_up and hasattr(mmap, "MADV_RANDOM"):
                self._files[key].madvise(mmap.MADV_RANDOM)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # which is what is wanted
            content = torch.frombuffer(self._files[key], dtype=torch.uint8, count=stored.nbytes, offset=stored.offset)
        return content.view(dtype).view(shape)
