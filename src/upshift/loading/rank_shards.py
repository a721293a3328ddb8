# needs torch
"""Select the part of a checkpoint that one rank reads: the layers of its stage, and its slice of each divided weight.

Weights are divided three times, in this order. Pipeline stages take whole layers. Tensor parallelism takes rows or columns of
each weight, as the model's plan says. Fully-shard takes rows of the result: the first dimension in equal parts, as torch's
fully_shard does. If a weight is made from several stored tensors, each of these is sliced. If the operations do more than stack
and concatenate, the tensors are read whole and the weight is sliced.
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
from upshift.loading.fill_model import Filling
from upshift.loading.key_mapping import Group, convert_group
from upshift.models.build import find_stacks
from upshift.models.tensor_parallel_plan import declared_plan, divided_dimension, unknown_styles

Interval = tuple[int, int]  # start, end (exclusive)
Intervals = tuple[Interval, ...]  # the intervals of one dimension, which are concatenated


@dataclass(frozen=True)
class Share:
    """One of ``count`` equal parts."""

    number: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise RequestError(f"rank {self.number} of {self.count} is not possible; ranks are 0 to {self.count - 1}")


@dataclass(frozen=True)
class Rank:
    """A rank's share in each kind of division."""

    stage: Share = Share()
    tensor: Share = Share()
    shard: Share = Share()


@dataclass(frozen=True)
class Slice:
    """A part of a stored tensor, given by intervals of each dimension."""

    stored: StoredTensor
    intervals: tuple[Intervals, ...]

    @property
    def nbytes(self) -> int:
        return prod(map(_length, self.intervals)) * dtype_of(self.stored).itemsize

    def byte_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte in the file, and the number of bytes, of each contiguous range."""
        shape = shape_of(self.stored)
        item = dtype_of(self.stored).itemsize
        num_leading = len(shape)  # all dimensions after these are read whole
        while num_leading and self.intervals[num_leading - 1] == ((0, shape[num_leading - 1]),):
            num_leading -= 1
        step = item * prod(shape[num_leading:])
        yield from _byte_ranges(self.stored.offset, shape[:num_leading], self.intervals[:num_leading], step)

    def read(self) -> Tensor:
        """Return the slice. Contiguous rows stay mapped. A slice with gaps is copied."""
        tensor = read_tensor(self.stored)
        for dimension, intervals in enumerate(self.intervals):
            pieces = [tensor.narrow(dimension, start, end - start) for start, end in intervals]
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dimension)
        return tensor.contiguous()


@dataclass(frozen=True)
class RankWeight:
    """The weights of one group on this rank, and the slices of stored tensors that they are made from."""

    group: Group
    sources: tuple[tuple[str, Slice], ...]  # pattern, slice
    intervals: dict[str, tuple[Intervals, ...]]  # by the weight's name
    slice_after: bool  # slice the weight after it is made; False: the sources are sliced already


def rank_slices(filling: Filling, rank: Rank) -> list[RankWeight]:
    """Return the weights that a rank reads.

    Raise RequestError if the model's tensor-parallel plan has an unknown style, or if stages cannot divide its layers."""
    model = filling.model
    plan = declared_plan(filling.model)
    unknown = unknown_styles(plan)
    if rank.tensor.count > 1 and (unknown or not plan):
        raise RequestError(
            f"{type(model).__name__} declares "
            + (f"the tensor-parallel styles {unknown}, which are not known here" if unknown else "no tensor-parallel plan")
            + "; use pipeline stages or fully-shard"
        )
    stage_of = _stage_function(model, rank.stage.count)
    rank_weights = []
    for group in filling.names.groups:
        shapes = filling.filled_shapes(group)
        if rank.stage.number in stage_of(group.target):
            intervals = {name: _intervals(model, plan, name, size, rank) for name, size in shapes.items()}
            rank_weights.append(_to_rank_weight(filling, group, intervals))
    return [rank_weight for rank_weight in rank_weights if rank_weight is not None]


