"""Describe how long the sequences of a corpus are, and estimate how many tokens padding or packing computes.

Only the standard library and pydantic are used, so that planning needs no numpy. Estimates pack or pad a fixed random sample
drawn from the histogram. They ignore which lengths happen to meet in one real global batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, TypeVar

from pydantic import model_validator

from upshift.errors import RequestError
from upshift.planning.packing import pack_rows, round_up, spread_rows
from upshift.value import Value

SAMPLE_SEQUENCES = 1024
MAX_BUCKETS = 1024
Known = TypeVar("Known")


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
            whole, rest = divmod(length, sequence_length)
            counts[sequence_length] += whole
            counts[rest] += rest >= 2
        exact = {length: count for length, count in counts.items() if count}
        if not exact:
            raise RequestError("the data has no sequence of two or more tokens; give more text")
        bucket, rounded = -(-sequence_length // MAX_BUCKETS), Counter[int]()
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

    def packed_rows_per_sequence(self, *, global_batch: int = 64) -> float:
        """Return the rows of `sequence_length` tokens needed, over sequences, when each global batch is packed on its own."""
        return self._over_sample("rows", global_batch, lambda batch: len(pack_rows(batch, capacity=self.sequence_length)), len)

    def flat_tokens_ratio(self, micro_batch: int, *, global_batch: int = 64, pad_multiple: int = 8, processes: int = 1) -> float:
        """Return computed over real tokens when each micro-batch is one row of up to micro_batch x sequence_length."""

        def ratio() -> float:
            rows = self._flat_rows(micro_batch, global_batch, processes)
            return sum(round_up(fill, pad_multiple) for fill in rows) / sum(rows)

        return self._remembered(("flat ratio", micro_batch, global_batch, processes, pad_multiple), ratio)

    def longest_flat_row(self, micro_batch: int, *, global_batch: int = 64, processes: int = 1) -> int:
        """Return the tokens of the longest of the sample's rows of up to micro_batch x sequence_length tokens."""
        key = ("longest", micro_batch, global_batch, processes)
        return self._remembered(key, lambda: max(self._flat_rows(micro_batch, global_batch, processes)))

    def _flat_rows(self, micro_batch: int, global_batch: int, processes: int) -> list[int]:
        """Return the tokens of each flattened row of the sample's global batches."""

        def spread() -> list[int]:
            how = {"capacity": micro_batch * self.sequence_length, "multiple": processes}
            return [sum(batch[i] for i in row) for batch in self._sample(global_batch) for row in spread_rows(batch, **how)]

        return self._remembered(("flat", micro_batch, global_batch, processes), spread)

    def visible_share(self, block: int) -> float:
        """Return the keys that a query sees, over sequence_length, if causal attention works in blocks of ``block`` queries."""
        seen = sum(
            count * length * min(length / 2 + block, self.sequence_length)
            for length, count in zip(self.lengths, self.counts, strict=True)
        )
        return seen / (self.sequence_length * sum(n * c for n, c in zip(self.lengths, self.counts, strict=True)))

    def padded_tokens_ratio(self, micro_batch: int, *, global_batch: int = 64, pad_multiple: int = 8) -> float:
        """Return computed over real tokens when padded and sorted by length in each global batch; 1.0 is no waste."""

        def computed(batch: list[int]) -> int:
            longest_first, padded = sorted(batch, reverse=True), 0
            for start in range(0, len(batch), micro_batch):
                width = min(round_up(longest_first[start], pad_multiple), self.sequence_length)
                padded += width * len(longest_first[start : start + micro_batch])
            return padded

        return self._over_sample(("padded", micro_batch, pad_multiple), global_batch, computed, sum)

    def _over_sample(
        self, name: object, global_batch: int, above: Callable[[list[int]], int], below: Callable[[list[int]], int]
    ) -> float:
        """Return a ratio of two sums over the sample's global batches."""

        def ratio() -> float:
            batches = self._sample(global_batch)
            return sum(map(above, batches)) / sum(map(below, batches))

        return self._remembered((name, global_batch), ratio)

    def _remembered(self, key: object, compute: Callable[[], Known]) -> Known:
        """Return the value of ``key``, computed once: thousands of plans ask for the same few."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]  # type: ignore[no-any-return]

    @cached_property
    def _known(self) -> dict[object, Any]:
        return {}

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
