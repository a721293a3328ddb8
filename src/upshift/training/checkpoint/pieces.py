"""Describe the part of a tensor that a rank has, and turn parts of one layout into those of another.

A part is, in every dimension, some intervals of the whole put behind each other: rows that fully_shard deals, columns of
tensor parallelism, both halves of a packed weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from upshift.internals.torch_names import SPLIT_TENSOR
from upshift.value import Value

Interval = tuple[int, int]  # begin, end
Run = tuple[int, int, int]  # begin in one part, begin in another, length


class Piece(Value):
    """A part of a tensor. ``kept`` has the intervals of each dimension that is divided; all of any other dimension is there."""

    shape: tuple[int, ...]  # of the whole tensor
    kept: dict[int, tuple[Interval, ...]] = {}

    def of(self, dimension: int) -> tuple[Interval, ...]:
        return self.kept.get(dimension, ((0, self.shape[dimension]),))

    @property
    def numel(self) -> int:
        count = 1
        for dimension in range(len(self.shape)):
            count *= sum(end - begin for begin, end in self.of(dimension))
        return count


class Pieces(Value):
    """The contents of the files of one rank."""

    tensors: dict[str, Piece]
    checksums: dict[str, str] = {}  # SHA-256 of the rank's own files by name


def piece_of(tensor: Tensor, *, rows: Interval | None = None) -> Piece:
    """Return the piece of a parameter that this rank has. With ``rows``, return only these rows of its first dimension."""
    shape = tuple(tensor.shape)
    places: dict[int, Tensor] = {}
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate()
        assert coordinates is not None, "a rank has parts of its own meshes' tensors alone"
        # From the inside out: fully_shard divides the rows that tensor parallelism has left to the rank.
        for number, placement in reversed(list(enumerate(tensor.placements))):
            if placement.is_replicate():
                continue
            dimension: int = placement.dim  # type: ignore[attr-defined]
            before = places.get(dimension, torch.arange(shape[dimension]))
            placement = Shard(dimension) if dimension in places else placement
            # As the placement itself divides the whole: packed weights, and rows of columns, are not one interval.
            along = before.view([-1 if one == dimension else 1 for one in range(len(shape))])
            parts, _ = SPLIT_TENSOR.of(placement)(along, tensor.device_mesh.size(number), with_padding=False, contiguous=False)
            places[dimension] = parts[coordinates[number]].reshape(-1)
    if rows is not None and shape:
        places[0] = places.get(0, torch.arange(shape[0]))[rows[0] : rows[1]]
    return Piece(shape=shape, kept={dimension: _intervals(found) for dimension, found in places.items()})


def copy_shared(target: Tensor, own: Piece, source: Tensor, other: Piece) -> int:
    """Copy the elements that both pieces have from ``source`` into ``target``. Return how many elements that was."""
    copied = 0
    runs = [list(_runs(own.of(dimension), other.of(dimension))) for dimension in range(len(own.shape))]
    for one in product(*runs):
        into, out_of = target, source
        for dimension, (here, there, length) in enumerate(one):
            into, out_of = into.narrow(dimension, here, length), out_of.narrow(dimension, there, length)
        into.copy_(out_of)
        copied += into.numel()
    return copied


def _runs(own: tuple[Interval, ...], other: tuple[Interval, ...]) -> Iterator[Run]:
    here = 0
    for begin, end in own:
        there = 0
        for first, last in other:
            low, high = max(begin, first), min(end, last)
            if low < high:
                yield here + low - begin, there + low - first, high - low
            there += last - first
        here += end - begin


def _intervals(places: Tensor) -> tuple[Interval, ...]:
    """Return the intervals of places that come in rising runs."""
    if not places.numel():
        return ()
    breaks = (places.diff() != 1).nonzero().flatten() + 1
    runs = places.tensor_split(breaks.tolist()) if breaks.numel() else (places,)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)
