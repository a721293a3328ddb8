"""Make global batches of planned shapes: rows as they come from the data, widened to the bucket that holds the
longest.

Plan the widths that batches are padded to. Few are good, as each one is a program to compile. Many are good, as
padding is computed like tokens.

The widths come from the lengths of the data: those with the least cost over the run, counted in steps of full width.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upshift.errors import RequestError
from upshift.value import Value

MULTIPLE = 32  # of widths: whole tiles of a TPU's vector unit are 8 x 128, and the guide's rule is 32 or 64
MAX_BUCKETS = 8
COMPILE_STEPS = 20.0  # a compilation costs as much as so many steps: 6.8 s against 0.30 s (30 M parameters, one CPU core)
SAMPLE_BATCHES = 512


class Buckets(Value):
    """The planned widths. ``widths`` rise, and the last is the longest that a batch may have. ``padded_share`` is the
    expected share of padding among the computed tokens."""

    widths: tuple[int, ...]
    padded_share: float

    def width_of(self, length: int) -> int:
        """Return the narrowest width that holds the length."""
        return self.widths[bisect_left(self.widths, length)]


def plan_buckets(
    lengths: Sequence[int], counts: Sequence[int], *, longest: int, batch_size: int, num_steps: int, multiple: int = MULTIPLE
) -> Buckets:
    """Return the planned widths. ``lengths`` with their ``counts`` are those of the data's sequences. A batch is as
    wide as its longest sequence needs."""
    drawn = random.Random(0).choices(lengths, weights=counts, k=SAMPLE_BATCHES * batch_size)
    batches = [drawn[start : start + batch_size] for start in range(0, len(drawn), batch_size)]
    needed = sorted(max(batch) for batch in batches)
    candidates = sorted({min(_up(length, multiple), _up(longest, multiple)) for length in (*needed, longest)})
    widths = _cheapest(candidates, needed, num_steps)
    computed = sum(widths[bisect_left(widths, max(batch))] * batch_size for batch in batches)
    return Buckets(widths=tuple(widths), padded_share=1 - sum(drawn) / computed)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _cheapest(candidates: list[int], needed: list[int], num_steps: int) -> list[int]:
    """Return the cheapest of all choices of at most MAX_BUCKETS widths that have the last one: a shortest path, width
    by width."""
    full = candidates[-1]
    below = [bisect_left(needed, width + 1) for width in candidates]  # batches that a width holds

    def cost(width: int, first: int, last: int) -> float:
        return COMPILE_STEPS + (last - first) / len(needed) * num_steps * width / full

    best: dict[tuple[int, int], tuple[float, list[int]]] = {}  # (last width, number of widths)
    for place, width in enumerate(candidates):
        best[place, 1] = cost(width, 0, below[place]), [width]
        for count in range(2, MAX_BUCKETS + 1):
            before = [
                (best[other, count - 1][0] + cost(width, below[other], below[place]), best[other, count - 1][1])
                for other in range(place)
                if (other, count - 1) in best
            ]
            if before:
                spent, widths = min(before)
                best[place, count] = spent, [*widths, width]
    last = len(candidates) - 1
    return min(best[last, count] for count in range(1, MAX_BUCKETS + 1) if (last, count) in best)[1]


IGNORED = -100
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Global batches. ``start`` yields them endlessly from an optimizer step on. The same step always gives the same
    batch."""

    start: Callable[[int], Iterator[Arrays]]
    global_batch: int
    buckets: Buckets
    pad_token_id: int = 0
    num_examples: int | None = None
    evaluation: Callable[[], Iterable[Arrays]] | None = None  # held-out batches, each row once; the last may be smaller
    identity: str = ""  # names the training data: a run goes on with the same data alone

    def from_step(self, step: int) -> Iterator[dict[str, NDArray[Any]]]:
        for arrays in self.start(step):
            yield self._filled(self.padded(arrays))

    def held_out(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield batches of global_batch rows each."""
        assert self.evaluation is not None
        for arrays in self.evaluation():
            yield self._filled(self.padded(arrays))

    def _filled(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Fill what the last batch of an epoch misses with rows that have no label, as programs have one shape."""
        missing = self.global_batch - len(batch["labels"])
        if not missing:
            return batch
        if batch["labels"].ndim != 2:
            raise RequestError(f"a batch has {len(batch['labels'])} rows; give {self.global_batch} in each")
        more = {name: np.concatenate([value, np.repeat(value[-1:], missing, axis=0)]) for name, value in batch.items()}
        more["labels"][-missing:] = IGNORED
        return more

    def padded(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Pad a batch to its bucket. Raise RequestError for a row that is longer than the widest bucket."""
        given = dict(arrays)
        rows = [value for value in given.values() if value.ndim == 2]
        longest = max(value.shape[1] for value in rows) if rows else 0
        if longest > self.buckets.widths[-1]:
            widest = self.buckets.widths[-1]
            raise RequestError(f"a row has {longest} tokens, the widest planned shape {widest}; plan for this data")
        if "input_ids" in given and "attention_mask" not in given:
            given["attention_mask"] = np.ones_like(given["input_ids"])
        width = self.buckets.width_of(longest)
        fills = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return {name: _widened(value, width, fills.get(name, 0)) for name, value in given.items()}


def _widened(value: NDArray[Any], width: int, fill: int) -> NDArray[Any]:
    if value.ndim != 2 or value.shape[1] == width:
        return value
    return np.pad(value, [(0, 0), (0, width - value.shape[1])], constant_values=fill)
