"""Merge into weights that transformers makes of several stored tensors, as experts of a layer, or that are parts of one.

A group is put together as loading does, changed by peft's own arithmetic, and taken apart as transformers' saving does. Memory
holds the weights of one group, twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.transformers_names import REVERT, WEIGHT_CONVERSIONS
from upshift.loading.header import StoredTensor
from upshift.loading.lora import Part, merged_rows
from upshift.loading.names import Group, Names, convert, filled
from upshift.loading.tensors import NAMES, bytes_of, dtype_of, read_tensor, shape_of
from upshift.loading.writing import NewTensor


def fused(model: PreTrainedModel, names: Names, tensors: Mapping[str, StoredTensor], parts: Mapping[str, Part]) -> FusedWeights:
    """Return the names of the weights that are stored as several tensors, or as parts of one, and their changed tensors."""
    shapes = {name: torch.Size(shape_of(tensor)) for name, tensor in tensors.items()}
    WEIGHT_CONVERSIONS.put(model, list(names.used))
    found = FusedWeights()
    for group in names.groups:
        if group.converter is not None:
            targets = list(filled(group, shapes, model))
            found.names |= set(targets)
            if any(not parts[target].is_base for target in targets if target in parts):
                merging = _Merging(model, group, tensors, parts)
                found.tensors |= {name: merging.tensor(tensors[name]) for _, name in group.sources}
    return found


class FusedWeights:
    def __init__(self) -> None:
        self.names: set[str] = set()  # in the model
        self.tensors: dict[str, NewTensor] = {}  # changed, by the names that they are stored by


class _Merging:
    """The merging of one group. It runs when the first of its tensors is written. Each tensor is let go when it is written."""

    def __init__(
        self, model: PreTrainedModel, group: Group, tensors: Mapping[str, StoredTensor], parts: Mapping[str, Part]
    ) -> None:
        self._model, self._group, self._tensors, self._parts = model, group, tensors, parts
        self._made: dict[str, Tensor] = {}

    def tensor(self, stored: StoredTensor) -> NewTensor:
        return NewTensor(stored.name, NAMES[dtype_of(stored)], shape_of(stored), partial(self._pieces, stored.name))

    def _pieces(self, name: str) -> Iterator[memoryview]:
        if name not in self._made:
            self._made = self._merged()
        yield bytes_of(self._made.pop(name))

    def _merged(self) -> dict[str, Tensor]:
        stored = {name: self._tensors[name] for _, name in self._group.sources}
        together = convert(self._group, {name: read_tensor(tensor) for name, tensor in stored.items()}, self._model)
        changed = {target: self._changed(target, together.pop(target)) for target in list(together)}
        apart = REVERT.get()(self._model, changed)
        for name, tensor in stored.items():
            if name not in apart or tuple(apart[name].shape) != shape_of(tensor):
                raise RequestError(
                    f"{self._group.target} is made of {len(stored)} stored tensors, and transformers does not give {name} back "
                    "of it; merge this adapter with peft's merge_and_unload"
                )
        return {name: apart[name].to(dtype_of(tensor)) for name, tensor in stored.items()}

    def _changed(self, target: str, weight: Tensor) -> Tensor:
        part = self._parts.get(target)
        if part is None or part.is_base:
            return weight
        found = list(merged_rows(part, lambda start, stop: weight[start:stop].clone()))
        return found[0] if len(found) == 1 else torch.cat(found)
