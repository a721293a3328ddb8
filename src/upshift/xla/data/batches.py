"""Plan the widths that batches are padded to, and make global batches of these widths.

Few widths are good because each one is a program to compile. Many widths are good because padding costs as much as tokens. The
planned widths are those with the least cost over the run, counted in steps of the full width, for the lengths of the data.
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

MULTIPLE = 32  # widths are multiples of it: a TPU's vector unit has tiles of 8 x 128, and the TPU guide says 32 or 64
MAX_BUCKETS = 8
COMPILE_STEPS = 20.0  # the cost of a compilation in steps: 6.8 s against 0.30 s (30 M parameters, one CPU core)
SAMPLE_BATCHES = 512  # batches drawn to estimate how wide batches are
IGNORED = -100  # the label that no loss is computed for
Arrays = Mapping[str, NDArray[Any]]


class Buckets(Value):
    """Hold the planned widths in rising order. No batch may be wider than the last one.

    ``padded_share``: the expected share of padding among the computed tokens."""

    widths: tuple[int, ...]
    padded_share: float

    def width_of(self, length: int) -> int:
        """Return the narrowest width that holds the length."""
        return self.widths[bisect_left(self.widths, length)]


def plan_buckets(
    lengths: Sequence[int], counts: Sequence[int], *, longest: int, batch_size: int, num_steps: int, multiple: int = MULTIPLE
) -> Buckets:
    """Return the planned widths. A batch gets the narrowest width that holds its longest sequence.

    ``lengths`` and ``counts``: how many sequences of each length the data has. ``longest``: the length that must fit."""
    drawn = random.Random(0).choices(lengths, weights=counts, k=SAMPLE_BATCHES * batch_size)
    batches = [drawn[start : start + batch_size] for start in range(0, len(drawn), batch_size)]
    needed = sorted(max(batch) for batch in batches)
    widest = _round_up(longest, multiple)
    candidates = sorted({min(_round_up(length, multiple), widest) for length in (*needed, longest)})
    widths = _cheapest_widths(candidates, needed, num_steps)
    computed = sum(widths[bisect_left(widths, max(batch))] * batch_size for batch in batches)
    return Buckets(widths=tuple(widths), padded_share=1 - sum(drawn) / computed)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _cheapest_widths(candidates: list[int], needed: list[int], num_steps: int) -> list[int]:
    """Return the cheapest choice of at most MAX_BUCKETS widths that includes the last candidate.

    This is dynamic programming over the candidates: the best choice that ends with a width extends a best choice that ends with
    a narrower one. ``needed``: the lengths of the sampled batches, sorted."""
    full = candidates[-1]
    num_held = [bisect_left(needed, width + 1) for width in candidates]  # batches that fit into each width

    def cost(width: int, first: int, last: int) -> float:
        return COMPILE_STEPS + (last - first) / len(needed) * num_steps * width / full

    best: dict[tuple[int, int], tuple[float, list[int]]] = {}  # (index of the last width, number of widths): cost, widths
    for index, width in enumerate(candidates):
        best[index, 1] = cost(width, 0, num_held[index]), [width]
        for count in range(2, MAX_BUCKETS + 1):
            choices = [
                (best[previous, count - 1][0] + cost(width, num_held[previous], num_held[index]), best[previous, count - 1][1])
                for previous in range(index)
                if (previous, count - 1) in best
            ]
            if choices:
                total, widths = min(choices)
                best[index, count] = total, [*widths, width]
    last = len(candidates) - 1
    return min(best[last, count] for count in range(1, MAX_BUCKETS + 1) if (last, count) in best)[1]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Hold the source of a run's global batches. The same step always gives the same batch.

    ``start``: a function from the number of an optimizer step to an endless iterator of batches, from that step on."""

    start: Callable[[int], Iterator[Arrays]]
    global_batch: int
    buckets: Buckets
    pad_token_id: int = 0
    num_examples: int | None = None
    evaluation: Callable[[], Iterable[Arrays]] | None = None  # held-out batches, each row once; the last may have fewer rows
    identity: str = ""  # identifies the training data, because a run may be resumed with the same data only

    def from_step(self, step: int) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield padded batches of global_batch rows, from an optimizer step on."""
        for arrays in self.start(step):
            yield self._filled(self.padded(arrays))

    def held_out(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the padded held-out batches, of global_batch rows each."""
        assert self.evaluation is not None
        for arrays in self.evaluation():
            yield self._filled(self.padded(arrays))

    def _filled(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Add rows without labels to a batch with fewer than global_batch rows, because programs have one shape."""
        missing = self.global_batch - len(batch["labels"])
        if not missing:
            return batch
        if batch["labels"].ndim != 2:
            raise RequestError(f"a batch has {len(batch['labels'])} rows; give {self.global_batch} in each")
        filled = {name: np.concatenate([value, np.repeat(value[-1:], missing, axis=0)]) for name, value in batch.items()}
        filled["labels"][-missing:] = IGNORED
        return filled

    def padded(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Pad a batch to its bucket. Raise RequestError for a row that is longer than the widest bucket."""
        padded = dict(arrays)
        rows = [value for value in padded.values() if value.ndim == 2]
        longest = max(value.shape[1] for value in rows) if rows else 0
        if longest > self.buckets.widths[-1]:
            widest = self.buckets.widths[-1]
            raise RequestError(f"a row has {longest} tokens, the widest planned shape {widest}; plan for this data")
        if "input_ids" in padded and "attention_mask" not in padded:
            padded["attention_mask"] = np.ones_like(padded["input_ids"])
        width = self.buckets.width_of(longest)
        fills = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return {name: _widen(value, width, fills.get(name, 0)) for name, value in padded.items()}


def _widen(value: NDArray[Any], width: int, fill: int) -> NDArray[Any]:
    if value.ndim != 2 or value.shape[1] == width:
        return value
    return np.pad(value, [(0, 0), (0, width - value.shape[1])], constant_values=fill)
