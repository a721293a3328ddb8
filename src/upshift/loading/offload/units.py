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
from upshift.loading.files.mapped_file import Mapped
from upshift.loading.files.safetensors_header import StoredTensor
from upshift.loading.files.tensors import NAMES
from upshift.loading.offload.buffers import BufferSlots, PageSlots, can_be_pages
from upshift.loading.offload.gpu_copy import DeviceSlots, Lanes
from upshift.loading.offload.prefetch import ALIGNMENT, Group, Reader, make_groups
from upshift.loading.placement.place import CPU, DISK, Placement

CHOICE = "top_k_index"  # of the interface of transformers.integrations.moe


def is_looked_up(module: nn.Module) -> bool:
    """Return whether a module only reads rows of its weight. With ``max_norm`` set, its forward also writes to them."""
    return isinstance(module, nn.Embedding) and module.max_norm is None


def is_routed(module: nn.Module) -> bool:
    """Return whether a module's weights are experts stacked in the first dimension, and its forward takes their choice."""
    number = getattr(module, "num_experts", None)
    own = list(module.parameters())
    if not isinstance(number, int) or not own or any(weight.shape[:1] != (number,) for weight in own):
        return False
    return CHOICE in inspect.signature(type(module).forward).parameters


def experts_in(module: nn.Module) -> Iterator[nn.Module]:
    for inner in module.modules():
        if is_routed(inner):
            yield inner


@dataclass(frozen=True)
class Weight:
    parameter: nn.Parameter
    resting: Tensor  # the file's own pages, or pinned memory of the host
    stored: StoredTensor  # where the same bytes lie: in a file, or in ``held``
    held: Tensor | None = None  # pinned, of all weights that are needed with this one


def weights_on_disk(model: nn.Module, placement: Placement, stored: Mapping[str, StoredTensor]) -> dict[int, Weight]:
    """Return the weights on the disk by the parameter's id, tied ones once. Each parameter becomes its mapping."""
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
        found[key] = Weight(_at_rest(model, tied, parameter, resting), resting, tensor)
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


def units_of(
    model: nn.Module, placement: Placement, on_disk: Mapping[int, Weight], lanes: Lanes | None, *, apart: Set[int]
) -> tuple[list[list[Weight]], list[tuple[nn.Module, int]]]:
    """Return the units of weights that are read together, and the unit of each module.

    One unit serves a module of the placement and the modules that are tied to it. With ``lanes`` to a GPU, weights on the host
    are units, too. ``apart``: parameters that are read in another way."""
    units: list[list[Weight]] = []
    hooked: list[tuple[nn.Module, int]] = []
    of: dict[int, int] = {}  # unit by parameter
    by_parameter = {id(weight.parameter): weight for weight in on_disk.values()}
    modules = dict(model.named_modules())
    for place in placement.modules:
        module = modules.get(place.name)
        waits = place.device == DISK or (place.device == CPU and lanes is not None)
        if not waits or not place.streams or module is None or is_looked_up(module):
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


def _held(parameters: Sequence[nn.Parameter], lanes: Lanes, number: int) -> list[Weight]:
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
        stored = StoredTensor(f"{start}", NAMES[parameter.dtype], shape, place, start, parameter.nbytes)
        found.append(Weight(parameter, resting, stored, memory))
    return found


Units = Sequence[Sequence[Weight]]
Starts = list[list[tuple[int, int]]]  # for each unit, for each weight: its piece, and where it starts in the piece


@dataclass(frozen=True)
class Feed:
    reader: Reader
    starts: Starts


def make_feed(units: Units, budgets: Mapping[str, int], main: str, *, keep: bool, lanes: Lanes | None) -> Feed:
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
        slots = BufferSlots([stored.file for unit in wanted for stored in unit], keep=keep, pin=lanes.pin)
        disk = Reader(make_groups(wanted, size), slots, budget=budgets.get(CPU, 0))
    sending = DeviceSlots(lanes, in_memory, disk, {group: number for number, group in enumerate(on_disk)})
    return Feed(Reader(groups, sending, budget=budgets.get(main, 0)), _starts(groups, units))


def _to_cpu(units: Units, budget: int, *, keep: bool) -> Feed:
    wanted = [[weight.stored for weight in unit] for unit in units]
    tensors = [stored for unit in wanted for stored in unit]
    files = [stored.file for stored in tensors]
    in_place = can_be_pages(tensors)
    groups = make_groups(wanted, budget, in_place=in_place)
    slots = PageSlots(files, keep=keep) if in_place else BufferSlots(files, keep=keep)
    return Feed(Reader(groups, slots, budget=budget), _starts(groups, units))


def _starts(groups: Sequence[Group], units: Units) -> Starts:
    starts = []
    for group, unit in zip(groups, units, strict=True):
        found = {
            stored: (number, start)
            for number, piece in enumerate(group.pieces)
            for stored, start in zip(piece.tensors, piece.starts, strict=True)
        }
        starts.append([found[weight.stored] for weight in unit])
    return starts
