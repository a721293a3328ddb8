"""Make global batches of planned shapes: rows as they come from the data, widened to the bucket that holds the
longest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upshift.errors import RequestError
from upshift.xla.data.buckets import Buckets

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
