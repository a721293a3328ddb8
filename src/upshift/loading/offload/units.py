# needs torch
"""Find the offloaded weights of a model, group them into units that are loaded together, and make the reader that loads them.

Offloaded weights are on another device than the one that computes them: on the disk, or on the host of a GPU. Two kinds of
modules need only a part of their weights: embeddings read single rows, and a router chooses experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from upshift.errors import RequestError
from upshift.loading.files.mapped_file import MappedFiles
from upshift.loading.files.safetensors_header import StoredTensor
from upshift.loading.files.tensors import DTYPE_NAMES
from upshift.loading.offload.buffers import HostBufferPool, PagePool, can_map_in_place
from upshift.loading.offload.gpu_copy import CopyStream, DeviceBufferPool
from upshift.loading.offload.prefetch import ALIGNMENT, PrefetchReader, ReadGroup, make_groups
from upshift.loading.placement.place import CPU, DISK, Placement

ROUTING_ARGUMENT = "top_k_index"  # the argument of the experts' forward, by the interface of transformers.integrations.moe


def reads_rows_only(module: nn.Module) -> bool:
    """Return whether a module only reads rows of its weight. An embedding with ``max_norm`` also writes to them."""
    return isinstance(module, nn.Embedding) and module.max_norm is None


def has_routed_experts(module: nn.Module) -> bool:
    """Return whether a module's weights are experts stacked in the first dimension, and its forward takes the routing."""
    num_experts = getattr(module, "num_experts", None)
    weights = list(module.parameters())
    if not isinstance(num_experts, int) or not weights or any(weight.shape[:1] != (num_experts,) for weight in weights):
        return False
    return ROUTING_ARGUMENT in inspect.signature(type(module).forward).parameters


def routed_experts_in(module: nn.Module) -> Iterator[nn.Module]:
    for inner in module.modules():
        if has_routed_experts(inner):
            yield inner


@dataclass(frozen=True)
class OffloadedWeight:
    """A parameter that is loaded only while its module runs."""

    parameter: nn.Parameter
    offloaded: Tensor  # the file's pages, or a view of the host's pinned memory
    stored: StoredTensor  # the position of the same bytes in the file, or in ``pinned_memory``
    pinned_memory: Tensor | None = None  # holds all weights of the unit


def map_weights_on_disk(model: nn.Module, placement: Placement, stored: Mapping[str, StoredTensor]) -> dict[int, OffloadedWeight]:
    """Replace each parameter on the disk by a mapping of its file, and return the weights by the parameter's former id.

    Tied parameters become one weight."""
    read_by_rows = {
        id(weight) for module in model.modules() if reads_rows_only(module) for weight in module.parameters(recurse=False)
    }
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if placement.device_of(name) == DISK:
            names.setdefault(id(parameter), []).append(name)
    mapped_files = MappedFiles()
    weights = {}
    for key, tied_names in names.items():
        parameter = model.get_parameter(tied_names[0])
        tensor = next((stored[name] for name in tied_names if name in stored), None)
        if tensor is None:
            raise RequestError(f"no file has {tied_names[0]!r} as the model needs it; give an offload_folder to convert it in")
        view = mapped_files.tensor(tensor, by_rows=key in read_by_rows)
        if (view.dtype, view.shape) != (parameter.dtype, parameter.shape):
            raise RequestError(
                f"{tensor.file}: {tensor.name} is {tensor.dtype} {tensor.shape}, not as {tied_names[0]!r} of the model"
            )
        weights[key] = OffloadedWeight(_replace_parameter(model, tied_names, parameter, view), view, tensor)
    return weights


def _replace_parameter(model: nn.Module, names: Sequence[str], parameter: nn.Parameter, view: Tensor) -> nn.Parameter:
    parameter.requires_grad_(False)
    if not parameter.is_meta:
        parameter.data = view
        return parameter
    replacement = nn.Parameter(view, requires_grad=False)
    for name in names:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, replacement)
    return replacement


