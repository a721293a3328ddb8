# needs torch
"""Place a model on the meta device: divide it into units, measure the memory that they need, and choose their devices."""

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
from upshift.models.kv_cache import layer_tensors, returned_cache
from upshift.models.sequence_length import default_length
from upshift.models.tracing.mixtures import experts_per_token
from upshift.models.tracing.segments import fake_masks

CACHED_TOKENS = 8  # enough to measure the cache's bytes for a token


@dataclass
class _UnitDraft:
    """A placement unit while it is being put together."""

    names: list[str]
    parameters: dict[int, nn.Parameter] = field(default_factory=dict)
    by_rows: bool = True
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
    """Place a model that is on the meta device in its final dtypes.

    ``sequence_length``: None means the default for the model. ``memory_bytes_per_second``: the rate of the CPU's memory. If it
    is given, the rates of the disk and of products are measured, and the times of loading and of a token are predicted.

    Raise RequestError for a device_map that does not fit the model, and NothingFits if the limits are too small.
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
        devices_by_name = device_map if isinstance(device_map, Mapping) else {"": device_map}
        devices = check_device_map(model, devices_by_name, host)
        units = placement_units(model, divided_names=devices)
        placement = follow_device_map(devices, *measure_needs(model, units, limits, batch=batch, sequence_length=sequence_length))
    if memory_bytes_per_second is None:
        return placement
    return predict(
        placement,
        host,
        memory_bytes_per_second=memory_bytes_per_second,
        disk_bytes_per_second=disk_rate(checkpoint.files) if checkpoint is not None else None,
        stored_bytes=None if checkpoint is None else checkpoint.total_bytes,
        products_bytes_per_second=matmul_rate(model.dtype),
    )


def check_device_map(model: nn.Module, device_map: Mapping[str, str | int], host: Host) -> dict[str, str]:
    """Return the device map with Upshift's names of devices.

    Raise RequestError for names that the model does not have, and for parameters without a device.
    """
    names = {"", *(name for name, _ in model.named_modules()), *_parameters(model)}
    unknown = sorted(name for name in device_map if name not in names)
    if unknown:
        examples = ", ".join(sorted(name for name in names if name.count(".") < 2 and name)[:8])
        raise RequestError(f"device_map names {unknown[0]!r}, which the model has not; its modules are {examples} ...")
    devices = {name: read_device(device, host) for name, device in device_map.items()}
    for name in _parameters(model):
        path = name.split(".")
        if not any(".".join(path[:length]) in devices for length in range(len(path) + 1)):
            raise RequestError(f'device_map has no device for {name!r}; name its module, or give "" for all that is not named')
    return devices


def placement_units(model: PreTrainedModel, *, divided_names: Mapping[str, object] | None = None) -> tuple[PlacementUnit, ...]:
    """Return the units of a model in the order of its modules.

    ``divided_names``: the names in a device map. No unit has a module of such a name inside it."""
    whole_classes = set(WHOLE_MODULES.read(model) or ())
    if not whole_classes:
        whole_classes = {type(layer).__name__ for _, stack in find_stacks(model) for layer in stack}
    drafts: dict[int, _UnitDraft] = {}
    for path, module, is_unit in _walk_modules(model, "", whole_classes, set(divided_names or ())):
        _add_draft(drafts, path, module, is_unit)
    _apply_ties(model, drafts.values())
    merged = _join_tied(list(drafts.values()))
    return tuple(
        PlacementUnit(
            names=tuple(unit.names),
            nbytes=(size := sum(weight.numel() * weight.element_size() for weight in unit.parameters.values())),
            read=0 if unit.by_rows else size,
            streams=unit.streams,
        )
        for unit in merged
    )


def _walk_modules(
    module: nn.Module, path: str, whole_classes: set[str], divided_names: set[str]
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the path and module of each unit, and True. Yield a module that is divided with False, for its own parameters."""
    children = [(name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None]
    is_divided = any(name.startswith(f"{path}." if path else "") and name != path for name in divided_names)
    if not children or (type(module).__name__ in whole_classes and not is_divided):
        if next(module.parameters(), None) is not None:
            yield path, module, True
        return
    yield path, module, False
    for name, child in children:
        yield from _walk_modules(child, f"{path}.{name}" if path else name, whole_classes, divided_names)


def _add_draft(drafts: dict[int, _UnitDraft], path: str, module: nn.Module, is_unit: bool) -> None:
    prefix = f"{path}." if path else ""
    if not is_unit or type(module).forward is nn.Module.forward:  # a list of parameters has no forward whose hooks could load it
        for name, parameter in module.named_parameters(recurse=is_unit):
            drafts[id(parameter)] = _UnitDraft([prefix + name], {id(parameter): parameter}, by_rows=False)
        return
    unit = drafts.setdefault(id(module), _UnitDraft([]))
    unit.names.append(path)
    unit.parameters = {id(parameter): parameter for parameter in module.parameters()}
    unit.by_rows = reads_rows_only(module)
    unit.streams = True


def _apply_ties(model: PreTrainedModel, units: Iterable[_UnitDraft]) -> None:
    """Replace weights by those that they will be tied to. The model only lists its ties until it is filled."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    ties = getattr(model, "all_tied_weights_keys", {}).items()
    source_of = {id(weights[name]): weights[source] for name, source in ties if name in weights and source in weights}
    for unit in units:
        tied = [source_of.get(key, weight) for key, weight in unit.parameters.items()]
        unit.parameters = {id(weight): weight for weight in tied}


def _join_tied(units: list[_UnitDraft]) -> list[_UnitDraft]:
    """Join units that share a parameter into one unit, at the position of the first."""
    owner: dict[int, _UnitDraft] = {}
    joined: list[_UnitDraft] = []
    for unit in units:
        for first in {id(owner[key]): owner[key] for key in unit.parameters if key in owner}.values():
            unit = _join(first, unit)
            joined = [draft for draft in joined if draft is not first]
        joined.append(unit)
        owner |= dict.fromkeys(unit.parameters, unit)
    order = {key: number for number, key in enumerate(owner)}
    return sorted(joined, key=lambda unit: min(order[key] for key in unit.parameters))


def _join(first: _UnitDraft, second: _UnitDraft) -> _UnitDraft:
    return _UnitDraft(
        first.names + second.names,
        first.parameters | second.parameters,
        by_rows=first.by_rows and second.by_rows,
        streams=first.streams or second.streams,
    )


def _parameters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def measure_needs(
    model: PreTrainedModel, units: tuple[PlacementUnit, ...], limits: dict[str, int], *, batch: int, sequence_length: int
) -> tuple[tuple[PlacementUnit, ...], dict[str, int], MemoryNeeds]:
    """Return the units with the bytes of their caches, ``limits``, and the memory that is needed besides the weights."""
    if next(iter(limits)) == CPU:
        experts_per_token_ = _experts_per_token(model)
        units = tuple(
            replace(unit, read=unit.read - _unused_expert_bytes(model, unit, batch, experts_per_token_)) for unit in units
        )
    cache = cache_bytes(model, sequence_length)
    if cache is not None:
        layer_bytes = [sum(cache.get(number, 0) for number in _layer_numbers(model, unit)) for unit in units]
        units = tuple(replace(unit, cache=batch * size) for unit, size in zip(units, layer_bytes, strict=True))
    work = MemoryNeeds(
        batch=batch,
        sequence=sequence_length,
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        activations=_activation_bytes(model, batch, sequence_length),
        cache=None if cache is None else batch * sum(cache.values()),
    )
    return units, limits, work


def _experts_per_token(model: PreTrainedModel) -> dict[nn.Module, int]:
    """Return the number of experts that compute a token, by the module of experts.

    Return an empty dict if the model cannot run on the meta device. All experts then count as read."""
    if next(routed_experts_in(model), None) is None:
        return {}
    try:
        with fake_masks(masked=False):
            per_token = experts_per_token(model, lambda: _ids(model, CACHED_TOKENS))
    except Exception:  # a forward that needs values raises errors of many kinds
        return {}
    return {model.get_submodule(path): number for path, number in per_token.items()}


def _unused_expert_bytes(model: PreTrainedModel, unit: PlacementUnit, batch: int, per_token: Mapping[nn.Module, int]) -> int:
    """Return the expected bytes of a unit's experts that a pass with one token for each sequence does not use.

    All experts are assumed to be chosen equally often."""
    modules = [model.get_submodule(name) for name in unit.names if unit.read and not _is_parameter(model, name)]
    unused_bytes = 0.0
    for experts in (inner for module in modules for inner in routed_experts_in(module) if inner in per_token):
        number: Any = experts.num_experts  # an int; a module's attributes have no types
        unused_share = 1 - per_token[experts] / number
        unused_bytes += unused_share**batch * sum(weight.nbytes for weight in experts.parameters())
    return int(unused_bytes)


def _layer_numbers(model: nn.Module, unit: PlacementUnit) -> set[int]:
    """Return the numbers of a unit's layers in the cache."""
    modules = (module for name in unit.names if not _is_parameter(model, name) for module in model.get_submodule(name).modules())
    return {number for module in modules if isinstance(number := getattr(module, "layer_idx", None), int)}


def _is_parameter(model: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last in PARAMETERS.of(model.get_submodule(path))


def _activation_bytes(model: PreTrainedModel, batch: int, sequence: int) -> int:
    """Return the peak bytes of a layer's activations, and the bytes of the next token's scores, also in fp32.

    The activations are the residual and its norm, the operand and the result of the widest product, and as much again for
    what is computed from these two.
    """
    head = model.get_output_embeddings() if model.can_generate() else None
    products = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]
    widest = max((sum(module.weight.shape) for module in products), default=0)
    hidden = getattr(model.config.get_text_config(), "hidden_size", None) or 0
    size = model.dtype.itemsize
    scores = 0 if head is None else batch * max(head.weight.shape) * (size + torch.float32.itemsize)
    return batch * sequence * size * (2 * hidden + 2 * widest) + scores


def cache_bytes(model: PreTrainedModel, sequence: int) -> dict[int, int] | None:
    """Return the bytes that each layer caches for one sequence, by the layer's number, or None if they are unknown.

    They are extrapolated from two short passes on the meta device.
    """
    if not model.can_generate():
        return {}
    try:
        short = _cache_after(model, CACHED_TOKENS)
        long = _cache_after(model, 2 * CACHED_TOKENS)
    except Exception:  # a forward that needs values raises errors of many kinds
        return None
    sizes = {}
    for number, (short_bytes, window) in short.items():
        per_token = (long[number][0] - short_bytes) / CACHED_TOKENS
        sizes[number] = int(short_bytes + per_token * (min(sequence, window or sequence) - CACHED_TOKENS))
    return sizes


def _ids(model: PreTrainedModel, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def _cache_after(model: PreTrainedModel, tokens: int) -> dict[int, tuple[int, int | None]]:
    """Return the bytes and the sliding window (or None) of each layer's cache after a pass with ``tokens`` tokens."""
    inputs = _ids(model, tokens)
    with fake_masks(masked=False), torch.no_grad():
        cache: Any = returned_cache(model(**inputs, use_cache=True))
    caches = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    sizes: dict[int, tuple[int, int | None]] = {}
    parts: list[Any] = caches if caches[0] is not None else [cache]
    for part in parts:
        for number, layer in enumerate(part.layers):
            size = sum(tensor.numel() * tensor.element_size() for tensor in layer_tensors(layer))
            sizes[number] = (sizes.get(number, (0, None))[0] + size, getattr(layer, "sliding_window", None))
    return sizes
