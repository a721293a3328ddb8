# needs torch
"""Map stored tensors to the weights of a model by name, with transformers' renamings and conversions.

A plain weight is one stored tensor, perhaps renamed. Otherwise several tensors become one weight (the experts of a layer), or
one tensor becomes several weights (fused queries, keys and values).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.transformers_names import CONVERTER, NAME_CHANGES, NAME_ORDER, RENAME, RENAMING, SKIPPED
from upshift.text import one_line


@dataclass(frozen=True)
class Group:
    """Stored tensors that are read together."""

    target: str  # the weight that they fill, or the first of several
    sources: tuple[tuple[str, str], ...]  # the pattern that matched and the stored name, in the order of the operations
    converter: Any | None  # None: the only source is a plain weight


@dataclass(frozen=True)
class NameMapping:
    """The groups of stored tensors that fill a model."""

    groups: tuple[Group, ...]
    unexpected: frozenset[str]  # stored tensors that fill no weight, by the names that they would have in the model
    used_transforms: tuple[Any, ...]  # transforms that matched, which saving reverts


def map_names(model: PreTrainedModel, stored: Iterable[str], quantizer: Any = None) -> NameMapping:
    """Return which stored tensors fill which weights. ``model`` is on the meta device."""
    transforms = NAME_CHANGES.get()(model, None, quantizer)
    renamings = [transform for transform in transforms if isinstance(transform, RENAMING.get())]
    converters = [transform for transform in transforms if isinstance(transform, CONVERTER.get())]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    model_names = model.state_dict()
    sources: dict[str, list[tuple[str, str]]] = {}
    converted: dict[str, Any] = {}
    unexpected: set[str] = set()
    for name in sorted(stored, key=NAME_ORDER.get()):  # some transforms depend on what they saw before
        target, pattern = RENAME.get()(name, renamings, converters, model.base_model_prefix, model_names)
        if target not in model_names and name in model_names:
            target, pattern = RENAME.get()(name, [], [], model.base_model_prefix, model_names)
        if target in model_names:
            if target not in sources and pattern is not None:
                converted[target] = by_pattern[pattern]
            sources.setdefault(target, []).append((pattern or name, name))
        elif pattern is None:
            unexpected.add(target)
        else:
            target_patterns = by_pattern[pattern].target_patterns
            unexpected |= {target.replace(target_patterns[0], target_pattern) for target_pattern in target_patterns}
    return NameMapping(
        groups=tuple(
            Group(target, tuple(sources_of_target), converted.get(target)) for target, sources_of_target in sources.items()
        ),
        unexpected=frozenset(unexpected),
        used_transforms=tuple(transform for transform in transforms if transform.was_used()),
    )


def convert_group(
    group: Group, tensors: Mapping[str, Tensor], model: PreTrainedModel, *, quantizer: Any = None, info: Any = None
) -> dict[str, Tensor]:
    """Return the weights that a group fills, made from its stored tensors.

    With a quantizer the weights are quantized. Weights that the quantizer puts into the model itself are removed from the
    missing ones in ``info``. Raise RequestError if the operations fail on the tensors."""
    transform = deepcopy(group.converter) or RENAMING.get()(group.sources[0][1], group.target)  # it collects tensors
    for pattern, name in group.sources:
        transform.add_tensor(group.target, name, pattern, tensors[name])  # saving calls it in the same way
    if quantizer is not None:
        transform.quantization_operation = quantizer.get_quantize_ops()
    try:
        weights = transform.convert(group.target, model=model, config=model.config, hf_quantizer=quantizer, loading_info=info)
    except (SKIPPED.get(), RuntimeError, ValueError, IndexError, KeyError) as error:
        message = error if info is None else info.conversion_errors.pop(group.target, error)
        reason = one_line(message, limit=None)[-200:]  # a traceback has its reason at the end
        raise RequestError(
            f"{len(group.sources)} stored tensors, {group.sources[0][1]} the first, do not become {group.target} "
            f"({reason}); the checkpoint is not whole, or its config.json is that of another model"
        ) from error
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in weights.items()}


def filled_shapes(group: Group, shapes: Mapping[str, torch.Size], model: PreTrainedModel) -> dict[str, torch.Size]:
    """Return the shapes of the weights that a group fills. ``shapes``: the shapes of the stored tensors."""
    if group.converter is None:
        return {group.target: shapes[group.sources[0][1]]}
    empty = {name: torch.empty(shapes[name], device="meta") for _, name in group.sources}
    return {name: tensor.shape for name, tensor in convert_group(group, empty, model).items()}
