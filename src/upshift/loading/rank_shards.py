"""Select the part of a checkpoint that one rank reads: its slice of every weight that its plan divides, and its stage's layers.

Three ways to divide, in this order: pipeline stages take whole layers; tensor parallelism takes, of each weight, rows or
columns as the model's own plan says; fully-shard takes rows of what is left (the first dimension, in equal parts, as torch's
fully_shard does). Where operations make a weight of several stored tensors, each of those is sliced. If the operations do more
than stack and concatenate, the tensors are read whole and the weight is sliced.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.torch_names import PARAMETERS
from upshift.internals.transformers_names import CONCATENATE, STACK
from upshift.loading.files.safetensors_header import StoredTensor
from upshift.loading.files.tensors import dtype_of, read_tensor, shape_of
from upshift.loading.fill import Filling
from upshift.loading.key_mapping import Group, convert
from upshift.models.build import find_stacks
from upshift.models.tensor_parallel_plan import declared_plan, divided_dimension, unknown_styles

Interval = tuple[int, int]  # begin, end
Intervals = tuple[Interval, ...]  # of one dimension, put behind each other


@dataclass(frozen=True)
class Share:
    """One part of several equal ones."""

    number: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise RequestError(f"rank {self.number} of {self.of} is not possible; ranks are 0 to {self.of - 1}")


@dataclass(frozen=True)
class Rank:
    stage: Share = Share()
    tensor: Share = Share()
    shard: Share = Share()


@dataclass(frozen=True)
class Slice:
    """A part of a stored tensor: the intervals of each dimension."""

    stored: StoredTensor
    intervals: tuple[Intervals, ...]

    @property
    def nbytes(self) -> int:
        return prod(map(_length, self.intervals)) * dtype_of(self.stored).itemsize

    def byte_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield (first byte in the file, number of bytes) of each contiguous range."""
        shape = shape_of(self.stored)
        item = dtype_of(self.stored).itemsize
        whole = len(shape)  # from this dimension on, all of it
        while whole and self.intervals[whole - 1] == ((0, shape[whole - 1]),):
            whole -= 1
        step = item * prod(shape[whole:])
        yield from _ranges(self.stored.offset, shape[:whole], self.intervals[:whole], step)

    def read(self) -> Tensor:
        """Return the slice. Rows stay mapped. A slice with gaps is copied together."""
        tensor = read_tensor(self.stored)
        for dimension, intervals in enumerate(self.intervals):
            parts = [tensor.narrow(dimension, begin, end - begin) for begin, end in intervals]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dimension)
        return tensor.contiguous()


@dataclass(frozen=True)
class Reading:
    """A weight of this rank. ``after``: slice the weight once it is made; False: its sources are sliced already."""

    group: Group
    sources: tuple[tuple[str, Slice], ...]  # pattern, slice
    intervals: dict[str, tuple[Intervals, ...]]  # by weight
    after: bool


def rank_slices(filling: Filling, rank: Rank) -> list[Reading]:
    """Return what a rank reads.

    Raise RequestError if the model's plan has a style that is not known here, or its layers are not one stack."""
    model = filling.model
    plan = declared_plan(filling.model)
    unknown = unknown_styles(plan)
    if rank.tensor.of > 1 and (unknown or not plan):
        raise RequestError(
            f"{type(model).__name__} declares "
            + (f"the tensor-parallel styles {unknown}, which are not known here" if unknown else "no tensor-parallel plan")
            + "; use pipeline stages or fully-shard"
        )
    stage_of = _stages(model, rank.stage.of)
    found = []
    for group in filling.names.groups:
        shapes = filling.filled(group)
        if rank.stage.number in stage_of(group.target):
            intervals = {name: _intervals(model, plan, name, size, rank) for name, size in shapes.items()}
            found.append(_reading(filling, group, intervals))
    return [reading for reading in found if reading is not None]


def read_slices(filling: Filling, readings: Sequence[Reading]) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's weights by their names, in the dtypes of the model."""
    for reading in readings:
        dtype = filling.dtype_of(reading.group.target)
        tensors = {piece.stored.name: piece.read().to(dtype) for _, piece in reading.sources}
        if reading.group.converter is None:
            yield reading.group.target, tensors[reading.group.sources[0][1]]
            continue
        sources = tuple((pattern, piece.stored.name) for pattern, piece in reading.sources)
        made = convert(replace(reading.group, sources=sources), tensors, filling.model)
        for name, tensor in made.items():
            yield name, _cut(tensor, reading.intervals[name]) if reading.after else tensor


def bytes_read(readings: Sequence[Reading]) -> int:
    return sum(piece.nbytes for reading in readings for _, piece in reading.sources)


