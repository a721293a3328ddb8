"""Make the batches of a training run. The sequences of global batch i depend only on (seed, epoch, i), and not on the plan.

So every plan trains on the same tokens in the same order, and losses can be compared. An epoch has all sequences once, in a new
permutation. Its last global batch has the remaining ones, and its loss is their mean, as in transformers' Trainer. Planning
needs numpy, but not torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from upshift.errors import RequestError
from upshift.training.batches.collate import MicroBatch, fill_micro_batch
from upshift.training.batches.layout import Layout, RowGroup, lay_out
from upshift.training.batches.objective import Objective
from upshift.training.data.tokens import Sequences
from upshift.value import Value

LOOK_AHEAD_SEQUENCES = 2**14  # laying out this many takes about a tenth of a second


def count_batches(num_sequences: int, global_batch: int) -> int:
    """Return the number of global batches of an epoch. The last one may be smaller."""
    return -(-num_sequences // global_batch)


def count_steps(epochs: float, *, num_sequences: int, global_batch: int) -> int:
    """Return the optimizer steps of these epochs, at least 1, rounded up as in transformers' Trainer."""
    return max(math.ceil(epochs * count_batches(num_sequences, global_batch)), 1)


class Position(Value):
    """The position of a run in its data: the next global batch. Checkpoints store it."""

    epoch: Annotated[int, Field(ge=0)] = 0
    batch: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalBatch:
    """The batch of one optimizer step, as one rank computes it."""

    position: Position
    next_position: Position
    micro_batches: tuple[MicroBatch, ...]  # this rank's micro-batches
    sequence_ids: NDArray[np.int64]  # of all ranks
    num_label_tokens: int  # of all ranks; the sum of token losses is divided by it
    num_tokens: int  # of all ranks, without padding
    mean_answer_tokens: float = 1.0  # of all ranks: the mean number of labels of a chosen answer

    @property
    def num_padded_tokens(self) -> int:
        """Return the tokens that this rank computes, padding included."""
        return sum(micro_batch.num_padded_tokens for micro_batch in self.micro_batches)

    @property
    def has_pairs(self) -> bool:
        """Return whether the loss compares pairs of sequences."""
        return any(micro_batch.has_pairs for micro_batch in self.micro_batches)

    @property
    def has_ratings(self) -> bool:
        """Return whether the loss is of answers that are rated one by one."""
        return any(micro_batch.ratings is not None for micro_batch in self.micro_batches)


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchSource:
    """The batches of one rank, and all inputs that decide them."""

    sequences: Sequences
    global_batch: int  # sequences per optimizer step, over all ranks
    layout: Layout
    objective: Objective = Objective()
    seed: int = 0

    def __post_init__(self) -> None:
        check_layout(self.layout, self.objective)
        if self.global_batch < 1:
            raise RequestError(f"global_batch={self.global_batch} sequences is too few; use 1 or more")
        check_enough_data(self.sequences, self.global_batch, self.objective)

    @property
    def batches_per_epoch(self) -> int:
        return count_batches(len(self.sequences), self.global_batch)

    def position_of_step(self, step: int) -> Position:
        """Return the position before an optimizer step. Steps are counted from 0 over all epochs."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        return Position(epoch=epoch, batch=batch)

    def batches(self, position: Position | None = None) -> Iterator[GlobalBatch]:
        """Yield batches without end, starting at ``position``. The caller decides when to stop."""
        position = self._check_position(position or Position())
        epoch = -1
        order = np.empty(0, np.int64)
        while True:
            if position.epoch != epoch:
                epoch = position.epoch
                order = self.epoch_order(position.epoch)
            yield self._build(position, order)
            position = self._next_position(position)

    def sequence_ids(self, position: Position) -> NDArray[np.int64]:
        """Return the sequences of one global batch, in the order of the epoch."""
        return self.members(self._check_position(position), self.epoch_order(position.epoch))

    def _build(self, position: Position, order: NDArray[np.int64]) -> GlobalBatch:
        ids = self.members(position, order)
        return build_global_batch(self, ids, position=position, next_position=self._next_position(position))

    def members(self, position: Position, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sequences of one global batch. ``order`` is that of its epoch."""
        return order[position.batch * self.global_batch : (position.batch + 1) * self.global_batch]

    def epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of all sequences in an epoch. The sequences of a pair follow each other."""
        together = self.objective.rows_together
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.sequences) // together)
        return np.asarray((order[:, None] * together + np.arange(together)).reshape(-1), np.int64)

    def _next_position(self, position: Position) -> Position:
        if position.batch + 1 < self.batches_per_epoch:
            return Position(epoch=position.epoch, batch=position.batch + 1)
        return Position(epoch=position.epoch + 1, batch=0)

    def _check_position(self, position: Position) -> Position:
        if position.batch >= self.batches_per_epoch:
            raise RequestError(
                f"position batch={position.batch} is past the {self.batches_per_epoch} global batches of an epoch; "
                "resume with the data, sequence_length and global batch that the run was started with"
            )
        return position


def check_enough_data(sequences: Sequences, global_batch: int, objective: Objective) -> None:
    """Raise RequestError if the data has fewer sequences than one global batch."""
    if len(sequences) >= global_batch:
        return
    together = objective.rows_together
    count = len(sequences) // together
    kind = "pairs of sequences" if objective.examples == "pairs" else objective.examples
    raise RequestError(
        f"the data has {count} {kind} of up to {sequences.sequence_length} tokens, one global batch takes "
        f"{global_batch // together}; use a global batch of at most {count} (--global-batch {count}), or more data"
    )


def check_layout(layout: Layout, objective: Objective) -> None:
    """Raise RequestError if the layout changes the results of the objective."""
    if objective.kind == "causal-lm":
        return
    if layout.packing:
        raise RequestError(
            f"packing=True is for causal-lm, not {objective.kind}: attention would cross borders; use packing=False"
        )
    if not layout.mask_padding:
        raise RequestError(
            f"mask_padding=False changes the result of {objective.kind}: only causal attention never looks at "
            "right padding; use mask_padding=True"
        )


def build_global_batch(
    source: BatchSource, sequence_ids: NDArray[np.int64], *, position: Position, next_position: Position
) -> GlobalBatch:
    """Return the global batch of these sequences, with the micro-batches of the source's rank."""
    sequences = source.sequences
    objective = source.objective
    groups = _row_groups(source, sequence_ids)
    micro_batches = tuple(
        fill_micro_batch(group, sequences, source.layout, objective, seed=source.seed, epoch=position.epoch) for group in groups
    )
    if source.layout.world_size == 1:
        num_label_tokens = sum(micro_batch.num_label_tokens for micro_batch in micro_batches)
    else:
        num_label_tokens = objective.num_labels(sequences, sequence_ids, seed=source.seed, epoch=position.epoch)
    return GlobalBatch(
        position=position,
        next_position=next_position,
        micro_batches=micro_batches,
        sequence_ids=sequence_ids,
        num_label_tokens=num_label_tokens,
        num_tokens=int(sequences.lengths[sequence_ids].sum()),
        mean_answer_tokens=objective.mean_answer_tokens(sequences, sequence_ids),
    )


