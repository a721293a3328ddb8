"""Find the weights that are kept on another device than the one that computes them, how they are kept, and which go together.

Bring weights to the device that computes them: from the disk to the CPU, and from the disk and the host to a GPU.

Recognize modules that need only a part of their weights: embeddings read some rows, and experts are chosen by a router.
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

ROUTING_ARGUMENT = "top_k_index"  # of the interface of transformers.integrations.moe


def reads_rows_only(module: nn.Module) -> bool:
    """Return whether a module only reads rows of its weight. With ``max_norm`` set, its forward also writes to them."""
    return isinstance(module, nn.Embedding) and module.max_norm is None


def has_routed_experts(module: nn.Module) -> bool:
    """Return whether a module's weights are experts stacked in the first dimension, and its forward takes their choice."""
    number = getattr(module, "num_experts", None)
    own = list(module.parameters())
    if not isinstance(number, int) or not own or any(weight.shape[:1] != (number,) for weight in own):
        return False
    return ROUTING_ARGUMENT in inspect.signature(type(module).forward).parameters


def routed_experts_in(module: nn.Module) -> Iterator[nn.Module]:
    for inner in module.modules():
        if has_routed_experts(inner):
            yield inner


@dataclass(frozen=True)
class OffloadedWeight:
    parameter: nn.Parameter
    resting: Tensor  # the file's own pages, or pinned memory of the host
    stored: StoredTensor  # where the same bytes lie: in a file, or in ``held``
    held: Tensor | None = None  # pinned, of all weights that are needed with this one


def map_weights_on_disk(model: nn.Module, placement: Placement, stored: Mapping[str, StoredTensor]) -> dict[int, OffloadedWeight]:
    """Return the weights on the disk by the parameter's id, tied ones once. Each parameter becomes its mapping."""
    lookups = {id(weight) for module in model.modules() if reads_rows_only(module) for weight in module.parameters(recurse=False)}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if placement.device_of(name) == DISK:
            names.setdefault(id(parameter), []).append(name)
    mapped = MappedFiles()
    found = {}
    for key, tied in names.items():
        parameter = model.get_parameter(tied[0])
        tensor = next((stored[name] for name in tied if name in stored), None)
        if tensor is None:
            raise RequestError(f"no file has {tied[0]!r} as the model needs it; give an offload_folder to convert it in")
        resting = mapped.tensor(tensor, looked_up=key in lookups)
        if (resting.dtype, resting.shape) != (parameter.dtype, parameter.shape):
            raise RequestError(f"{tensor.file}: {tensor.name} is {tensor.dtype} {tensor.shape}, not as {tied[0]!r} of the model")
        found[key] = OffloadedWeight(_at_rest(model, tied, parameter, resting), resting, tensor)
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


def streaming_units(
    model: nn.Module, placement: Placement, on_disk: Mapping[int, OffloadedWeight], lanes: CopyStream | None, *, apart: Set[int]
) -> tuple[list[list[OffloadedWeight]], list[tuple[nn.Module, int]]]:
    """Return the units of weights that are read together, and the unit of each module.

    One unit serves a module of the placement and the modules that are tied to it. With ``lanes`` to a GPU, weights on the host
    are units, too. ``apart``: parameters that are read in another way."""
    units: list[list[OffloadedWeight]] = []
    hooked: list[tuple[nn.Module, int]] = []
    of: dict[int, int] = {}  # unit by parameter
    by_parameter = {id(weight.parameter): weight for weight in on_disk.values()}
    modules = dict(model.named_modules())
    for place in placement.modules:
        module = modules.get(place.name)
        waits = place.device == DISK or (place.device == CPU and lanes is not None)
        if not waits or not place.streams or module is None or reads_rows_only(module):
            continue
        own = list({id(weight): weight for weight in module.parameters() if id(weight) not in apart}.values())
        if not own:
            continue
        number = next((of[id(weight)] for weight in own if id(weight) in of), len(units))
        if number == len(units):
            units.append([])
        new = [weight for weight in own if id(weight) not in of]
        if place.device == DISK:
            units[number] += [by_parameter[id(weight)] for weight in new if id(weight) in by_parameter]
        elif lanes is not None and new:
            units[number] += _held(new, lanes, len(hooked))
        of |= dict.fromkeys(map(id, own), number)
        hooked.append((module, number))
    return units, hooked


def _held(parameters: Sequence[nn.Parameter], lanes: CopyStream, number: int) -> list[OffloadedWeight]:
    """Move parameters into pinned memory, packed as the pieces that are sent."""
    starts = []
    end = 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
    memory = lanes.pin(end)
    found = []
    for parameter, start in zip(parameters, starts, strict=True):
        resting = memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        resting.copy_(parameter.detach())
        parameter.requires_grad_(False)
        parameter.data = resting
        shape = tuple(parameter.shape)
        place = Path(f"host {number}")
        stored = StoredTensor(f"{start}", DTYPE_NAMES[parameter.dtype], shape, place, start, parameter.nbytes)
        found.append(OffloadedWeight(parameter, resting, stored, memory))
    return found


Units = Sequence[Sequence[OffloadedWeight]]
ChunkOffsets = list[list[tuple[int, int]]]  # for each unit, for each weight: its piece, and where it starts in the piece


@dataclass(frozen=True)
class WeightReader:
    reader: PrefetchReader
    starts: ChunkOffsets


def make_weight_reader(
    units: Units, budgets: Mapping[str, int], main: str, *, keep: bool, lanes: CopyStream | None
) -> WeightReader:
    """Make the reader that brings the weights of all units, in their order.

    ``budgets``: bytes that may be on their way, on the host (cpu) and on the main device. ``keep``: the page cache has room."""
    if lanes is None:
        return _to_cpu(units, budgets.get(CPU, 0), keep=keep)
    waiting = [[weight.stored for weight in unit] for unit in units]
    in_memory = {number: unit[0].held for number, unit in enumerate(units) if unit[0].held is not None}
    on_disk = [number for number in range(len(units)) if number not in in_memory]
    size = min(budgets.get(device, 0) for device in (main, CPU)) if on_disk else budgets.get(main, 0)  # both need the same pieces
    groups = make_groups(waiting, size)
    disk = None
    if on_disk:
        wanted = [waiting[number] for number in on_disk]
        slots = HostBufferPool([stored.file for unit in wanted for stored in unit], keep=keep, pin=lanes.pin)
        disk = PrefetchReader(make_groups(wanted, size), slots, budget=budgets.get(CPU, 0))
    sending = DeviceBufferPool(lanes, in_memory, disk, {group: number for number, group in enumerate(on_disk)})
    return WeightReader(PrefetchReader(groups, sending, budget=budgets.get(main, 0)), _starts(groups, units))


def _to_cpu(units: Units, budget: int, *, keep: bool) -> WeightReader:
    wanted = [[weight.stored for weight in unit] for unit in units]
    tensors = [stored for unit in wanted for stored in unit]
    files = [stored.file for stored in tensors]
    in_place = can_map_in_place(tensors)
    groups = make_groups(wanted, budget, in_place=in_place)
    slots = PagePool(files, keep=keep) if in_place else HostBufferPool(files, keep=keep)
    return WeightReader(PrefetchReader(groups, slots, budget=budget), _starts(groups, units))


def _starts(groups: Sequence[ReadGroup], units: Units) -> ChunkOffsets:
    starts = []
    for group, unit in zip(groups, units, strict=True):
        found = {
            stored: (number, start)
            for number, piece in enumerate(group.pieces)
            for stored, start in zip(piece.tensors, piece.starts, strict=True)
        }
        starts.append([found[weight.stored] for weight in unit])
    return starts
