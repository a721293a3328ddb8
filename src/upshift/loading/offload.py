"""Runs a model whose weights are partly on the disk, or on a GPU's host: they are where they are computed while a module runs.

Between its turns a weight on the disk is a read-only mapping of the file: its dtype, shape and content are there for whoever asks
(an embedding looks its rows up in it, a tied head's other end finds it), and no memory is taken. Writing to it ends the process.
Such weights are frozen. Where gradients pass through them, what autograd would keep of a weight is a note of where it lies, and
backward reads it again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from upshift.errors import RequestError
from upshift.hardware.detect import detect
from upshift.internals.transformers_names import CHECKPOINTED
from upshift.loading.devices import move_arguments
from upshift.loading.experts import RoutedExperts
from upshift.loading.feed import Feed, make_feed
from upshift.loading.header import StoredTensor
from upshift.loading.kinds import experts_in
from upshift.loading.lanes import Lanes
from upshift.loading.place import CPU, Placement
from upshift.loading.slots import can_be_pages
from upshift.loading.waiting import Weight, units_of, weights_on_disk


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

    def __init__(self, offload: Offload, number: int, weights: Sequence[Weight]) -> None:
        self.offload, self.number, self.weights = offload, number, weights
        self._inside = 0
        self._contexts: list[AbstractContextManager[Any]] = []

    def enter(self, module: nn.Module, arguments: Any) -> None:
        if any(weight.parameter.requires_grad for weight in self.weights):
            raise RequestError(
                "weights that wait on the disk or the host are frozen and cannot be trained; train an adapter around them: LoRA"
            )
        if self._inside == 0:
            pieces = self.offload.acquire(self.number)
            self._place(pieces)
            self._device, self._pointers = pieces[0].device, {piece.data_ptr(): number for number, piece in enumerate(pieces)}
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
        piece = self._pointers.get(tensor.untyped_storage().data_ptr()) if tensor.device == self._device else None
        if piece is None:
            return tensor
        return _Saved(self, piece, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _look_up(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    content = saved.unit.offload.again(saved.unit.number)[saved.piece].view(saved.dtype)
    return content.as_strided(saved.size, saved.stride, saved.offset)


class Offload:
    """The weights of one model that wait elsewhere than where they are computed."""

    def __init__(self, units: Sequence[Sequence[Weight]], feed: Feed) -> None:
        self.reader, self.starts = feed.reader, feed.starts
        self.units = [_Unit(self, number, weights) for number, weights in enumerate(units)]
        self.mapped_bytes = 0
        self.experts: list[RoutedExperts] = []
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
    model: nn.Module, placement: Placement, stored: Mapping[str, StoredTensor], *, buffer_bytes: int | None = None,
    lanes: Lanes | None = None,
) -> None:  # fmt: skip
    """Leave where they are the weights that the placement does not have where they are computed; all others are there already.

    ``stored``: for each parameter on the disk, where bytes of its dtype and shape lie. ``buffer_bytes``: of what is read ahead
    from the disk, else as the placement says. ``lanes``: to the main device, where that is a GPU.
    """
    weights = weights_on_disk(model, placement, stored)
    total = sum(weight.stored.nbytes for weight in weights.values())
    free = detect().cpu
    keep = free is None or free.free_memory_bytes is None or total < free.free_memory_bytes
    routed = {} if lanes is not None else _routed(model, weights)
    apart = {id(weight.parameter) for own in routed.values() for weight in own}
    units, hooked = units_of(model, placement, weights, lanes, apart=apart)
    if lanes is not None:
        move_arguments(model, placement, lanes.device)
    if weights:
        model._upshift_offload = True  # type: ignore[assignment]
    experts = [RoutedExperts(module, own, keep=keep) for module, own in routed.items()]
    if not units:
        return
    budgets = dict(placement.stream_bytes) | ({} if buffer_bytes is None else {CPU: buffer_bytes})
    offload = Offload(units, make_feed(units, budgets, placement.main, keep=keep, lanes=lanes))
    for module, number in hooked:
        module.register_forward_pre_hook(offload.units[number].enter)
        module.register_forward_hook(offload.units[number].leave, always_call=True)
        module._upshift_unit = offload.units[number]  # type: ignore[assignment]
    weakref.finalize(model, offload.reader.close)
    offload.mapped_bytes, offload.experts = total, experts
    model._upshift_offload = offload  # type: ignore[assignment]


def _routed(model: nn.Module, weights: Mapping[int, Weight]) -> dict[nn.Module, list[Weight]]:
    """Experts that are on the disk and can be used where they lie."""
    of = {id(weight.parameter): weight for weight in weights.values()}
    found = {module: [of[id(one)] for one in module.parameters() if id(one) in of] for module in experts_in(model)}
    whole = {module: own for module, own in found.items() if len(own) == len(list(module.parameters()))}
    return {module: own for module, own in whole.items() if can_be_pages([weight.stored for weight in own])}


def recompute_offloaded(model: nn.Module) -> None:
    """After activation checkpointing was switched on: transformers checkpoints a layer's forward inside of its hooks."""
    for module in model.modules():
        unit = getattr(module, "_upshift_unit", None)
        if unit is not None and CHECKPOINTED.read(module) is not None:
            CHECKPOINTED.put(module, partial(_checkpointed, unit, CHECKPOINTED.of(module)))


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
