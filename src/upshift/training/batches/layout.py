"""Lay out the sequences of one global batch in rows and micro-batches, and decide which rank computes which.

The plan decides this. It never decides WHICH sequences are in the global batch, so every layout has the same loss and
gradient.

Derive the layout and the objective of batches from a plan and a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from upshift.errors import RequestError
from upshift.planning.workload import pack_rows, round_up, spread_rows
from upshift.value import Value

Count = Annotated[int, Field(ge=1)]


class Layout(Value):
    """The plan's part of the data. Everything here may change between two runs without changing what is learned."""

    micro_batch: Count  # rows per micro-batch
    packing: bool = False
    # With packing, a micro-batch is one row of up to micro_batch x sequence_length tokens: nothing is wasted, and it takes
    # an attention kernel whose work does not grow with the row.
    flatten: bool = False
    pad_multiple: Count = 8  # widths of micro-batches; packed rows are sequence_length wide unless flattened
    # False: no attention_mask on right padding. Causal attention never looks at it, and its kernels are faster without.
    mask_padding: bool = True
    pads: bool = True  # False: the model's results change with padding, so a row is as wide as its text
    rank: Annotated[int, Field(ge=0)] = 0  # of the data-parallel group
    world_size: Count = 1

    @model_validator(mode="after")
    def _check(self) -> Layout:
        if self.rank >= self.world_size:
            raise RequestError(f"rank={self.rank} is not in world_size={self.world_size}; use 0 to {self.world_size - 1}")
        return self


class RowGroup(NamedTuple):
    """One micro-batch before it is filled: the indices of each row's sequences. A group without rows is a stand-in without
    labels."""

    rows: tuple[tuple[int, ...], ...]
    width: int

    @property
    def num_padded_tokens(self) -> int:
        return max(1, len(self.rows)) * self.width

    @property
    def has_shared_rows(self) -> bool:
        return any(len(row) > 1 for row in self.rows)


def lay_out(lengths: Sequence[int], layout: Layout, *, sequence_length: int) -> list[list[RowGroup]]:
    """Return the row groups of every rank, longest first. Each rank gets the same number."""
    if layout.flatten:
        return _deal(_flat_rows(lengths, layout, sequence_length), layout.world_size)
    if layout.packing:
        rows = _packed_rows(lengths, layout, sequence_length)
    else:
        rows = [(index,) for index in sorted(range(len(lengths)), key=lambda i: -lengths[i])]
    size = layout.micro_batch

    def group(part: Sequence[tuple[int, ...]]) -> RowGroup:
        if layout.packing:
            return RowGroup(tuple(part), sequence_length)
        longest = max((lengths[row[0]] for row in part), default=2)
        multiple = layout.pad_multiple if layout.pads else 1
        return RowGroup(tuple(part), min(round_up(longest, multiple), sequence_length))

    runs = [rows] if layout.pads or layout.packing else _of_one_length(rows, lengths)
    groups = [group(run[start : start + size]) for run in runs for start in range(0, len(run), size)]
    while len(groups) % layout.world_size:
        widest = max(groups, key=lambda g: (len(g.rows) > 1, g.num_padded_tokens))
        if len(widest.rows) > 1:  # halving the largest shortens the slowest rank; a stand-in would only wait for it
            groups.remove(widest)
            half = (len(widest.rows) + 1) // 2
            groups += [group(widest.rows[:half]), group(widest.rows[half:])]
        else:
            groups.append(group(()))
    return _deal(groups, layout.world_size)


def _of_one_length(rows: list[tuple[int, ...]], lengths: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Return rows of one sequence each, sorted by length, parted where the length changes."""
    return [list(run) for _, run in groupby(rows, key=lambda row: lengths[row[0]])]


def _flat_rows(lengths: Sequence[int], layout: Layout, sequence_length: int) -> list[RowGroup]:
    capacity = layout.micro_batch * sequence_length
    groups = []
    for row in spread_rows(lengths, capacity=capacity, multiple=layout.world_size):
        width = min(round_up(max(sum(lengths[index] for index in row), 2), layout.pad_multiple), capacity)
        groups.append(RowGroup((tuple(row),) if row else (), width))
    return groups


def _packed_rows(lengths: Sequence[int], layout: Layout, sequence_length: int) -> list[tuple[int, ...]]:
    """Return packed rows, those with one sequence first: they need no position_ids, so their micro-batches take the plain
    causal kernels.

    Left-over rows of one sequence join the mixed rows, so that there are never more micro-batches than needed.
    """
    rows = [tuple(row) for row in pack_rows(lengths, capacity=sequence_length)]
    single = [row for row in rows if len(row) == 1]
    return single + [row for row in rows if len(row) > 1]


def _deal(groups: list[RowGroup], world_size: int) -> list[list[RowGroup]]:
    """Deal the micro-batches to ranks.

    Micro-batches that run together are of similar size, because ranks wait for each other. Totals are balanced.
    """
    if world_size == 1:
        return [groups]
    groups = sorted(groups, key=lambda g: -g.num_padded_tokens)
    hands: list[list[RowGroup]] = [[] for _ in range(world_size)]
    for start in range(0, len(groups), world_size):
        step = groups[start : start + world_size]
        forward = (start // world_size) % 2 == 0
        for hand, item in zip(hands if forward else reversed(hands), step, strict=True):
            hand.append(item)
    return hands
