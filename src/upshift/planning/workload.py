"""Pack sequences into rows, describe the lengths of a corpus, and define the workload that a plan is for.

Only the standard library and pydantic are used, so that planning needs no numpy.

Rows are packed by best fit, which keeps the guarantee of first fit: at most 11/9 of the optimum, plus one row. With whole-number
capacities it needs one bit scan for each sequence instead of a pass over all open rows, so 4,096 sequences take milliseconds.

How many tokens padding or packing computes is estimated on a fixed random sample drawn from the histogram of lengths. The
estimate ignores which lengths are in one real global batch.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from upshift.errors import RequestError
from upshift.planning.program import OWN, PROGRAMS, Program, ProgramName
from upshift.value import Value


def pack_rows(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return rows of indices into `lengths`; the lengths of a row sum to at most `capacity`. Ties keep their order."""
    rows: list[list[int]] = []
    rows_with_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set while some row has exactly r tokens of room
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms &= ~(1 << room)
            rows[row].append(index)
        else:
            room = capacity
            row = len(rows)
            rows.append([index])
        if room > length:
            rows_with_room.setdefault(room - length, []).append(row)
            rooms |= 1 << (room - length)
    return rows


def spread_rows(lengths: Sequence[int], *, capacity: int, multiple: int = 1) -> list[list[int]]:
    """Return about as few rows as hold the sequences, equally full: longest first, each into the emptiest row (Graham 1969).

    The number of rows is a multiple of ``multiple``, so that as many processes get equal numbers of rows. A row may be empty.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    more_than_half = sum(2 * length > capacity for length in lengths)  # no two of these sequences share a row
    count = round_up(max(-(-sum(lengths) // capacity), more_than_half, 1), multiple)
    while (rows := _spread(lengths, order, count, capacity)) is None:
        count += multiple
    return rows


def _spread(lengths: Sequence[int], order: list[int], count: int, capacity: int) -> list[list[int]] | None:
    """Return ``count`` rows, or None where a row overflows."""
    rows: list[list[int]] = [[] for _ in range(count)]
    fills = [(0, row) for row in range(count)]
    for index in order:
        fill, row = fills[0]
        if fill + lengths[index] > capacity:
            return None
        rows[row].append(index)
        heapq.heapreplace(fills, (fill + lengths[index], row))
    return rows


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not less than ``count``."""
    return -(-count // multiple) * multiple


SAMPLE_SEQUENCES = 1024
MAX_BUCKETS = 1024
T = TypeVar("T")


class LengthHistogram(Value):
    """Counts of sequence lengths. Above 1,024 tokens lengths are rounded up to buckets; `num_tokens` stays exact."""

    sequence_length: int
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    num_tokens: int

    @model_validator(mode="after")
    def _check(self) -> LengthHistogram:
        if len(self.lengths) != len(self.counts) or not self.counts:
            raise RequestError(
                f"a length histogram has {len(self.lengths)} lengths and {len(self.counts)} counts; "
                "give the same number of both, at least one"
            )
        return self

    @classmethod
    def of_documents(cls, documents: Iterable[int], sequence_length: int) -> LengthHistogram:
        """Return the histogram of documents with ``documents`` tokens each, cut as training cuts them.

        A last piece of a single token is dropped.
        """
        counts: Counter[int] = Counter()
        for length in documents:
            num_full, remainder = divmod(length, sequence_length)
            counts[sequence_length] += num_full
            counts[remainder] += remainder >= 2
        exact = {length: count for length, count in counts.items() if count}
        if not exact:
            raise RequestError("the data has no sequence of two or more tokens; give more text")
        bucket = -(-sequence_length // MAX_BUCKETS)
        rounded = Counter[int]()
        for length, count in exact.items():
            rounded[min(round_up(length, bucket), sequence_length)] += count
        lengths, numbers = zip(*sorted(rounded.items()), strict=True)
        num_tokens = sum(length * count for length, count in exact.items())
        return cls(sequence_length=sequence_length, lengths=lengths, counts=numbers, num_tokens=num_tokens)

    @property
    def num_sequences(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.num_tokens / self.num_sequences

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    def unless_full(self) -> LengthHistogram | None:
        """Return the histogram, or None if every sequence is full. Then there is nothing to pad or pack, and no mask."""
        return None if self.mean >= self.sequence_length else self

    def packed_rows_per_sequence(self, *, global_batch: int = 64) -> float:
        """Return the rows of `sequence_length` tokens needed, over sequences, when each global batch is packed on its own."""
        return self._over_sample("rows", global_batch, lambda batch: len(pack_rows(batch, capacity=self.sequence_length)), len)

    def flat_tokens_ratio(self, micro_batch: int, *, global_batch: int = 64, pad_multiple: int = 8, processes: int = 1) -> float:
        """Return computed over real tokens when each micro-batch is one row of up to micro_batch x sequence_length."""

        def ratio() -> float:
            rows = self._flat_rows(micro_batch, global_batch, processes)
            return sum(round_up(fill, pad_multiple) for fill in rows) / sum(rows)

        return self._get_or_compute(("flat ratio", micro_batch, global_batch, processes, pad_multiple), ratio)

    def num_flat_widths(self, micro_batch: int, *, global_batch: int = 64, pad_multiple: int = 8, processes: int = 1) -> int:
        """Return how many widths the sample's rows of up to micro_batch x sequence_length tokens have."""

        def count() -> int:
            return len({round_up(fill, pad_multiple) for fill in self._flat_rows(micro_batch, global_batch, processes)})

        return self._get_or_compute(("flat widths", micro_batch, global_batch, processes, pad_multiple), count)

    def longest_flat_row(self, micro_batch: int, *, global_batch: int = 64, processes: int = 1) -> int:
        """Return the tokens of the longest of the sample's rows of up to micro_batch x sequence_length tokens."""
        key = ("longest", micro_batch, global_batch, processes)
        return self._get_or_compute(key, lambda: max(self._flat_rows(micro_batch, global_batch, processes)))

    def _flat_rows(self, micro_batch: int, global_batch: int, processes: int) -> list[int]:
        """Return the tokens of each flattened row of the sample's global batches."""

        def spread() -> list[int]:
            capacity = micro_batch * self.sequence_length
            row_lengths = []
            for batch in self._sample(global_batch):
                for row in spread_rows(batch, capacity=capacity, multiple=processes):
                    row_lengths.append(sum(batch[index] for index in row))
            return row_lengths

        return self._get_or_compute(("flat", micro_batch, global_batch, processes), spread)

    def visible_share(self, block: int) -> float:
        """Return the share of sequence_length that a query sees, if causal attention computes blocks of ``block`` queries."""
        pairs = list(zip(self.lengths, self.counts, strict=True))
        num_visible = sum(count * length * min(length / 2 + block, self.sequence_length) for length, count in pairs)
        return num_visible / (self.sequence_length * sum(length * count for length, count in pairs))

    def padded_tokens_ratio(self, micro_batch: int, *, global_batch: int = 64, pad_multiple: int = 8) -> float:
        """Return computed over real tokens if each global batch is sorted by length and padded; 1.0 is no waste."""

        def computed(batch: list[int]) -> int:
            return sum(width * rows for width, rows in self._padded_micro_batches(batch, micro_batch, pad_multiple))

        return self._over_sample(("padded", micro_batch, pad_multiple), global_batch, computed, sum)

    def num_padded_widths(self, micro_batch: int, *, global_batch: int = 64, pad_multiple: int = 8) -> int:
        """Return how many widths the sample's micro-batches have if each global batch is sorted by length and padded."""

        def count() -> int:
            batches = self._sample(global_batch)
            sizes = (size for batch in batches for size in self._padded_micro_batches(batch, micro_batch, pad_multiple))
            return len({width for width, _ in sizes})

        return self._get_or_compute(("widths", micro_batch, pad_multiple, global_batch), count)

    def _padded_micro_batches(self, batch: list[int], micro_batch: int, pad_multiple: int) -> Iterator[tuple[int, int]]:
        """Yield the width and the number of rows of each micro-batch of a global batch."""
        longest_first = sorted(batch, reverse=True)
        for start in range(0, len(batch), micro_batch):
            width = min(round_up(longest_first[start], pad_multiple), self.sequence_length)
            yield width, len(longest_first[start : start + micro_batch])

    def _over_sample(
        self, name: object, global_batch: int, numerator: Callable[[list[int]], int], denominator: Callable[[list[int]], int]
    ) -> float:
        """Return a ratio of two sums over the sample's global batches."""

        def ratio() -> float:
            batches = self._sample(global_batch)
            return sum(map(numerator, batches)) / sum(map(denominator, batches))

        return self._get_or_compute((name, global_batch), ratio)

    def _get_or_compute(self, key: object, compute: Callable[[], T]) -> T:
        """Return the value of ``key``. It is computed once, because thousands of plans need the same few values."""
        if key not in self._cached_values:
            self._cached_values[key] = compute()
        return self._cached_values[key]  # type: ignore[no-any-return]

    @cached_property
    def _cached_values(self) -> dict[object, Any]:
        return {}

    def _sample(self, global_batch: int) -> list[list[int]]:
        num_batches = max(1, SAMPLE_SEQUENCES // global_batch)
        size = num_batches * global_batch
        drawn = random.Random(0).choices(self.lengths, cum_weights=self._cumulative_counts, k=size)
        return [drawn[i : i + global_batch] for i in range(0, len(drawn), global_batch)]

    @cached_property
    def _cumulative_counts(self) -> list[int]:
        total = 0
        cumulative = []
        for count in self.counts:
            total += count
            cumulative.append(total)
        return cumulative


RowsTogether = Literal[1, 2]
PAIR_OBJECTIVES = "--objective dpo, kto or reward"  # for messages


def forward_share(*, has_ratings: bool, has_kl_pass: bool, has_adapter: bool) -> float:
    """Return the computation of the forward pass of the reference as a share of a step with the same sequences.

    The backward pass has two products for each one of the forward pass, or one if the weights are frozen. KTO trains every second
    sequence, and computes the others once for its KL term. Without that term neither pass computes them.
    """
    of_trained = 2.0 if has_adapter else 3.0
    return (1.0 + has_kl_pass) / (of_trained + has_kl_pass) if has_ratings else 1.0 / of_trained


class Workload(Value):
    """A training job without its plan: batch, data, and what the user allows."""

    task: Literal["train"] = "train"
    sequence_length: int = Field(gt=0)
    global_batch: int = Field(gt=0, description="sequences per optimizer step; no plan changes it")
    rows_together: RowsTogether = Field(1, description="sequences that stay in one micro-batch: 2 for pairs of preferences")
    has_ratings: bool = Field(
        False, description="with rows_together=2, the second sequence has only a forward pass: the mismatched one of KTO"
    )
    has_kl_pass: bool = Field(True, description="with has_ratings: the second sequences are computed, for KTO's KL term")
    lengths: LengthHistogram | None = Field(None, description="of the data; None: every sequence is full")
    total_steps: int = Field(1000, gt=0, description="optimizer steps of the run; one-time costs are spread over them")
    clips_gradients: bool = Field(True, description="by their global norm, which needs all of them at once")
    risk: float | None = Field(None, gt=0, lt=0.5, description="accepted probability of running out; None: 5 % of memory is left")
    allow: tuple[str, ...] = Field((), description="choices that change the mathematics, allowed by the user")
    program: ProgramName = Field(OWN, description="the program that trains")

    @property
    def runs_in(self) -> Program:
        """Return what is known about the program that trains."""
        return PROGRAMS[self.program]

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence, rounded up as the histogram is."""
        return self.sequence_length if self.lengths is None else self.lengths.longest

    @property
    def num_trained(self) -> float:
        """Return the sequences of a step that have a backward pass."""
        return self.global_batch * self.trained_share

    @property
    def trained_share(self) -> float:
        """Return the share of the sequences of a micro-batch that have a backward pass: KTO trains every second one."""
        return 0.5 if self.has_ratings else 1.0

    @property
    def forward_passes(self) -> int:
        """Return how many sequences a step computes without a backward pass for each one that it trains."""
        return int(self.has_ratings and self.has_kl_pass)

    @property
    def num_units(self) -> int:
        """Return the parts of a global batch that ranks and micro-batches may divide: pairs, or sequences."""
        return self.global_batch // self.rows_together
