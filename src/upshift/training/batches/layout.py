"""Arrange the sequences of one global batch in rows and micro-batches, and decide which rank computes which.

The plan decides this. It does not decide which sequences are in the global batch, so every layout has the same loss and gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from upshift.errors import RequestError
from upshift.planning.plan import Plan
from upshift.planning.workload import RowsTogether, pack_rows, round_up, spread_rows
from upshift.training.batches.objective import Objective
from upshift.value import Value

Count = Annotated[int, Field(ge=1)]


class Layout(Value):
    """The plan's decisions about batches. They may change between two runs without changing what is learned."""

    micro_batch: Count  # rows per micro-batch
    packing: bool = False
    # With packing, a micro-batch is one row of up to micro_batch x sequence_length tokens. It has no padding, but it needs an
    # attention kernel whose work does not grow with the row.
    flatten: bool = False
    pad_multiple: Count = 8  # widths of micro-batches are multiples of it; packed rows are sequence_length wide unless flattened
    # False: no attention_mask for padding on the right. Causal attention ignores it, and its kernels are faster without.
    mask_padding: bool = True
    pads: bool = True  # False: padding changes the model's results, so a row is as wide as its text
    rows_together: RowsTogether = 1  # sequences that stay in one micro-batch; 2: sequences 2 i and 2 i + 1 are a pair
    rank: Annotated[int, Field(ge=0)] = 0  # the rank in the data-parallel group
    world_size: Count = 1

    @model_validator(mode="after")
    def _check(self) -> Layout:
        if self.rank >= self.world_size:
            raise RequestError(f"rank={self.rank} is not in world_size={self.world_size}; use 0 to {self.world_size - 1}")
        return self


def layout_for(plan: Plan, objective: Objective, *, data_rank: int = 0) -> Layout:
    """Return the layout for one data-parallel rank."""
    return Layout(
        micro_batch=plan.per_device_train_batch_size,
        packing=plan.packing,
        flatten=plan.flattens,
        pad_multiple=plan.pad_multiple,
        # Most causal models ignore padding on the right of a text, and so do their losses.
        mask_padding=objective.kind != "causal-lm" or objective.padding != "unmasked",
        pads=objective.padding != "none",
        rows_together=objective.rows_together,
        rank=data_rank,
        world_size=plan.data_parallel,
    )


class RowGroup(NamedTuple):
    """One micro-batch before it is filled: the indices of the sequences in each row.

    A group without rows is a stand-in without labels.
    """

    rows: tuple[tuple[int, ...], ...]
    width: int

    @property
    def num_padded_tokens(self) -> int:
        return max(1, len(self.rows)) * self.width

    @property
    def has_shared_rows(self) -> bool:
        return any(len(row) > 1 for row in self.rows)


def lay_out(lengths: Sequence[int], layout: Layout, *, sequence_length: int) -> list[list[RowGroup]]:
    """Return the row groups of every rank, longest first. Each rank gets equally many."""
    if layout.rows_together == 2:
        return _lay_out_pairs(lengths, layout, sequence_length)
    if layout.flatten:
        return _deal_to_ranks(_flat_rows(lengths, layout, sequence_length), layout.world_size)
    if layout.packing:
        rows = _packed_rows(lengths, layout, sequence_length)
    else:
        rows = [(index,) for index in sorted(range(len(lengths)), key=lambda index: -lengths[index])]
    size = layout.micro_batch

    def make_group(group_rows: Sequence[tuple[int, ...]]) -> RowGroup:
        if layout.packing:
            return RowGroup(tuple(group_rows), sequence_length)
        longest = max((lengths[row[0]] for row in group_rows), default=2)
        multiple = layout.pad_multiple if layout.pads else 1
        return RowGroup(tuple(group_rows), min(round_up(longest, multiple), sequence_length))

    runs = [rows] if layout.pads or layout.packing else _group_by_length(rows, lengths)
    groups = [make_group(run[start : start + size]) for run in runs for start in range(0, len(run), size)]
    while len(groups) % layout.world_size:
        largest = max(groups, key=lambda group: (len(group.rows) > 1, group.num_padded_tokens))
        if len(largest.rows) > 1:  # halve the largest group: that helps the slowest rank, while a stand-in would only wait
            groups.remove(largest)
            half = (len(largest.rows) + 1) // 2
            groups += [make_group(largest.rows[:half]), make_group(largest.rows[half:])]
        else:
            groups.append(make_group(()))
    return _deal_to_ranks(groups, layout.world_size)


def _lay_out_pairs(lengths: Sequence[int], layout: Layout, sequence_length: int) -> list[list[RowGroup]]:
    """Return the row groups of pairs, whose sequences follow each other. A pair is as wide as the longer one."""
    longer = [max(lengths[index], lengths[index + 1]) for index in range(0, len(lengths), 2)]
    of_pairs = layout.changed(rows_together=1, micro_batch=max(layout.micro_batch // 2, 1))
    ranks = []
    for groups in lay_out(longer, of_pairs, sequence_length=sequence_length):
        ranks.append([RowGroup(_rows_of_pairs(group), group.width) for group in groups])
    return ranks


def _rows_of_pairs(group: RowGroup) -> tuple[tuple[int, ...], ...]:
    """Return a row for each sequence of a group whose rows hold one pair each."""
    return tuple((2 * pair + answer,) for (pair,) in group.rows for answer in range(2))


def _group_by_length(rows: list[tuple[int, ...]], lengths: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Divide rows of one sequence each, which are sorted by length, into runs of equal length."""
    return [list(run) for _, run in groupby(rows, key=lambda row: lengths[row[0]])]


def _flat_rows(lengths: Sequence[int], layout: Layout, sequence_length: int) -> list[RowGroup]:
    """Return groups of one row each, in which the sequences lie end to end."""
    capacity = layout.micro_batch * sequence_length
    groups = []
    for row in spread_rows(lengths, capacity=capacity, multiple=layout.world_size):
        width = min(round_up(max(sum(lengths[index] for index in row), 2), layout.pad_multiple), capacity)
        groups.append(RowGroup((tuple(row),) if row else (), width))
    return groups


def _packed_rows(lengths: Sequence[int], layout: Layout, sequence_length: int) -> list[tuple[int, ...]]:
    """Return packed rows, those with one sequence first.

    Micro-batches of such rows need no position_ids, so they use the plain causal kernels. The last rows of one sequence share a
    micro-batch with other rows, so that there are no more micro-batches than needed.
    """
    rows = [tuple(row) for row in pack_rows(lengths, capacity=sequence_length)]
    single = [row for row in rows if len(row) == 1]
    return single + [row for row in rows if len(row) > 1]


def _deal_to_ranks(groups: list[RowGroup], world_size: int) -> list[list[RowGroup]]:
    """Distribute the micro-batches over ranks.

    Micro-batches that run at the same time have similar sizes, because ranks wait for each other. Totals are balanced.
    """
    if world_size == 1:
        return [groups]
    groups = sorted(groups, key=lambda group: -group.num_padded_tokens)
    ranks: list[list[RowGroup]] = [[] for _ in range(world_size)]
    for start in range(0, len(groups), world_size):
        simultaneous = groups[start : start + world_size]
        is_forward = (start // world_size) % 2 == 0
        for rank_groups, group in zip(ranks if is_forward else reversed(ranks), simultaneous, strict=True):
            rank_groups.append(group)
    return ranks