def evaluation_batches(
    sequences: Sequences, *, global_batch: int, layout: Layout, objective: Objective | None = None, seed: int = 0
) -> Iterator[GlobalBatch]:
    """Yield global batches that have every sequence once, in order. The last one may be smaller."""
    source = BatchSource(
        sequences=sequences,
        global_batch=min(global_batch, max(1, len(sequences))),
        layout=layout,
        objective=objective or Objective(),
        seed=seed,
    )
    for batch, start in enumerate(range(0, len(sequences), source.global_batch)):
        ids = np.arange(start, min(start + source.global_batch, len(sequences)))
        yield build_global_batch(source, ids, position=Position(batch=batch), next_position=Position(batch=batch + 1))


@dataclass(frozen=True, kw_only=True)
class UpcomingSizes:
    """The sizes of the next global batches of a run, computed from the lengths of their sequences."""

    steps: int  # number of steps that were looked at
    longest_step: int  # the one of them, from 0, whose micro-batches hold most tokens at once
    longest_tokens: int  # of its largest micro-batch, padding included
    num_tokens: float  # mean of a step, of all ranks, without padding
    num_padded_tokens: float  # mean of a step, of the rank that has most


def look_ahead(source: BatchSource, *, num_steps: int, first_step: int = 0) -> UpcomingSizes:
    """Lay out ``num_steps`` global batches, or the first ``LOOK_AHEAD_SEQUENCES`` sequences of them. Fill no batch."""
    steps = min(num_steps, max(LOOK_AHEAD_SEQUENCES // source.global_batch, 1))
    longest = (0, 0)
    longest_step = 0
    num_tokens = 0
    num_padded_tokens = 0
    epoch = -1
    order = np.empty(0, np.int64)
    for step in range(steps):
        position = source.position_of_step(first_step + step)
        if position.epoch != epoch:
            epoch = position.epoch
            order = source.epoch_order(position.epoch)
        lengths = source.sequences.lengths[source.members(position, order)].tolist()
        ranks = lay_out(lengths, source.layout, sequence_length=source.sequences.sequence_length)
        sizes = [sorted((group.num_padded_tokens for group in groups), reverse=True) for groups in ranks]
        num_tokens += sum(lengths)
        num_padded_tokens += max(map(sum, sizes))
        # The two largest micro-batches of a rank: gradients exist while the second one runs.
        largest = max((rank_sizes[0], rank_sizes[1] if len(rank_sizes) > 1 else 0) for rank_sizes in sizes)
        if largest > longest:
            longest = largest
            longest_step = step
    return UpcomingSizes(
        steps=steps,
        longest_step=longest_step,
        longest_tokens=longest[0],
        num_tokens=num_tokens / steps,
        num_padded_tokens=num_padded_tokens / steps,
    )


def synthetic_batch(layout: Layout, *, sequence_length: int, vocab_size: int, objective: Objective | None = None) -> MicroBatch:
    """Return a full-length micro-batch of random tokens. With packing, each row holds two sequences."""
    objective = objective or Objective()
    check_layout(layout, objective)
    tokens = np.random.default_rng(0).integers(0, vocab_size, layout.micro_batch * sequence_length).astype(np.int32)
    row_lengths = [sequence_length]
    if layout.packing and sequence_length >= 4:
        row_lengths = [sequence_length // 2, sequence_length - sequence_length // 2]
    lengths = np.array(row_lengths * layout.micro_batch, np.int64)
    ratings = np.ones(len(lengths), np.bool_) if objective.has_ratings else None
    sequences = Sequences(
        tokens=tokens, starts=np.cumsum(lengths) - lengths, lengths=lengths, sequence_length=sequence_length, ratings=ratings
    )
    per_row = len(row_lengths)  # sequences
    rows = tuple(tuple(range(row * per_row, (row + 1) * per_row)) for row in range(layout.micro_batch))
    return fill_micro_batch(RowGroup(rows, sequence_length), sequences, layout, objective, seed=0, epoch=0)


def _row_groups(source: BatchSource, sequence_ids: NDArray[np.int64]) -> list[RowGroup]:
    """Return this rank's row groups. Their rows hold ids of the whole corpus."""
    lengths = source.sequences.lengths[sequence_ids].tolist()
    groups = lay_out(lengths, source.layout, sequence_length=source.sequences.sequence_length)[source.layout.rank]
    ids = sequence_ids.tolist()
    with_ids = []
    for group in groups:
        rows = tuple(tuple(ids[index] for index in row) for row in group.rows)
        with_ids.append(RowGroup(rows, group.width))
    return with_ids
