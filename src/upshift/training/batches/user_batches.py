"""Take batches that a user's collator made apart into rows, and put them together anew: trimmed, sorted, split, or laid end to
end.

The collator runs as it would without Upshift, so the random numbers that it draws are the same.

Decide by the plan which of a global batch's collated rows run together. The rows of the global batch stay the same.

Store collated batches in a file for trials: another process cuts the same rows by its plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from upshift.loading.files.safetensors_header import read_header
from upshift.loading.files.tensors import read_tensor
from upshift.planning.plan import Plan
from upshift.planning.workload import round_up
from upshift.training.batches.collate import MicroBatch
from upshift.training.batches.layout import Layout, RowGroup, lay_out
from upshift.training.batches.sampler import GlobalBatch, Position
from upshift.training.data.corpus import IGNORED
from upshift.value import Value

Batch = Mapping[str, Any]
PADDING = {"labels": IGNORED, "attention_mask": 0, "decoder_attention_mask": 0, "decoder_input_ids": 0, "input_ids": 0,
           "token_type_ids": 0, "position_ids": 0, "special_tokens_mask": 1}  # fmt: skip
FLAT_KEYS = {"input_ids", "labels", "attention_mask"}  # the entries from which a row of several sequences is made
Side = Literal["source", "target", "row"]


@dataclass(frozen=True)
class Anatomy:
    """The structure of a batch: which tensors hold one entry a token of the source, or of the target, or one entry a row."""

    num_rows: int
    width: int  # of the source; 1 where rows have no tokens
    target_width: int
    sides: dict[str, Side]
    padding_side: Literal["left", "right"] | None  # None: no mask that says what is padding


class NotRows(ValueError):
    """The batch is not made of rows that can be told apart. The message says why."""


def find_anatomy(batch: Batch, *, encoder_decoder: bool) -> Anatomy:
    """Return the structure of a batch. Raise NotRows that names the entry that belongs to no row."""
    first = batch.get("input_ids", next(iter(batch.values()), None))
    if not isinstance(first, Tensor) or first.ndim == 0:
        raise NotRows("the collator gives no tensor with rows")
    rows = len(first)
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != rows:
            raise NotRows(f"the batch's {name!r} is not a tensor with one entry for each of the {rows} rows")
    width = first.shape[1] if "input_ids" in batch and first.ndim == 2 else 1
    labels = batch.get("labels")
    target = labels.shape[1] if encoder_decoder and labels is not None and labels.ndim == 2 else 1
    sides: dict[str, Side] = {}
    for name, value in batch.items():
        to_target = encoder_decoder and (name == "labels" or name.startswith("decoder_"))
        own: Side = "target" if to_target else "source"
        fits = value.ndim == 2 and value.shape[1] == (target if to_target else width) > 1
        sides[name] = own if fits else "row"
        if value.ndim > 2 and width > 1 and width in value.shape[1:]:
            width, target = 1, 1  # e.g. a mask of every query and key: rows stay as wide as they are
    if width == 1:
        sides = dict.fromkeys(batch, "row")
    return Anatomy(rows, width, target, sides, _padding_side(batch, sides))


def _padding_side(batch: Batch, sides: dict[str, Side]) -> Literal["left", "right"] | None:
    mask = batch.get("attention_mask")
    if mask is None or sides["attention_mask"] != "source":
        return None
    real = mask.bool()
    if bool((real[:, 1:] <= real[:, :-1]).all()):
        return "right"
    return "left" if bool((real[:, 1:] >= real[:, :-1]).all()) else None


class CollatedRows:
    """All rows of one global batch, in the collator's order over its batches."""

    def __init__(self, batches: Sequence[Batch], *, encoder_decoder: bool, shifts_labels: bool) -> None:
        """Take the batches apart.

        ``shifts_labels`` says that the loss predicts the next token, so a row's first label never counts.
        """
        self.batches = [{name: value for name, value in batch.items() if value is not None} for batch in batches]
        self.anatomies = [find_anatomy(batch, encoder_decoder=encoder_decoder) for batch in self.batches]
        self.places = [(number, row) for number, found in enumerate(self.anatomies) for row in range(found.num_rows)]
        self.encoder_decoder = encoder_decoder
        self.shifts_labels = shifts_labels
        if len({tuple(batch) for batch in self.batches}) > 1 or len({a.padding_side for a in self.anatomies}) > 1:
            raise NotRows("the collator's batches differ in their entries or in their padding")

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def lengths(self) -> list[int]:
        """Return the source tokens of each row, or its whole width if no mask tells."""
        found: list[int] = []
        for batch, anatomy in zip(self.batches, self.anatomies, strict=True):
            known = anatomy.padding_side is not None
            found += batch["attention_mask"].sum(1).tolist() if known else [anatomy.width] * anatomy.num_rows
        return [max(length, 1) for length in found]

    @cached_property
    def target_lengths(self) -> list[int]:
        found: list[int] = []
        for batch, anatomy in zip(self.batches, self.anatomies, strict=True):
            if anatomy.sides.get("labels") != "target":
                found += [1] * anatomy.num_rows
                continue
            counts = torch.arange(1, anatomy.target_width + 1) * (batch["labels"] != IGNORED)
            found += counts.amax(1).clamp(min=1).tolist()
        return found

    @cached_property
    def num_labels(self) -> list[int]:
        """Return the number of labels that count, of each row."""
        found: list[int] = []
        for batch in self.batches:
            labels = batch.get("labels")
            if labels is None or labels.is_floating_point():
                found += [1] * len(next(iter(batch.values())))
                continue
            counted = labels[:, 1:] if self.shifts_labels and labels.ndim > 1 else labels
            found += (counted != IGNORED).reshape(len(labels), -1).sum(1).tolist()
        return found

    @cached_property
    def label_values(self) -> list[set[tuple[str, int]]]:
        """Return the different labels of each row that count, with the entry's name.

        They come from "labels", or without it from all entries with one integer a row.
        """
        found: list[set[tuple[str, int]]] = []
        for batch in self.batches:
            names = ["labels"] if "labels" in batch else [name for name, value in batch.items() if value.ndim == 1]
            whole = {name: batch[name] for name in names if not batch[name].is_floating_point()}
            for row in range(len(next(iter(batch.values())))):
                values = {(name, value) for name, rows in whole.items() for value in rows[row].flatten().tolist()}
                found.append(values - {(name, IGNORED) for name in names})
        return found

    def weights(self, *, by_labels: bool) -> list[tuple[float, int]]:
        """Return for each row its share in the mean loss of its own batch, and the divisor of that batch's mean."""
        units = self.num_labels if by_labels else [1] * len(self)
        totals = [0] * len(self.batches)
        for (number, _), count in zip(self.places, units, strict=True):
            totals[number] += count
        pairs = zip(self.places, units, strict=True)
        return [(count / max(totals[number], 1), totals[number]) for (number, _), count in pairs]

    @property
    def can_mix(self) -> bool:
        """Return whether rows of several of the collator's batches may stand in one: what widens them is known to be padding."""
        if len(self.batches) == 1:
            return True
        widened = [name for name, side in self.anatomies[0].sides.items() if side != "row"]
        same = len({(a.width, a.target_width) for a in self.anatomies}) == 1
        return same or (self.anatomies[0].padding_side is not None and all(name in PADDING for name in widened))

    @property
    def can_flatten(self) -> bool:
        """Return whether rows can stand end to end: causal language modelling, padded on the right."""
        known = self.shifts_labels and self.anatomies[0].sides.get("labels") == "source"
        return known and set(self.batches[0]) <= FLAT_KEYS and self.anatomies[0].padding_side == "right"

    def build(self, group: RowGroup, *, pad_multiple: int, drop_mask: bool = False) -> dict[str, Tensor]:
        """Return the model's inputs for one micro-batch. ``drop_mask`` is for masks that hide only padding behind a causal
        row."""
        if group.has_shared_rows:
            return self._flat(group)
        rows = [row[0] for row in group.rows]
        target = round_up(max(self.target_lengths[row] for row in rows), pad_multiple)
        widths = {"source": group.width, "target": min(target, max(a.target_width for a in self.anatomies)), "row": 0}
        names = [name for name in self.batches[0] if not (drop_mask and name == "attention_mask")]
        sides = self.anatomies[0].sides
        return {name: torch.stack([self._piece(name, row, widths[sides[name]]) for row in rows]) for name in names}

    def _piece(self, name: str, row: int, width: int) -> Tensor:
        number, index = self.places[row]
        value: Tensor = self.batches[number][name][index]
        if not width:
            return value
        missing = width - len(value)
        left = self.anatomies[number].padding_side == "left" and self.anatomies[number].sides[name] == "source"
        if missing > 0:
            return pad(value, (missing, 0) if left else (0, missing), value=PADDING.get(name, 0))
        return value[-width:] if left else value[:width]

    def _flat(self, group: RowGroup) -> dict[str, Tensor]:
        """Return each row's sequences end to end, with positions anew for each: by them transformers masks between sequences."""
        shape = (len(group.rows), group.width)
        # Padding is a text of its own, of a real token: the embedding of a padding token may have no finite gradient (fill.py).
        inputs = torch.full(shape, int(self.batches[0]["input_ids"][0, 0]))
        labels = torch.full(shape, IGNORED)
        positions = torch.empty(shape, dtype=torch.long)
        count = torch.arange(group.width)
        for number, members in enumerate(group.rows):
            filled = 0
            for member in members:
                end = filled + self.lengths[member]
                batch, index = self.places[member]
                inputs[number, filled:end] = self.batches[batch]["input_ids"][index, : end - filled]
                labels[number, filled + 1 : end] = self.batches[batch]["labels"][index, 1 : end - filled]
                positions[number, filled:end] = count[: end - filled]
                filled = end
            positions[number, filled:] = count[: group.width - filled]
        return {"input_ids": inputs, "labels": labels, "position_ids": positions}


