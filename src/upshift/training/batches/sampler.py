"""Make the batches of a training run. The sequences of global batch i depend on (seed, epoch, i) alone, never on the plan.

So every plan trains on the same tokens in the same order, and losses compare. An epoch is a new permutation of all sequences,
each of them once. Its last global batch has those that are left, and its loss is their mean, as in transformers' Trainer.
Planning needs numpy, not torch.
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
from upshift.training.batches.collate import MicroBatch, fill
from upshift.training.batches.layout import Layout, RowGroup, lay_out
from upshift.training.batches.objective import Objective
from upshift.training.data.tokens import Sequences
from upshift.value import Value

LOOK_AHEAD_SEQUENCES = 2**14  # laying out so many takes about a tenth of a second


def batches_of_epoch(num_sequences: int, global_batch: int) -> int:
    """Return the number of global batches in which every sequence is once. The last may be smaller."""
    return -(-num_sequences // global_batch)


def steps_of(epochs: float, *, num_sequences: int, global_batch: int) -> int:
    """Return the optimizer steps of so many epochs, rounded up as transformers' Trainer does, at least 1."""
    return max(math.ceil(epochs * batches_of_epoch(num_sequences, global_batch)), 1)


class Position(Value):
    """The place of a run in the data: the global batch that comes next. Checkpoints store it."""

    epoch: Annotated[int, Field(ge=0)] = 0
    batch: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalBatch:
    position: Position
    next_position: Position
    micro_batches: tuple[MicroBatch, ...]  # of this rank
    sequence_ids: NDArray[np.int64]  # of all ranks
    num_label_tokens: int  # of all ranks: the sum of token losses is divided by this
    num_tokens: int  # of all ranks, without padding


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchSource:
    """All inputs that decide the batches of one rank."""

    sequences: Sequences
    global_batch: int  # sequences per optimizer step, over all ranks
    layout: Layout
    objective: Objective = Objective()
    seed: int = 0

    def __post_init__(self) -> None:
        check_layout(self.layout, self.objective)
        if self.global_batch < 1:
            raise RequestError(f"global_batch={self.global_batch} sequences is too few; use 1 or more")
        if len(self.sequences) < self.global_batch:
            raise RequestError(
                f"the data has {len(self.sequences)} sequences of up to {self.sequences.sequence_length} tokens, "
                f"one global batch takes {self.global_batch}; use a smaller global batch or more data"
            )

    @property
    def batches_per_epoch(self) -> int:
        return batches_of_epoch(len(self.sequences), self.global_batch)

    def position_of_step(self, step: int) -> Position:
        """Return the position before optimizer step `step`, counted from 0 over all epochs."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        return Position(epoch=epoch, batch=batch)

    def batches(self, position: Position | None = None) -> Iterator[GlobalBatch]:
        """Yield batches without end, from `position` on. The caller decides when to stop."""
        position = self._checked(position or Position())
        epoch = -1
        order = np.empty(0, np.int64)
        while True:
            if position.epoch != epoch:
                epoch = position.epoch
                order = self._order(position.epoch)
            yield self._build(position, order)
            position = self._following(position)

    def sequence_ids(self, position: Position) -> NDArray[np.int64]:
        """Return the sequences of one global batch, in the order of the epoch."""
        return self._members(self._checked(position), self._order(position.epoch))

    def _build(self, position: Position, order: NDArray[np.int64]) -> GlobalBatch:
        ids = self._members(position, order)
        return build_global_batch(self, ids, position=position, next_position=self._following(position))

    def _members(self, position: Position, order: NDArray[np.int64]) -> NDArray[np.int64]:
        return order[position.batch * self.global_batch : (position.batch + 1) * self.global_batch]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.sequences))

    def _following(self, position: Position) -> Position:
        if position.batch + 1 < self.batches_per_epoch:
            return Position(epoch=position.epoch, batch=position.batch + 1)
        return Position(epoch=position.epoch + 1, batch=0)

    def _checked(self, position: Position) -> Position:
        if position.batch >= self.batches_per_epoch:
            raise RequestError(
                f"position batch={position.batch} is past the {self.batches_per_epoch} global batches of an epoch; "
                "resume with the data, sequence_length and global batch that the run was started with"
            )
        return position


def check_layout(layout: Layout, objective: Objective) -> None:
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
    sequences = source.sequences
    objective = source.objective
    groups = _row_groups(source, sequence_ids)
    micro_batches = tuple(
        fill(group, sequences, source.layout, objective, seed=source.seed, epoch=position.epoch) for group in groups
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
    )


def evaluation_batches(
    sequences: Sequences, *, global_batch: int, layout: Layout, objective: Objective | None = None, seed: int = 0
) -> Iterator[GlobalBatch]:
    """Yield batches with every sequence once, in order. The last global batch may be smaller."""
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
class Upcoming:
    """The sizes of the next global batches of a run, known from lengths alone."""

    steps: int  # how many were looked at
    longest_step: int  # of them, from 0: the one whose micro-batches hold most tokens at once
    longest_tokens: int  # of its largest micro-batch, padding included
    num_tokens: float  # of all ranks, without padding: mean of a step
    num_padded_tokens: float  # of the rank that has most: mean of a step


def look_ahead(source: BatchSource, *, num_steps: int, first_step: int = 0) -> Upcoming:
    """Lay out ``num_steps`` global batches, or as many of them as hold ``LOOK_AHEAD_SEQUENCES``, and fill none."""
    steps = min(num_steps, max(LOOK_AHEAD_SEQUENCES // source.global_batch, 1))
    longest = (0, 0)
    longest_step = 0
    real = 0
    padded = 0
    epoch = -1
    order = np.empty(0, np.int64)
    for step in range(steps):
        position = source.position_of_step(first_step + step)
        if position.epoch != epoch:
            epoch = position.epoch
            order = source._order(position.epoch)
        lengths = source.sequences.lengths[source._members(position, order)].tolist()
        ranks = lay_out(lengths, source.layout, sequence_length=source.sequences.sequence_length)
        sizes = [sorted((group.num_padded_tokens for group in groups), reverse=True) for groups in ranks]
        real += sum(lengths)
        padded += max(map(sum, sizes))
        # Two of them: gradients exist while the second one runs.
        most = max((one[0], one[1] if len(one) > 1 else 0) for one in sizes)
        if most > longest:
            longest = most
            longest_step = step
    return Upcoming(
        steps=steps, longest_step=longest_step, longest_tokens=longest[0], num_tokens=real / steps,
        num_padded_tokens=padded / steps,
    )  # fmt: skip


def synthetic_batch(layout: Layout, *, sequence_length: int, vocab_size: int, objective: Objective | None = None) -> MicroBatch:
    """Return a full-length micro-batch of random tokens. With packing, each row holds two sequences."""
    objective = objective or Objective()
    check_layout(layout, objective)
    tokens = np.random.default_rng(0).integers(0, vocab_size, layout.micro_batch * sequence_length).astype(np.int32)
    shared = layout.packing and sequence_length >= 4
    row_lengths = [sequence_length // 2, sequence_length - sequence_length // 2] if shared else [sequence_length]
    lengths = np.array(row_lengths * layout.micro_batch, np.int64)
    sequences = Sequences(tokens=tokens, starts=np.cumsum(lengths) - lengths, lengths=lengths, sequence_length=sequence_length)
    per_row = len(row_lengths)
    rows = tuple(tuple(range(row * per_row, (row + 1) * per_row)) for row in range(layout.micro_batch))
    return fill(RowGroup(rows, sequence_length), sequences, layout, objective, seed=0, epoch=0)


def _row_groups(source: BatchSource, sequence_ids: NDArray[np.int64]) -> list[RowGroup]:
    """Return this rank's row groups, with ids of the whole corpus."""
    lengths = source.sequences.lengths[sequence_ids].tolist()
    groups = lay_out(lengths, source.layout, sequence_length=source.sequences.sequence_length)[source.layout.rank]
    ids = sequence_ids.tolist()
    return [RowGroup(tuple(tuple(ids[i] for i in row) for row in group.rows), group.width) for group in groups]