def _intervals(model: PreTrainedModel, plan: dict[str, str], name: str, shape: torch.Size, rank: Rank) -> tuple[Intervals, ...]:
    found: list[Intervals] = [((0, size),) for size in shape]
    path, _, last = name.rpartition(".")
    parameter = PARAMETERS.of(model.get_submodule(path)).get(last)
    if parameter is None:  # a buffer is on every rank
        return tuple(found)
    divided = divided_dimension(name, parameter, plan)
    if divided is not None:
        dimension, packed = divided
        size = shape[dimension]
        halves = ((0, size // 2), (size // 2, size)) if packed else ((0, size),)
        found[dimension] = tuple(_chunk(half, rank.tensor) for half in halves)
    if found:
        found[0] = _rows(found[0], rank.shard)
    return tuple(found)


def _chunk(interval: Interval, share: Share) -> Interval:
    """Return a share of an interval, as torch.chunk divides it: the last ones may be shorter, or empty."""
    begin, end = interval
    size = -(-(end - begin) // share.of)
    return min(begin + share.number * size, end), min(begin + (share.number + 1) * size, end)


def _rows(intervals: Intervals, share: Share) -> Intervals:
    """Return a share of intervals that lie behind each other in memory."""
    first, last = _chunk((0, _length(intervals)), share)
    kept = []
    before = 0
    for begin, end in intervals:
        kept.append((begin + max(first - before, 0), begin + min(last - before, end - begin)))
        before += end - begin
    return tuple((begin, end) for begin, end in kept if end > begin) or ((0, 0),)


def _reading(filling: Filling, group: Group, intervals: dict[str, tuple[Intervals, ...]]) -> Reading | None:
    if all(not _length(dimension) for found in intervals.values() for dimension in found[:1]):
        return None  # more ranks than rows
    sources = [(pattern, filling.tensors[name]) for pattern, name in group.sources]
    if group.converter is None:
        return Reading(group, ((sources[0][0], Slice(sources[0][1], intervals[group.target])),), intervals, after=False)
    sliced = _sliced_sources(group, sources, intervals[group.target]) if len(intervals) == 1 else None
    if sliced is not None:
        return Reading(group, sliced, intervals, after=False)
    whole = tuple((pattern, Slice(stored, tuple(((0, size),) for size in shape_of(stored)))) for pattern, stored in sources)
    return Reading(group, whole, intervals, after=True)


def _sliced_sources(
    group: Group, sources: list[tuple[str, StoredTensor]], wanted: tuple[Intervals, ...]
) -> tuple[tuple[str, Slice], ...] | None:
    """Return the slices of stored tensors that the weight's slice is made of, or None.

    This works if tensors are stacked, and the stacks are concatenated."""
    assert group.converter is not None
    stack, *rest = group.converter.operations
    joined = rest[0].dim if rest and type(rest[0]) is CONCATENATE.get() else None
    if type(stack) is not STACK.get() or stack.dim != 0 or len(rest) > (joined is not None) or joined == 0:
        return None
    patterns = list(dict.fromkeys(pattern for pattern in group.converter.source_patterns if pattern in dict(sources)))
    kept = []
    before = 0
    for pattern in patterns:
        own = [stored for other, stored in sources if other == pattern]
        shape = shape_of(own[0])
        inner = list(wanted[1:])
        if joined is not None:
            inner[joined - 1] = _overlap(wanted[joined], before, before + shape[joined - 1])
            before += shape[joined - 1]
        kept += [(pattern, Slice(own[number], tuple(inner))) for begin, end in wanted[0] for number in range(begin, end)]
    return tuple(kept)


def _overlap(intervals: Intervals, begin: int, end: int) -> Intervals:
    found = [(max(first, begin) - begin, min(last, end) - begin) for first, last in intervals]
    return tuple((first, last) for first, last in found if first < last) or ((0, 0),)


def _cut(tensor: Tensor, intervals: tuple[Intervals, ...]) -> Tensor:
    for dimension, wanted in enumerate(intervals):
        tensor = torch.cat([tensor.narrow(dimension, begin, end - begin) for begin, end in wanted], dimension)
    return tensor


def _length(intervals: Intervals) -> int:
    return sum(end - begin for begin, end in intervals)


def _ranges(offset: int, shape: Sequence[int], intervals: Sequence[Intervals], step: int) -> Iterator[tuple[int, int]]:
    if not shape:
        yield offset, step
        return
    row = step * prod(shape[1:])
    for begin, end in intervals[0]:
        if len(shape) == 1:
            if end > begin:
                yield offset + begin * step, (end - begin) * step
            continue
        for number in range(begin, end):
            yield from _ranges(offset + number * row, shape[1:], intervals[1:], step)


def _stages(model: PreTrainedModel, count: int) -> Callable[[str], frozenset[int]]:
    """Return a function from a weight's name to the stages that need it.

    Layers are divided into equal parts; the first stages take one more of those left over. Weights that the model lists before
    its layers belong to the first stage, weights behind them to the last one. A weight tied across both belongs to both."""
    if count == 1:
        return lambda name: frozenset({0})
    stacks = find_stacks(model)
    if len(stacks) != 1 or len(stacks[0][1]) < count:
        layers = [len(stack) for _, stack in stacks]
        raise RequestError(
            f"{type(model).__name__} has stacks of {layers or 'no'} layers, which {count} pipeline stages cannot share; "
            "one stack with a layer or more for each stage can"
        )
    path, stack = stacks[0]
    each, more = divmod(len(stack), count)
    starts = [number * each + min(number, more) for number in range(count)]
    pattern = re.compile(re.escape(path) + r"\.(\d+)\.")
    names = list(model.state_dict())
    first = next(number for number, name in enumerate(names) if pattern.match(name))
    place = {name: (0 if number < first else count - 1) for number, name in enumerate(names)}
    tied = model.all_tied_weights_keys

    def stages(name: str) -> frozenset[int]:
        layer = pattern.match(name)
        if layer is not None:
            return frozenset({bisect_right(starts, int(layer[1])) - 1})
        others = [other for pair in tied.items() if name in pair for other in pair]
        return frozenset(place[other] for other in (name, *others))

    return stages
