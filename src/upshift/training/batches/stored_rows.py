"""Store collated batches in a file for trials: another process cuts the same rows by its plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save_file

from upshift.loading.header import read_header
from upshift.loading.tensors import read_tensor
from upshift.planning.plan import Plan
from upshift.training.batches.collated import Batch, CollatedRows
from upshift.training.batches.cut import cut_rows, micro_batch_of
from upshift.training.batches.source import GlobalBatch, Position
from upshift.value import Value

NAME = "rows.safetensors"


class StoredRows(Value):
    """The ways in which the rows of the file may be cut."""

    encoder_decoder: bool
    shifts_labels: bool
    unit: Literal["items", "labels", "rows"]
    trims: bool
    drops_mask: bool


def write_rows(folder: Path, batches: list[Batch], how: StoredRows) -> Path:
    tensors = {
        f"{number}.{name}": value.contiguous()
        for number, batch in enumerate(batches)
        for name, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    path = folder / NAME
    save_file(tensors, path, metadata={"how": how.to_json()})
    return path


def read_rows(path: Path) -> tuple[CollatedRows, StoredRows]:
    header = read_header(path)
    how = StoredRows.from_json(header.metadata["how"], origin=str(path))
    batches: dict[int, dict[str, torch.Tensor]] = {}
    for stored in header.tensors:
        number, _, name = stored.name.partition(".")
        batches.setdefault(int(number), {})[name] = read_tensor(stored)
    ordered = [batches[number] for number in sorted(batches)]
    return CollatedRows(ordered, encoder_decoder=how.encoder_decoder, shifts_labels=how.shifts_labels), how


def cut_stored(rows: CollatedRows, how: StoredRows, plan: Plan, members: Sequence[int]) -> GlobalBatch:
    """Return one global batch of some of the rows, cut by the plan."""
    classes = [list(members)] if rows.can_mix else _by_batch(rows, members)
    groups = cut_rows(rows, plan, classes=classes, trims=how.trims)
    by_rows = how.unit == "rows"
    parts = tuple(micro_batch_of(rows, group, plan=plan, drops_mask=how.drops_mask, by_rows=by_rows) for group in groups)
    return GlobalBatch(
        position=Position(),
        next_position=Position(),
        micro_batches=parts,
        sequence_ids=np.array(list(members), np.int64),
        num_label_tokens=sum(part.num_label_tokens for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
    )


def _by_batch(rows: CollatedRows, members: Sequence[int]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for row in members:
        found.setdefault(rows.places[row][0], []).append(row)
    return list(found.values())
