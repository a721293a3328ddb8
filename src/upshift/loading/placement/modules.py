"""List the parts of a model that can be placed: its layers and leaves with their bytes, from the model on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from upshift.errors import RequestError
from upshift.hardware.detect import detect
from upshift.hardware.disk import disk_rate
from upshift.hardware.spec import Host
from upshift.internals.torch_names import PARAMETERS
from upshift.internals.transformers_names import WHOLE_MODULES
from upshift.loading.files.checkpoint import Checkpoint
from upshift.loading.offload.units import reads_rows_only, routed_experts_in
from upshift.loading.placement.cost import predict
from upshift.loading.placement.cpu_matmul_rate import matmul_rate
from upshift.loading.placement.memory_limits import memory_limits, read_device
from upshift.loading.placement.place import CPU, MemoryNeeds, Placement, PlacementUnit, follow_device_map, place_units
from upshift.models.build import find_stacks
from upshift.models.describe import max_positions
from upshift.models.kv_cache import returned_cache
from upshift.models.sequence_length import default_length
from upshift.models.tracing.active_experts import experts_per_token
from upshift.models.tracing.segments import fake_masks

CACHED_TOKENS = 8  # enough to see what the cache keeps of a token


@dataclass
class _UnitDraft:
    """A unit that is still being put together."""

    names: list[str]
    parameters: dict[int, nn.Parameter] = field(default_factory=dict)
    looked_up: bool = True
    streams: bool = False


def place_model(
    model: PreTrainedModel,
    *,
    device_map: str | int | Mapping[str, str | int] = "auto",
    max_memory: Mapping[str | int, str | int] | None = None,
    checkpoint: Checkpoint | None = None,
    batch: int = 1,
    sequence_length: int | None = None,
    host: Host | None = None,
    memory_bytes_per_second: float | None = None,
) -> Placement:
    """Place a model that is on the meta device in its final dtypes. ``sequence_length``: None takes the default for the model.

    ``memory_bytes_per_second`` is the rate of the CPU's memory. If it is given, the rates of the disk and of products are
    measured, and the times of loading and of a token are predicted.

    Raise RequestError for a device_map that does not fit the model, and NothingFits.
    """
    host = host or detect()
    limits = memory_limits(host, max_memory)
    if sequence_length is None:
        sequence_length = default_length(max_positions(model))
    if device_map == "auto":
        placement = place_units(
            *measure_needs(model, placement_units(model), limits, batch=batch, sequence_length=sequence_length)
        )
    else:
        said = device_map if isinstance(device_map, Mapping) else {"": device_map}
        devices = check_device_map(model, said, host)
        units = placement_units(model, inside=devices)
        placement = follow_device_map(devices, *measure_needs(model, units, limits, batch=batch, sequence_length=sequence_length))
    if memory_bytes_per_second is None:
        return placement
    return predict(
        placement, host, memory_bytes_per_second=memory_bytes_per_second,
        disk_bytes_per_second=disk_rate(checkpoint.files) if checkpoint is not None else None,
        stored_bytes=None if checkpoint is None else checkpoint.total_bytes, products_bytes_per_second=matmul_rate(model.dtype),
    )  # fmt: skip


def check_device_map(model: nn.Module, device_map: Mapping[str, str | int], host: Host) -> dict[str, str]:
    """Return the devices by the names that are used here.

    Raise RequestError for names that are not the model's, and for parameters without a device.
    """
    names = {"", *(name for name, _ in model.named_modules()), *_parameters(model)}
    unknown = sorted(name for name in device_map if name not in names)
    if unknown:
        known = ", ".join(sorted(name for name in names if name.count(".") < 2 and name)[:8])
        raise RequestError(f"device_map names {unknown[0]!r}, which the model has not; its modules are {known} ...")
    devices = {name: read_device(device, host) for name, device in device_map.items()}
    for name in _parameters(model):
        parts = name.split(".")
        if not any(".".join(parts[:length]) in devices for length in range(len(parts) + 1)):
            raise RequestError(f'device_map has no device for {name!r}; name its module, or give "" for all that is not named')
    return devices


def placement_units(model: PreTrainedModel, *, inside: Mapping[str, object] | None = None) -> tuple[PlacementUnit, ...]:
    """Return the units in the order in which the model lists them. No name of ``inside`` is within a unit."""
    whole = set(WHOLE_MODULES.read(model) or ()) or {type(layer).__name__ for _, stack in find_stacks(model) for layer in stack}
    found: dict[int, _UnitDraft] = {}
    for path, module, alone in _parts(model, "", whole, set(inside or ())):
        _add(found, path, module, alone)
    _tie(model, found.values())
    merged = _joined_by_ties(list(found.values()))
    return tuple(
        PlacementUnit(
            names=tuple(unit.names),
            nbytes=(size := sum(weight.numel() * weight.element_size() for weight in unit.parameters.values())),
            read=0 if unit.looked_up else size,
            streams=unit.streams,
        )
        for unit in merged
    )  # fmt: skip


def _parts(module: nn.Module, path: str, whole: set[str], inside: set[str]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (path, module, whether it is a unit). If it is no unit, only the parameters beside its modules are meant."""
    children = [(name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None]
    divided = any(name.startswith(f"{path}." if path else "") and name != path for name in inside)
    if not children or (type(module).__name__ in whole and not divided):
        if next(module.parameters(), None) is not None:
            yield path, module, True
        return
    yield path, module, False
    for name, child in children:
        yield from _parts(child, f"{path}.{name}" if path else name, whole, inside)


def _add(found: dict[int, _UnitDraft], path: str, module: nn.Module, alone: bool) -> None:
    prefix = f"{path}." if path else ""
    if not alone or type(module).forward is nn.Module.forward:  # a list of parameters has no forward to wait for
        for name, parameter in module.named_parameters(recurse=alone):
            found[id(parameter)] = _UnitDraft([prefix + name], {id(parameter): parameter}, looked_up=False)
        return
    unit = found.setdefault(id(module), _UnitDraft([]))
    unit.names.append(path)
    unit.parameters = {id(parameter): parameter for parameter in module.parameters()}
    unit.looked_up = reads_rows_only(module)
    unit.streams = True


def _tie(model: PreTrainedModel, units: Iterable[_UnitDraft]) -> None:
    """Replace weights by those that they will be tied to. The model lists its ties, and makes them only when it is filled."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    ties = getattr(model, "all_tied_weights_keys", {}).items()
    same = {id(weights[name]): weights[source] for name, source in ties if name in weights and source in weights}
    for unit in units:
        tied = [same.get(key, weight) for key, weight in unit.parameters.items()]
        unit.parameters = {id(weight): weight for weight in tied}


def _joined_by_ties(units: list[_UnitDraft]) -> list[_UnitDraft]:
    """Join units that share a parameter into one, at the place of the first."""
    owner: dict[int, _UnitDraft] = {}
    kept: list[_UnitDraft] = []
    for unit in units:
        for first in {id(owner[key]): owner[key] for key in unit.parameters if key in owner}.values():
            unit = _joined(first, unit)
            kept = [other for other in kept if other is not first]
        kept.append(unit)
        owner |= dict.fromkeys(unit.parameters, unit)
    order = {key: number for number, key in enumerate(owner)}
    return sorted(kept, key=lambda unit: min(order[key] for key in unit.parameters))


def _joined(first: _UnitDraft, second: _UnitDraft) -> _UnitDraft:
    return _UnitDraft(
        first.names + second.names,
        first.parameters | second.parameters,
        looked_up=first.looked_up and second.looked_up,
        streams=first.streams or second.streams,
    )


def _parameters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def measure_needs(
    model: PreTrainedModel, units: tuple[PlacementUnit, ...], limits: dict[str, int], *, batch: int, sequence_length: int
) -> tuple[tuple[PlacementUnit, ...], dict[str, int], MemoryNeeds]:
    """Return the units with the bytes that they keep of ``batch`` sequences, ``limits``, and the memory beside the weights."""
    if next(iter(limits)) == CPU:
        met = _experts_met(model)
        units = tuple(replace(unit, read=unit.read - _not_chosen(model, unit, batch, met)) for unit in units)
    kept = cache_bytes(model, sequence_length)
    if kept is not None:
        inside = [sum(kept.get(number, 0) for number in _layers_in(model, unit)) for unit in units]
        units = tuple(replace(unit, cache=batch * size) for unit, size in zip(units, inside, strict=True))
    work = MemoryNeeds(
        batch=batch,
        sequence=sequence_length,
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        activations=_activation_bytes(model, batch, sequence_length),
        cache=None if kept is None else batch * sum(kept.values()),
    )
    return units, limits, work


def _experts_met(model: PreTrainedModel) -> dict[nn.Module, int]:
    """Return how many experts a token meets, by the module of experts, or {} if a pass without numbers is not possible."""
    if next(routed_experts_in(model), None) is None:
        return {}
    try:
        with fake_masks(masked=False):
            met = experts_per_token(model, lambda: _ids(model, CACHED_TOKENS))
    except Exception:  # a model's forward raises its own kinds where shapes are not enough for it; then all experts are read
        return {}
    return {model.get_submodule(path): number for path, number in met.items()}


def _not_chosen(model: PreTrainedModel, unit: PlacementUnit, batch: int, met: Mapping[nn.Module, int]) -> int:
    """Return the expected bytes of experts that a pass of one token a sequence does not use, if each is chosen as often."""
    modules = [model.get_submodule(name) for name in unit.names if unit.read and not _is_parameter(model, name)]
    idle = 0.0
    for experts in (inner for module in modules for inner in routed_experts_in(module) if inner in met):
        number: Any = experts.num_experts  # an int; a module's attributes have no types
        left_out = 1 - met[experts] / number
        idle += left_out**batch * sum(weight.nbytes for weight in experts.parameters())
    return int(idle)


def _layers_in(model: nn.Module, unit: PlacementUnit) -> set[int]:
    """Return the numbers by which a cache knows the layers of a unit."""
    inside = (module for name in unit.names if not _is_parameter(model, name) for module in model.get_submodule(name).modules())
    return {number for module in inside if isinstance(number := getattr(module, "layer_idx", None), int)}


def _is_parameter(model: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last in PARAMETERS.of(model.get_submodule(path))


def _activation_bytes(model: PreTrainedModel, batch: int, sequence: int) -> int:
    """Return the bytes of activations at the widest moment of a layer, and of the scores of the next token, in fp32 too.

    The activations are the residual and its norm, the widest product's operand and result, and what is made of these two.
    """
    head = model.get_output_embeddings() if model.can_generate() else None
    products = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]
    widest = max((sum(module.weight.shape) for module in products), default=0)
    hidden = getattr(model.config.get_text_config(), "hidden_size", None) or 0
    size = model.dtype.itemsize
    scores = 0 if head is None else batch * max(head.weight.shape) * (size + torch.float32.itemsize)
    return batch * sequence * size * (2 * hidden + 2 * widest) + scores


def cache_bytes(model: PreTrainedModel, sequence: int) -> dict[int, int] | None:
    """Return the bytes that each layer keeps of one sequence, by its number, or None if they are unknown.

    Two short passes on the meta device show them.
    """
    if not model.can_generate():
        return {}
    try:
        few, more = (_kept(model, tokens) for tokens in (CACHED_TOKENS, 2 * CACHED_TOKENS))
    except Exception:  # a model's forward raises its own kinds where shapes are not enough for it; then it is not known
        return None
    found = {}
    for number, (first, window) in few.items():
        per_token = (more[number][0] - first) / CACHED_TOKENS
        found[number] = int(first + per_token * (min(sequence, window or sequence) - CACHED_TOKENS))
    return found


def _ids(model: PreTrainedModel, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def _kept(model: PreTrainedModel, tokens: int) -> dict[int, tuple[int, int | None]]:
    """Return (bytes, how many tokens back the layer looks, or None) for the cache of each layer."""
    given = _ids(model, tokens)
    with fake_masks(masked=False), torch.no_grad():
        cache: Any = returned_cache(model(**given, use_cache=True))
    both = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    found: dict[int, tuple[int, int | None]] = {}
    parts: list[Any] = both if both[0] is not None else [cache]
    for part in parts:
        for number, layer in enumerate(part.layers):
            size = sum(value.numel() * value.element_size() for value in vars(layer).values() if isinstance(value, torch.Tensor))
            found[number] = (found.get(number, (0, None))[0] + size, getattr(layer, "sliding_window", None))
    return found
