"""Take batches that a user's collator made apart into rows, and put them together anew: trimmed, sorted, split, or laid end to
end.

The collator runs as it would without Upshift, so the random numbers that it draws are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from upshift.planning.packing import round_up
from upshift.training.batches.layout import RowGroup
from upshift.training.data.columns import IGNORED

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
        self.encoder_decoder, self.shifts_labels = encoder_decoder, shifts_labels
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