def streaming_units(
    model: nn.Module,
    placement: Placement,
    on_disk: Mapping[int, OffloadedWeight],
    copy_stream: CopyStream | None,
    *,
    excluded: Set[int],
) -> tuple[list[list[OffloadedWeight]], list[tuple[nn.Module, int]]]:
    """Return the units of weights that are loaded together, and the modules with the number of their unit.

    One unit serves a module of the placement and the modules that are tied to it. With a ``copy_stream`` to a GPU, weights on
    the host form units, too. ``excluded``: ids of parameters that are loaded in another way."""
    units: list[list[OffloadedWeight]] = []
    hooked_modules: list[tuple[nn.Module, int]] = []
    unit_of_weight: dict[int, int] = {}  # by the parameter's id
    by_parameter = {id(weight.parameter): weight for weight in on_disk.values()}
    modules = dict(model.named_modules())
    for placed_module in placement.modules:
        module = modules.get(placed_module.name)
        is_offloaded = placed_module.device == DISK or (placed_module.device == CPU and copy_stream is not None)
        if not is_offloaded or not placed_module.streams or module is None or reads_rows_only(module):
            continue
        weights = list(dict.fromkeys(weight for weight in module.parameters() if id(weight) not in excluded))
        if not weights:
            continue
        number = next((unit_of_weight[id(weight)] for weight in weights if id(weight) in unit_of_weight), len(units))
        if number == len(units):
            units.append([])
        new_weights = [weight for weight in weights if id(weight) not in unit_of_weight]
        if placed_module.device == DISK:
            units[number] += [by_parameter[id(weight)] for weight in new_weights if id(weight) in by_parameter]
        elif copy_stream is not None and new_weights:
            units[number] += _pin_parameters(new_weights, copy_stream, len(hooked_modules))
        unit_of_weight |= dict.fromkeys(map(id, weights), number)
        hooked_modules.append((module, number))
    return units, hooked_modules


def _pin_parameters(parameters: Sequence[nn.Parameter], copy_stream: CopyStream, number: int) -> list[OffloadedWeight]:
    """Move parameters into one block of pinned memory, aligned as the tensors of a chunk are."""
    offsets = []
    end = 0
    for parameter in parameters:
        offsets.append(end)
        end += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
    memory = copy_stream.pin(end)
    weights = []
    for parameter, start in zip(parameters, offsets, strict=True):
        view = memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.requires_grad_(False)
        parameter.data = view
        shape = tuple(parameter.shape)
        pseudo_file = Path(f"host {number}")  # a name that is unique for this unit
        stored = StoredTensor(f"{start}", DTYPE_NAMES[parameter.dtype], shape, pseudo_file, start, parameter.nbytes)
        weights.append(OffloadedWeight(parameter, view, stored, memory))
    return weights


Units = Sequence[Sequence[OffloadedWeight]]
ChunkOffsets = list[list[tuple[int, int]]]  # for each unit and weight: its chunk, and its offset in the chunk


@dataclass(frozen=True)
class WeightReader:
    """A reader of units, and the position of each weight in its chunks."""

    reader: PrefetchReader
    offsets: ChunkOffsets


def make_weight_reader(
    units: Units, budgets: Mapping[str, int], main: str, *, keep: bool, copy_stream: CopyStream | None
) -> WeightReader:
    """Return a reader that loads the weights of all units in their order.

    ``budgets``: bytes of buffers on the host (cpu) and on the main device. ``keep``: leave pages in the page cache."""
    if copy_stream is None:
        return _make_cpu_reader(units, budgets.get(CPU, 0), keep=keep)
    units_of_tensors = [[weight.stored for weight in unit] for unit in units]
    pinned_groups = {number: unit[0].pinned_memory for number, unit in enumerate(units) if unit[0].pinned_memory is not None}
    on_disk = [number for number in range(len(units)) if number not in pinned_groups]
    buffer_bytes = budgets.get(main, 0)
    if on_disk:  # the host's and the device's buffers need the same chunks
        buffer_bytes = min(buffer_bytes, budgets.get(CPU, 0))
    groups = make_groups(units_of_tensors, buffer_bytes)
    disk_reader = None
    if on_disk:
        disk_units = [units_of_tensors[number] for number in on_disk]
        pool = HostBufferPool([stored.file for unit in disk_units for stored in unit], keep=keep, pin=copy_stream.pin)
        disk_reader = PrefetchReader(make_groups(disk_units, buffer_bytes), pool, budget=budgets.get(CPU, 0))
    disk_numbers = {group: number for number, group in enumerate(on_disk)}
    device_pool = DeviceBufferPool(copy_stream, pinned_groups, disk_reader, disk_numbers)
    return WeightReader(PrefetchReader(groups, device_pool, budget=budgets.get(main, 0)), _chunk_offsets(groups, units))


def _make_cpu_reader(units: Units, budget: int, *, keep: bool) -> WeightReader:
    units_of_tensors = [[weight.stored for weight in unit] for unit in units]
    tensors = [stored for unit in units_of_tensors for stored in unit]
    files = [stored.file for stored in tensors]
    can_map = can_map_in_place(tensors)
    groups = make_groups(units_of_tensors, budget, in_place=can_map)
    pool = PagePool(files, keep=keep) if can_map else HostBufferPool(files, keep=keep)
    return WeightReader(PrefetchReader(groups, pool, budget=budget), _chunk_offsets(groups, units))


def _chunk_offsets(groups: Sequence[ReadGroup], units: Units) -> ChunkOffsets:
    offsets = []
    for group, unit in zip(groups, units, strict=True):
        positions = {
            stored: (number, start)
            for number, chunk in enumerate(group.chunks)
            for stored, start in zip(chunk.tensors, chunk.offsets, strict=True)
        }
        offsets.append([positions[weight.stored] for weight in unit])
    return offsets