def read_slices(filling: Filling, rank_weights: Sequence[RankWeight]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of this rank's weights, in the dtypes of the model."""
    for rank_weight in rank_weights:
        dtype = filling.dtype_of(rank_weight.group.target)
        tensors = {slice_.stored.name: slice_.read().to(dtype) for _, slice_ in rank_weight.sources}
        if rank_weight.group.converter is None:
            yield rank_weight.group.target, tensors[rank_weight.group.sources[0][1]]
            continue
        sources = tuple((pattern, slice_.stored.name) for pattern, slice_ in rank_weight.sources)
        weights = convert_group(replace(rank_weight.group, sources=sources), tensors, filling.model)
        for name, tensor in weights.items():
            yield name, _slice_tensor(tensor, rank_weight.intervals[name]) if rank_weight.slice_after else tensor


def bytes_read(rank_weights: Sequence[RankWeight]) -> int:
    return sum(slice_.nbytes for rank_weight in rank_weights for _, slice_ in rank_weight.sources)


def _intervals(model: PreTrainedModel, plan: dict[str, str], name: str, shape: torch.Size, rank: Rank) -> tuple[Intervals, ...]:
    intervals: list[Intervals] = [((0, size),) for size in shape]
    path, _, last = name.rpartition(".")
    parameter = PARAMETERS.of(model.get_submodule(path)).get(last)
    if parameter is None:  # a buffer is on every rank
        return tuple(intervals)
    division = divided_dimension(name, parameter, plan)
    if division is not None:
        dimension, has_halves = division
        size = shape[dimension]
        halves = ((0, size // 2), (size // 2, size)) if has_halves else ((0, size),)
        intervals[dimension] = tuple(_share_of_interval(half, rank.tensor) for half in halves)
    if intervals:
        intervals[0] = _share_of_intervals(intervals[0], rank.shard)
    return tuple(intervals)


def _share_of_interval(interval: Interval, share: Share) -> Interval:
    """Return a share of an interval, divided as by torch.chunk. The last shares may be shorter, or empty."""
    start, end = interval
    size = -(-(end - start) // share.count)
    return min(start + share.number * size, end), min(start + (share.number + 1) * size, end)


def _share_of_intervals(intervals: Intervals, share: Share) -> Intervals:
    """Return a share of concatenated intervals."""
    first, last = _share_of_interval((0, _length(intervals)), share)
    shares = []
    num_before = 0
    for start, end in intervals:
        shares.append((start + max(first - num_before, 0), start + min(last - num_before, end - start)))
        num_before += end - start
    return tuple((start, end) for start, end in shares if end > start) or ((0, 0),)


def _to_rank_weight(filling: Filling, group: Group, intervals: dict[str, tuple[Intervals, ...]]) -> RankWeight | None:
    if all(dimensions and not _length(dimensions[0]) for dimensions in intervals.values()):
        return None  # more ranks than rows; a weight without dimensions is on every rank
    sources = [(pattern, filling.tensors[name]) for pattern, name in group.sources]
    if group.converter is None:
        return RankWeight(group, ((sources[0][0], Slice(sources[0][1], intervals[group.target])),), intervals, slice_after=False)
    slices = _sliced_sources(group, sources, intervals[group.target]) if len(intervals) == 1 else None
    if slices is not None:
        return RankWeight(group, slices, intervals, slice_after=False)
    full_slices = tuple((pattern, Slice(stored, tuple(((0, size),) for size in shape_of(stored)))) for pattern, stored in sources)
    return RankWeight(group, full_slices, intervals, slice_after=True)


def _sliced_sources(
    group: Group, sources: list[tuple[str, StoredTensor]], intervals: tuple[Intervals, ...]
) -> tuple[tuple[str, Slice], ...] | None:
    """Return the slices of stored tensors from which the weight's slice can be made, or None.

    They exist if the tensors are only stacked, and the stacks are only concatenated."""
    assert group.converter is not None
    stack, *more_operations = group.converter.operations
    concatenated_dim = None
    if more_operations and type(more_operations[0]) is CONCATENATE.get():
        concatenated_dim = more_operations[0].dim
    if type(stack) is not STACK.get() or stack.dim != 0:
        return None
    if len(more_operations) > (concatenated_dim is not None) or concatenated_dim == 0:
        return None
    patterns = list(dict.fromkeys(pattern for pattern in group.converter.source_patterns if pattern in dict(sources)))
    slices = []
    num_before = 0
    for pattern in patterns:
        tensors = [stored for source_pattern, stored in sources if source_pattern == pattern]
        shape = shape_of(tensors[0])
        inner_intervals = list(intervals[1:])
        if concatenated_dim is not None:
            inner_intervals[concatenated_dim - 1] = _overlap(
                intervals[concatenated_dim], num_before, num_before + shape[concatenated_dim - 1]
            )
            num_before += shape[concatenated_dim - 1]
        slices += [
            (pattern, Slice(tensors[number], tuple(inner_intervals)))
            for start, end in intervals[0]
            for number in range(start, end)
        ]
    return tuple(slices)


def _overlap(intervals: Intervals, start: int, end: int) -> Intervals:
    overlaps = [(max(first, start) - start, min(last, end) - start) for first, last in intervals]
    return tuple((first, last) for first, last in overlaps if first < last) or ((0, 0),)


def _slice_tensor(tensor: Tensor, intervals: tuple[Intervals, ...]) -> Tensor:
    for dimension, ranges in enumerate(intervals):
        tensor = torch.cat([tensor.narrow(dimension, start, end - start) for start, end in ranges], dimension)
    return tensor


def _length(intervals: Intervals) -> int:
    return sum(end - start for start, end in intervals)


def _byte_ranges(offset: int, shape: Sequence[int], intervals: Sequence[Intervals], step: int) -> Iterator[tuple[int, int]]:
    if not shape:
        yield offset, step
        return
    row = step * prod(shape[1:])
    for start, end in intervals[0]:
        if len(shape) == 1:
            if end > start:
                yield offset + start * step, (end - start) * step
            continue
        for number in range(start, end):
            yield from _byte_ranges(offset + number * row, shape[1:], intervals[1:], step)


def _stage_function(model: PreTrainedModel, count: int) -> Callable[[str], frozenset[int]]:
    """Return a function from a weight's name to the stages that need it.

    Layers are divided evenly, and the first stages take one more if some are left. Weights before the layers belong to the
    first stage, weights after them to the last. A weight that is tied across both belongs to both."""
    if count == 1:
        return lambda name: frozenset({0})
    stacks = find_stacks(model)
    if len(stacks) != 1 or len(stacks[0][1]) < count:
        layers = [len(layer_list) for _, layer_list in stacks]
        raise RequestError(
            f"{type(model).__name__} has stacks of {layers or 'no'} layers, which {count} pipeline stages cannot share; "
            "one stack with a layer or more for each stage can"
        )
    path, layer_list = stacks[0]
    layers_per_stage, num_longer = divmod(len(layer_list), count)
    starts = [number * layers_per_stage + min(number, num_longer) for number in range(count)]
    pattern = re.compile(re.escape(path) + r"\.(\d+)\.")
    names = list(model.state_dict())
    first = next(number for number, name in enumerate(names) if pattern.match(name))
    stage_of_weight = {name: (0 if number < first else count - 1) for number, name in enumerate(names)}
    tied = model.all_tied_weights_keys

    def stages(name: str) -> frozenset[int]:
        layer = pattern.match(name)
        if layer is not None:
            return frozenset({bisect_right(starts, int(layer[1])) - 1})
        tied_names = [tied_name for pair in tied.items() if name in pair for tied_name in pair]
        return frozenset(stage_of_weight[tied_name] for tied_name in (name, *tied_names))

    return stages
