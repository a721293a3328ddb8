"""Running out of memory: how it is recognised, and how a micro-batch becomes two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from upshift.training.batches.fill import MicroBatch
from upshift.training.batches.objective import IGNORED

COLUMNS = ("input_ids", "labels", "position_ids", "attention_mask")


def is_out_of_memory(error: BaseException) -> bool:
    """torch has no type for the CPU allocator's refusal; its own words are fixed in c10/core/CPUAllocator.cpp."""
    typed = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return typed or (isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error))


def halve(micro_batch: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
    """Two halves that hold the same labels: of its rows, or of one long row where a sequence begins. None: indivisible."""
    rows = len(micro_batch.input_ids)
    if rows > 1:
        middle = (rows + 1) // 2
        return _part(micro_batch, slice(None, middle), slice(None)), _part(micro_batch, slice(middle, None), slice(None))
    starts = _starts(micro_batch.position_ids)
    if not len(starts):
        return None
    cut = int(starts[np.abs(starts - micro_batch.input_ids.shape[1] / 2).argmin()])
    return _part(micro_batch, slice(None), slice(None, cut)), _part(micro_batch, slice(None), slice(cut, None))


def _starts(position_ids: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Where sequences after the first begin in a row of several."""
    if position_ids is None:
        return np.empty(0, np.int64)
    return np.flatnonzero(position_ids[0, 1:] == 0) + 1


def _part(micro_batch: MicroBatch, rows: slice, columns: slice) -> MicroBatch:
    arrays = {name: getattr(micro_batch, name) for name in COLUMNS}
    cut = {name: None if array is None else array[rows, columns] for name, array in arrays.items()}
    labels = int(np.count_nonzero(cut["labels"] != IGNORED))
    share = labels / max(micro_batch.num_label_tokens, 1)
    return replace(
        micro_batch,
        **cut,
        sequence_ids=micro_batch.sequence_ids[:0],  # of the whole micro-batch they were known
        num_label_tokens=labels,
        num_tokens=round(micro_batch.num_tokens * share),
    )