def cut_rows(rows: CollatedRows, plan: Plan, *, classes: Sequence[Sequence[int]], trims: bool) -> list[RowGroup]:
    """Return groups of rows, longest first. Rows of different ``classes`` stay apart."""
    widths = [rows.anatomies[number].width for number, _ in rows.places]
    widest = max(widths)
    if not trims:  # the loss looks at padding: each row keeps the width it came with
        classes = [[row for row in members if widths[row] == width] for members in classes for width in sorted({*widths})]
    layout = Layout(
        micro_batch=plan.per_device_train_batch_size,
        packing=plan.packing,
        flatten=plan.flattens,
        pad_multiple=min(plan.pad_multiple, widest),
    )
    groups = []
    for members in filter(None, classes):
        lengths = [rows.lengths[row] if trims else widths[row] for row in members]
        room = max(plan.sequence_length, *lengths) if plan.packing else widest if trims else lengths[0]
        for group in lay_out(lengths, layout, sequence_length=room)[0]:
            own = tuple(tuple(members[index] for index in row) for row in group.rows)
            groups.append(RowGroup(own, group.width))
    return sorted(groups, key=lambda group: -group.num_padded_tokens)


def halve_group(group: RowGroup, rows: CollatedRows, plan: Plan) -> tuple[RowGroup, RowGroup] | None:
    """Return two groups with the same rows, or with the sequences of one long row. Return None if the group is indivisible."""
    if len(group.rows) > 1:
        middle = (len(group.rows) + 1) // 2
        return RowGroup(group.rows[:middle], group.width), RowGroup(group.rows[middle:], group.width)
    members = group.rows[0]
    if len(members) < 2:
        return None
    middle = len(members) // 2
    first, second = (sum(rows.lengths[row] for row in part) for part in (members[:middle], members[middle:]))
    return RowGroup((members[:middle],), first), RowGroup((members[middle:],), second)


def micro_batch_of(rows: CollatedRows, group: RowGroup, *, plan: Plan, drops_mask: bool, by_rows: bool) -> MicroBatch:
    """Return the micro-batch of a group. ``by_rows`` says that the loss is a mean over rows, not over labels."""
    inputs = rows.build(group, pad_multiple=plan.pad_multiple, drop_mask=drops_mask)
    members = [member for row in group.rows for member in row]
    return MicroBatch(
        arrays={name: value.numpy() for name, value in inputs.items()},
        sequence_ids=np.array(members, np.int64),
        num_label_tokens=len(members) if by_rows else sum(rows.num_labels[row] for row in members),
        num_tokens=sum(rows.lengths[row] for row in members),
    )


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
