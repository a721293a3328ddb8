# needs torch
"""Register the hooks that run a model on several devices, with weights that are partly on the disk or on a GPU's host.

Devices: the arguments of each module move to the device that computes it. The output of a layer of a stack stays on the layer's
device. The output of other modules moves to the main device, where the code between modules runs. The model's output moves to
the device that its input came from.

Offloaded weights: each weight is loaded while its module runs. Otherwise a weight on the disk is a read-only mapping of its
file, which takes no memory. Its dtype, shape and content can still be used, by an embedding that reads rows or by a tied head.
Writing to it ends the process, so such weights are frozen. If gradients pass through them, autograd saves a reference to the
weight's position instead of the weight, and the backward pass loads the weight again.

Experts: transformers keeps the experts of a layer in one weight, whose first dimension is the expert. The argument
``top_k_index`` says which experts compute. On a CPU, only the pages of these experts are loaded before the module runs, and
dropped after it. They cannot be read ahead, because the routing is only known when the layer runs. A GPU gets all experts.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from upshift.errors import RequestError
from upshift.hardware.detect import detect
from upshift.internals.transformers_names import CHECKPOINTED
from upshift.loading.files.mapped_file import drop_pages, populate, prefetch_pages
from upshift.loading.files.safetensors_header import StoredTensor
from upshift.loading.offload.buffers import can_map_in_place
from upshift.loading.offload.gpu_copy import CopyStream
from upshift.loading.offload.units import (
    ROUTING_ARGUMENT,
    OffloadedWeight,
    WeightReader,
    make_weight_reader,
    map_weights_on_disk,
    reads_rows_only,
    routed_experts_in,
    streaming_units,
)
from upshift.loading.placement.place import CPU, DISK, Placement
from upshift.models.build import find_stacks


def move_arguments(model: nn.Module, placement: Placement, main: torch.device) -> None:
    """Register the hooks that move arguments and outputs between devices. ``main``: the GPU that runs code between modules."""
    modules = dict(model.named_modules())
    layers = {layer for _, stack in find_stacks(model) for layer in stack}
    for placed_module in placement.modules:
        module = modules.get(placed_module.name)
        if module is None or module is model:
            continue
        waits_elsewhere = placed_module.device in (CPU, DISK)
        device = main
        if waits_elsewhere and reads_rows_only(module):
            device = torch.device(CPU)
        elif not waits_elsewhere and placed_module.device != placement.main:
            device = torch.device(placed_module.device)
        module.register_forward_pre_hook(partial(_move_arguments, device), with_kwargs=True)
        if device != main and module not in layers:
            module.register_forward_hook(partial(_move_output, main))
    _ModelHooks(main).attach(model)


class _ModelHooks:
    """The hooks of the model itself: its input moves to the main device, its output back to the input's device."""

    def __init__(self, main: torch.device) -> None:
        self._main = main
        self._came_from = main

    def attach(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, arguments: Any, named: dict[str, Any]) -> Any:
        self._came_from = next((value.device for value in (*arguments, *named.values()) if isinstance(value, Tensor)), self._main)
        return to_device(arguments, self._main), to_device(named, self._main)

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        return to_device(output, self._came_from)


def _move_arguments(device: torch.device, module: nn.Module, arguments: Any, named: dict[str, Any]) -> Any:
    return to_device(arguments, device), to_device(named, device)


def _move_output(device: torch.device, module: nn.Module, arguments: Any, output: Any) -> Any:
    return to_device(output, device)


