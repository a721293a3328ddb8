"""Recognize that memory ran out, and split a micro-batch into two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from upshift.training.batches.fill import MicroBatch
from upshift.training.data.columns import IGNORED

FEW_TOKENS = 8
# What else a RuntimeError says where memory ran out; torch has no type for these.
WORDS = (
    "DefaultCPUAllocator: can't allocate memory",  # c10/core/CPUAllocator.cpp
    "CUDA error: out of memory",  # the driver's, for a context, a graph or pinned memory
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED",
    "HIP error: out of memory", "HIPBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'",  # NCCL's, by version
)  # fmt: skip
Part = TypeVar("Part")
Result = TypeVar("Result")


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the allocator's refusal, which is the error or its cause, or None. torch's pipelines wrap an error of a stage."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, (MemoryError, torch.OutOfMemoryError)):
            return found
        if isinstance(found, RuntimeError) and any(words in str(found) for words in WORDS):
            return found
        found = found.__cause__
    return None


def is_out_of_memory(error: BaseException) -> bool:
    return find_out_of_memory(error) is not None


def halve(micro_batch: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
    """Return two halves that hold the same labels, or None if the micro-batch is indivisible.

    Its rows are halved, or one long row is cut at the beginning of a sequence.
    """
    if not micro_batch.splits:
        return None
    rows, width = micro_batch.shape
    if rows > 1:
        middle = (rows + 1) // 2
        return _part(micro_batch, slice(None, middle), slice(None)), _part(micro_batch, slice(middle, None), slice(None))
    starts = _starts(micro_batch.arrays.get("position_ids"))
    if not len(starts):
        return None
    cut = int(starts[np.abs(starts - width / 2).argmin()])
    return _part(micro_batch, slice(None), slice(None, cut)), _part(micro_batch, slice(None), slice(cut, None))


def _starts(position_ids: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the positions at which sequences after the first begin in a row of several."""
    if position_ids is None:
        return np.empty(0, np.int64)
    return np.flatnonzero(position_ids[0, 1:] == 0) + 1


def _part(micro_batch: MicroBatch, rows: slice, columns: slice) -> MicroBatch:
    every = columns == slice(None)
    cut = {name: array[rows] if every else array[rows, columns] for name, array in micro_batch.arrays.items()}
    labels = int(np.count_nonzero(cut["labels"] != IGNORED))
    share = labels / max(micro_batch.num_label_tokens, 1)
    return replace(
        micro_batch,
        arrays=cut,
        sequence_ids=micro_batch.sequence_ids[:0],  # of the whole micro-batch they were known
        num_label_tokens=labels,
        num_tokens=round(micro_batch.num_tokens * share),
    )


def fewest_tokens(micro_batch: MicroBatch) -> MicroBatch:
    """Return one short row of a micro-batch, for its shapes alone."""
    few = _part(micro_batch, slice(0, 1), slice(0, FEW_TOKENS))
    return replace(few, num_tokens=0)


def stand_in(micro_batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch without labels, for a rank that has fewer of them than others."""
    few = fewest_tokens(micro_batch)
    labels = np.full_like(few.arrays["labels"], IGNORED)
    return replace(few, arrays={**few.arrays, "labels": labels}, num_label_tokens=0)


class Agreed(MemoryError):
    """All ranks know that one of them ran out of memory. ``final`` says that its micro-batch cannot be halved."""

    def __init__(self, words: str, *, final: bool) -> None:
        super().__init__(words)
        self.final = final


class Halving(Generic[Part]):
    """A loop that does the work of a step in parts. When memory runs out, it starts again in smaller parts, and keeps them
    from then on.

    The weights have not moved, so the gradients of the global batch come out the same.
    """

    def __init__(
        self,
        *,
        halve: Callable[[Part], tuple[Part, Part] | None],
        size: Callable[[Part], int],
        restart: Callable[[], None],
        on_failure: Callable[[], None] = lambda: None,
        on_halved: Callable[[Part, Part, str], None],
        level: Callable[[list[Part]], list[Part]] = lambda parts: parts,
    ) -> None:
        """Set the callbacks.

        ``on_failure`` may look at memory as it failed. ``restart`` then drops what the try left. ``on_halved`` gets the
        largest part before and after, and the allocator's words. ``level`` returns halved parts as all ranks run them, as many
        on each.
        """
        self.count = 0
        self._level = level
        self._halve, self._size, self._restart, self._on_halved = halve, size, restart, on_halved
        self._on_failure = on_failure

    def run(self, parts: Sequence[Part], work: Callable[[list[Part]], Result]) -> Result:
        while True:
            now = self._cut(parts)
            try:
                return work(now)
            except (MemoryError, RuntimeError) as error:
                largest = max(now, key=self._size)
                if not is_out_of_memory(error) or self._is_final(error, largest):
                    raise
                refusal = str(error)
                if not isinstance(error, Agreed):
                    self._on_failure()
            # Here and not above: the exception held the tensors of the try that failed.
            self._restart()
            self.count += 1
            self._on_halved(largest, max(self._cut(parts), key=self._size), refusal)

    def _cut(self, parts: Sequence[Part]) -> list[Part]:
        cut = list(parts)
        for _ in range(self.count):
            cut = [half for part in cut for half in self._halve(part) or (part,)]
        return self._level(cut) if self.count else cut

    def _is_final(self, error: BaseException, largest: Part) -> bool:
        return error.final if isinstance(error, Agreed) else self._halve(largest) is None
