"""How long the sequences of a corpus are, and what padding or packing would make of them: the planner's view of the
data.

Standard library and pydantic only, so that planning needs no numpy. Estimates pack or pad a fixed random sample drawn
from the histogram; they ignore which lengths happen to meet in one real global batch.
"""

from __future__ import annotations

import random
from functools import cached_property

from pydantic import model_validator

from upshift.errors import RequestError
from upshift.planning.packing import pack_rows, round_up
from upshift.value import Value

SAMPLE_SEQUENCES = 1024
MAX_BUCKETS = 1024


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

    @property
    def num_sequences(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.num_tokens / self.num_sequences

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    def packed_rows_per_sequence(self, *, global_batch: int = 64) -> float:
        """Rows of `sequence_length` tokens needed, over sequences, when each global batch is packed on its own."""
        batches = self._sample(global_batch)
        rows = sum(len(pack_rows(batch, capacity=self.sequence_length)) for batch in batches)
        return rows / sum(len(batch) for batch in batches)

    def packed_tokens_ratio(self, *, global_batch: int = 64) -> float:
        """Computed over real tokens when packed; 1.0 is no waste."""
        batches = self._sample(global_batch)
        rows = sum(len(pack_rows(batch, capacity=self.sequence_length)) for batch in batches)
        return rows * self.sequence_length / sum(map(sum, batches))

    def padded_tokens_ratio(self, micro_batch: int, *, global_batch: int = 64, pad_multiple: int = 8) -> float:
        """Computed over real tokens when padded and sorted by length in each global batch; 1.0 is no waste."""
        batches = self._sample(global_batch)
        padded = 0
        for batch in batches:
            longest_first = sorted(batch, reverse=True)
            for start in range(0, len(batch), micro_batch):
                width = min(round_up(longest_first[start], pad_multiple), self.sequence_length)
                padded += width * len(longest_first[start : start + micro_batch])
        return padded / sum(map(sum, batches))

    def _sample(self, global_batch: int) -> list[list[int]]:
        num_batches = max(1, SAMPLE_SEQUENCES // global_batch)
        size = num_batches * global_batch
        drawn = random.Random(0).choices(self.lengths, cum_weights=self._cumulative_counts, k=size)
        return [drawn[i : i + global_batch] for i in range(0, len(drawn), global_batch)]

    @cached_property
    def _cumulative_counts(self) -> list[int]:
        total, cumulative = 0, []
        for count in self.counts:
            total += count
            cumulative.append(total)
        return cumulative