def to_device(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device, including tensors in tuples, lists and mappings.

    A cache is returned unchanged, because its layers are on the devices that fill them."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type != CPU)  # a copy to the CPU must be complete before it is read
    if isinstance(value, Mapping):
        entries = {key: to_device(item, device) for key, item in value.items()}
        return type(value)(**entries) if type(value) is not dict else entries
    if isinstance(value, tuple | list):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class RoutedExperts:
    """The hooks of one module of experts, which load only the routed experts. ``keep``: leave pages in the page cache."""

    def __init__(self, module: nn.Module, weights: Sequence[OffloadedWeight], *, keep: bool) -> None:
        self._weights = weights
        self._keep = keep
        self._routing_position = (
            list(inspect.signature(type(module).forward).parameters).index(ROUTING_ARGUMENT) - 1
        )  # after self
        self._num_experts = module.num_experts
        self._routed: list[tuple[Tensor, OffloadedWeight]] = []
        self.bytes_read = 0
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    def _before_forward(self, module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        routing: Tensor = named[ROUTING_ARGUMENT] if ROUTING_ARGUMENT in named else arguments[self._routing_position]
        experts = [number for number in routing.unique().tolist() if 0 <= number < self._num_experts]
        self._routed = [(weight.offloaded[number], weight) for weight in self._weights for number in experts]
        for content, _ in self._routed:
            prefetch_pages(content)
        for content, weight in self._routed:
            populate(content, weight.stored.file)
            self.bytes_read += content.nbytes

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        for content, _ in self._routed:
            drop_pages(content)
        if not self._keep:
            for file in dict.fromkeys(weight.stored.file for _, weight in self._routed):
                descriptor = os.open(file, os.O_RDONLY)
                for content, weight in self._routed:
                    if weight.stored.file == file:
                        start = weight.stored.offset + content.data_ptr() - weight.offloaded.data_ptr()
                        os.posix_fadvise(descriptor, start, content.nbytes, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        self._routed = []


@dataclass(frozen=True)
class _SavedView:
    """A reference that autograd saves in place of a view of a weight: the chunk of a unit, and the position in the chunk."""

    unit: _UnitHooks
    chunk: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _UnitHooks:
    """Weights that are loaded together, and the hooks of the modules that need them."""

    def __init__(self, offload: Offload, number: int, weights: Sequence[OffloadedWeight]) -> None:
        self.offload = offload
        self.number = number
        self.weights = weights
        self._depth = 0
        self._contexts: list[AbstractContextManager[Any]] = []

    def before_forward(self, module: nn.Module, arguments: Any) -> None:
        if any(weight.parameter.requires_grad for weight in self.weights):
            raise RequestError(
                "weights that wait on the disk or the host are frozen and cannot be trained; train an adapter around them: LoRA"
            )
        if self._depth == 0:
            chunks = self.offload.acquire(self.number)
            self._set_weights(chunks)
            self._device = chunks[0].device
            self._pointers = {chunk.data_ptr(): number for number, chunk in enumerate(chunks)}
        self._depth += 1
        context: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self._pack_tensor, _unpack_tensor)
        context.__enter__()
        self._contexts.append(context)

    def after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._depth == 0:  # before_forward failed
            return
        self._contexts.pop().__exit__(None, None, None)
        self._depth -= 1
        if self._depth == 0:
            self._reset_weights()
            self.offload.release(self.number)

    def end_interrupted(self, module: nn.Module) -> Callable[..., Any]:
        """Return the forward of a module that calls ``after_forward`` also if it is interrupted.

        torch calls a hook of the kind always_call after an Exception, and not after a KeyboardInterrupt."""
        forward = module.forward

        @wraps(forward)
        def run(*arguments: Any, **named: Any) -> Any:
            try:
                return forward(*arguments, **named)
            except Exception:
                raise
            except BaseException:
                self.after_forward(module, arguments, None)
                raise

        return run

    def _set_weights(self, chunks: Sequence[Tensor]) -> None:
        with torch.inference_mode(False):
            for weight, (index, start) in zip(self.weights, self.offload.offsets[self.number], strict=True):
                content = chunks[index][start : start + weight.stored.nbytes]
                weight.parameter.data = content.view(weight.offloaded.dtype).view(weight.offloaded.shape)

    def _reset_weights(self) -> None:
        for weight in self.weights:
            weight.parameter.data = weight.offloaded

    def recompute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a layer's forward again in the backward pass, in which the layer's hooks do not run.

        Autograd saves views of the buffer, which stays loaded until the backward pass needs another unit."""
        if self._depth:
            return function(*arguments)
        self._set_weights(self.offload.acquire_for_backward(self.number))
        try:
            return function(*arguments)
        finally:
            self._reset_weights()

    def _pack_tensor(self, tensor: Tensor) -> Tensor | _SavedView:
        chunk = self._pointers.get(tensor.untyped_storage().data_ptr()) if tensor.device == self._device else None
        if chunk is None:
            return tensor
        return _SavedView(self, chunk, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _unpack_tensor(saved: Tensor | _SavedView) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    content = saved.unit.offload.acquire_for_backward(saved.unit.number)[saved.chunk].view(saved.dtype)
    return content.as_strided(saved.size, saved.stride, saved.offset)


class Offload:
    """The weights of one model that are on the disk or the host, and not on the device that computes them."""

    def __init__(self, units: Sequence[Sequence[OffloadedWeight]], weight_reader: WeightReader) -> None:
        self.reader = weight_reader.reader
        self.offsets = weight_reader.offsets
        self.units = [_UnitHooks(self, number, weights) for number, weights in enumerate(units)]
        self.mapped_bytes = 0
        self.experts: list[RoutedExperts] = []
        self._backward: tuple[int, list[Tensor]] | None = None

    def acquire(self, number: int) -> list[Tensor]:
        self._end_backward(number)
        return self.reader.acquire(number)

    def release(self, number: int) -> None:
        self.reader.release(number)

    def acquire_for_backward(self, number: int) -> list[Tensor]:
        """Return the chunks of a unit for the backward pass. They stay loaded until the pass needs another unit."""
        self._end_backward(number)
        if self._backward is None:
            self._backward = number, self.reader.acquire(number)
        return self._backward[1]

    def _end_backward(self, number: int) -> None:
        if self._backward is not None and self._backward[0] != number:
            finished = self._backward[0]
            self._backward = None
            self.reader.release(finished)


def register_offload_hooks(
    model: nn.Module,
    placement: Placement,
    stored: Mapping[str, StoredTensor],
    *,
    buffer_bytes: int | None = None,
    copy_stream: CopyStream | None = None,
) -> None:
    """Register the hooks that load offloaded weights. All other weights must be on their device already.

    ``stored``: the stored tensor, in the model's dtype and shape, of each parameter on the disk. ``buffer_bytes``: the size of
    the buffers for reading ahead from the disk, or None for the placement's size. ``copy_stream``: copies to the main device,
    if that is a GPU.
    """
    weights = map_weights_on_disk(model, placement, stored)
    total = sum(weight.stored.nbytes for weight in weights.values())
    cpu = detect().cpu
    keep = cpu is None or cpu.free_memory_bytes is None or total < cpu.free_memory_bytes
    routed = {} if copy_stream is not None else _experts_read_separately(model, weights)
    excluded = {id(weight.parameter) for expert_weights in routed.values() for weight in expert_weights}
    units, hooked_modules = streaming_units(model, placement, weights, copy_stream, excluded=excluded)
    if copy_stream is not None:
        move_arguments(model, placement, copy_stream.device)
    if weights:
        model._upshift_offload = True  # type: ignore[assignment]
    experts = [RoutedExperts(module, expert_weights, keep=keep) for module, expert_weights in routed.items()]
    if not units:
        return
    budgets = dict(placement.stream_bytes) | ({} if buffer_bytes is None else {CPU: buffer_bytes})
    offload = Offload(units, make_weight_reader(units, budgets, placement.main, keep=keep, copy_stream=copy_stream))
    for module, number in hooked_modules:
        module.register_forward_pre_hook(offload.units[number].before_forward)
        module.register_forward_hook(offload.units[number].after_forward, always_call=True)
        module.forward = offload.units[number].end_interrupted(module)
        module._upshift_unit = offload.units[number]  # type: ignore[assignment]
    weakref.finalize(model, offload.reader.close)
    offload.mapped_bytes = total
    offload.experts = experts
    model._upshift_offload = offload  # type: ignore[assignment]


def _experts_read_separately(model: nn.Module, weights: Mapping[int, OffloadedWeight]) -> dict[nn.Module, list[OffloadedWeight]]:
    """Return the modules of experts whose weights are all on the disk and can be mapped in place, with these weights."""
    by_parameter = {id(weight.parameter): weight for weight in weights.values()}
    experts: dict[nn.Module, list[OffloadedWeight]] = {}
    for module in routed_experts_in(model):
        parameters = list(module.parameters())
        on_disk = [by_parameter[id(parameter)] for parameter in parameters if id(parameter) in by_parameter]
        if len(on_disk) == len(parameters) and can_map_in_place([weight.stored for weight in on_disk]):
            experts[module] = on_disk
    return experts


def recompute_offloaded(model: nn.Module) -> None:
    """Make recomputed layers load their weights. Call this after switching activation checkpointing on.

    transformers checkpoints a layer's forward inside its hooks, so that no hook runs when the layer is recomputed."""
    for module in model.modules():
        unit = getattr(module, "_upshift_unit", None)
        if unit is not None and CHECKPOINTED.read(module) is not None:
            CHECKPOINTED.put(module, partial(_checkpointed, unit, CHECKPOINTED.of(module)))


def _checkpointed(unit: _UnitHooks, checkpoint: Callable[..., Any], function: Callable[..., Any], *arguments: Any) -> Any:
    return checkpoint(partial(unit.recompute, function), *arguments)


def is_offloaded(model: nn.Module) -> bool:
    """Return whether the model, or a model inside it, has weights on the disk."""
    return any(hasattr(module, "_upshift_offload") for module in model.modules())


def mapped_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights that are mapped from files while their modules do not run."""
    return sum(offload.mapped_bytes for offload in _offloads(model))


def buffer_bytes(model: nn.Module) -> int:
    """Return the peak bytes of the buffers."""
    return sum(offload.reader.peak_bytes for offload in _offloads(model))


def _offloads(model: nn.Module) -> list[Offload]:
    values = (vars(module).get("_upshift_offload") for module in model.modules())
    return [offload for offload in values if isinstance(offload, Offload)]
