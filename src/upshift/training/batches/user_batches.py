"""Take the batches that a user's collator made apart into rows, and arrange the rows in other micro-batches.

Rows may be trimmed, sorted, split, or laid end to end. The collator runs as it would without Upshift, so its random numbers are
the same. The plan decides which rows of a global batch run together; the rows of the global batch stay the same.

Collated batches can also be stored in a file for trials, whose process cuts the same rows by its own plan.
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
from upshift.training.data.rows.token_rows import IGNORED
from upshift.value import Value

Batch = Mapping[str, Any]
PADDING = {"labels": IGNORED, "attention_mask": 0, "decoder_attention_mask": 0, "decoder_input_ids": 0, "input_ids": 0,
           "token_type_ids": 0, "position_ids": 0, "special_tokens_mask": 1}  # fmt: skip
FLAT_KEYS = {"input_ids", "labels", "attention_mask"}  # entries that can be laid end to end
COUNTED_ENTRIES = ("attention_mask", "labels")
Side = Literal["source", "target", "row"]
# none: every row is as wide as its batch. mixed: padding is inside rows, or on both sides.
Padding = Literal["left", "right", "none", "mixed"]


class RowStructure(Value):
    """The structure that batches share: for each entry, whether it has a value for a source token, a target token, or a row."""

    sides: dict[str, Side]
    padding: Padding | None  # None: no mask shows the padding


@dataclass(frozen=True)
class BatchSchema:
    """The structure of one batch, as its shapes allow it."""

    num_rows: int
    width: int  # of the source; 1 if rows have no tokens
    target_width: int
    sides: dict[str, Side]
    padding: Padding | None

    def width_of(self, side: Side) -> int:
        return self.target_width if side == "target" else self.width


class InseparableRows(ValueError):
    """Raised for a batch that cannot be taken apart into rows. The message says why."""


def infer_schema(batch: Batch, *, encoder_decoder: bool) -> BatchSchema:
    """Return the structure of a batch. Raise InseparableRows, which names the entry that belongs to no row.

    An entry as wide as the tokens may be so by chance: ``infer_structure`` compares several batches.
    """
    first = batch.get("input_ids", next(iter(batch.values()), None))
    if not isinstance(first, Tensor) or first.ndim == 0:
        raise InseparableRows("the collator gives no tensor with rows")
    num_rows = len(first)
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != num_rows:
            raise InseparableRows(f"the batch's {name!r} is not a tensor with one entry for each of the {num_rows} rows")
    width = first.shape[1] if "input_ids" in batch and first.ndim == 2 else 1
    labels = batch.get("labels")
    target = labels.shape[1] if encoder_decoder and labels is not None and labels.ndim == 2 else 1
    sides: dict[str, Side] = {}
    for name, value in batch.items():
        is_target = encoder_decoder and (name == "labels" or name.startswith("decoder_"))
        side: Side = "target" if is_target else "source"
        has_tokens = value.ndim == 2 and value.shape[1] == (target if is_target else width) > 1
        sides[name] = side if has_tokens else "row"
        if value.ndim > 2 and width > 1 and width in value.shape[1:]:  # such as a mask of all queries and keys
            width = 1  # then rows keep their width
            target = 1
    if width == 1:
        sides = dict.fromkeys(batch, "row")
    return BatchSchema(num_rows, width, target, sides, _padding(batch, sides))


def infer_structure(batches: Sequence[Batch], schemas: Sequence[BatchSchema]) -> RowStructure:
    """Return the structure that all batches have in common. Raise InseparableRows if they differ.

    An entry has a value for each token if it is as wide as the tokens in all batches. If these have one width, entries that are
    not known by name, and labels that are real numbers, may be so wide by chance. Then all rows keep their width.
    """
    wide = [schema for schema in schemas if schema.width > 1] or schemas
    sides = dict(schemas[0].sides)
    for name in sides:
        options = {schema.sides[name] for schema in wide}
        sides[name] = options.pop() if len(options) == 1 else "row"
    for name, side in sides.items():
        is_certain = name in PADDING and not (name == "labels" and batches[0][name].is_floating_point())
        if side != "row" and not is_certain and len({schema.width_of(side) for schema in schemas}) == 1:
            return RowStructure(sides=dict.fromkeys(sides, "row"), padding=None)
    if sides.get("attention_mask") != "source":
        return RowStructure(sides=sides, padding=None)
    paddings = {schema.padding for schema in schemas} - {"none"}  # a batch without padding fits any other
    if len(paddings) > 1:
        raise InseparableRows("the collator's batches differ in their entries or in their padding")
    return RowStructure(sides=sides, padding=paddings.pop() if paddings else "none")


def _check_structure(structure: RowStructure, batches: Sequence[Batch], schemas: Sequence[BatchSchema]) -> RowStructure:
    """Return the structure of batches that follow the sampled ones. Raise InseparableRows if they are not like these."""
    for batch, schema in zip(batches, schemas, strict=True):
        if set(batch) != set(structure.sides):
            raise InseparableRows("the batch's entries are not those of the sampled batches")
        for name, side in structure.sides.items():
            if side != "row" and (batch[name].ndim != 2 or batch[name].shape[1] != schema.width_of(side)):
                raise InseparableRows(f"the batch's {name!r} is not as wide as its tokens, as in the sampled batches")
    if structure.padding in (None, "mixed"):
        return structure
    paddings = {structure.padding, *(_padding(batch, structure.sides) for batch in batches)} - {"none"}
    if len(paddings) > 1:
        raise InseparableRows("the batch's padding is not that of the sampled batches")
    return RowStructure(sides=structure.sides, padding=paddings.pop() if paddings else "none")


def _padding(batch: Batch, sides: Mapping[str, Side]) -> Padding | None:
    """Return where the mask shows padding, or None if no mask shows it."""
    mask = batch.get("attention_mask")
    if mask is None or sides["attention_mask"] != "source":
        return None
    real = mask.bool()
    if bool(real.all()):
        return "none"
    if bool((real[:, 1:] <= real[:, :-1]).all()):
        return "right"
    if bool((real[:, 1:] >= real[:, :-1]).all()):
        return "left"
    return "mixed"


def _read_counted_entries(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches with the entries whose values decide how rows are cut on the host: masks and labels.

    The host waits for a GPU once for all of them.
    """
    on_host: list[Batch] = []
    waits = False
    for batch in batches:
        entries = {name: batch[name] for name in COUNTED_ENTRIES if isinstance(batch.get(name), Tensor) and batch[name].is_cuda}
        for name, value in entries.items():
            entries[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            waits = True
        on_host.append({**batch, **entries})
    if waits:
        torch.cuda.current_stream().synchronize()
    return on_host


class RowBatch:
    """All rows of one global batch, in the order of the collator's batches."""

    def __init__(
        self,
        batches: Sequence[Batch],
        *,
        encoder_decoder: bool,
        shifts_labels: bool,
        sampled: RowStructure | None = None,
    ) -> None:
        """Take the batches apart. Raise InseparableRows if they cannot be, or differ.

        Args:
            batches: those of the collator.
            encoder_decoder: whether labels are those of a decoder, with a width of their own.
            shifts_labels: whether the loss predicts the next token, so that a row's first label never counts.
            sampled: the structure of more batches of this collator. None: these batches alone show it.
        """
        self.batches = [{name: value for name, value in batch.items() if value is not None} for batch in batches]
        self._counted = _read_counted_entries(self.batches)
        self.schemas = [infer_schema(batch, encoder_decoder=encoder_decoder) for batch in self._counted]
        self.locations = [(number, row) for number, schema in enumerate(self.schemas) for row in range(schema.num_rows)]
        self.encoder_decoder = encoder_decoder
        self.shifts_labels = shifts_labels
        if len({tuple(batch) for batch in self.batches}) > 1:
            raise InseparableRows("the collator's batches differ in their entries or in their padding")
        if sampled is None:
            self.structure = infer_structure(self._counted, self.schemas)
        else:
            self.structure = _check_structure(sampled, self._counted, self.schemas)

    def __len__(self) -> int:
        return len(self.locations)

    @property
    def sides(self) -> dict[str, Side]:
        """Return for each entry whether it has a value for a source token, a target token, or a row."""
        return self.structure.sides

    @property
    def padding_side(self) -> Literal["left", "right"] | None:
        """Return the side on which rows are padded, or None if no mask shows it. Without padding it is the right side."""
        if self.structure.padding in (None, "mixed"):
            return None
        return "left" if self.structure.padding == "left" else "right"

    @cached_property
    def lengths(self) -> list[int]:
        """Return the number of source tokens of each row, or its whole width if no mask shows the padding."""
        lengths: list[int] = []
        for batch, schema in zip(self._counted, self.schemas, strict=True):
            if self.padding_side is not None:
                lengths += batch["attention_mask"].sum(1).tolist()
            else:
                lengths += [schema.width] * schema.num_rows
        return [max(length, 1) for length in lengths]

    @cached_property
    def target_lengths(self) -> list[int]:
        """Return the number of target tokens of each row, or 1 if rows have no target."""
        lengths: list[int] = []
        for batch, schema in zip(self._counted, self.schemas, strict=True):
            if self.sides.get("labels") != "target":
                lengths += [1] * schema.num_rows
                continue
            labels = batch["labels"]
            positions = torch.arange(1, schema.target_width + 1, device=labels.device) * (labels != IGNORED)
            lengths += positions.amax(1).clamp(min=1).tolist()
        return lengths

    @cached_property
    def num_labels(self) -> list[int]:
        """Return how many labels of each row count."""
        counts: list[int] = []
        for batch in self._counted:
            labels = batch.get("labels")
            if labels is None or labels.is_floating_point():
                counts += [1] * len(next(iter(batch.values())))
                continue
            counted = labels[:, 1:] if self.shifts_labels and labels.ndim > 1 else labels
            counts += (counted != IGNORED).reshape(len(labels), -1).sum(1).tolist()
        return counts

    @cached_property
    def label_values(self) -> list[set[tuple[str, int]]]:
        """Return the set of labels of each row that count, each with its entry's name.

        They come from "labels", or, without it, from all entries that have one integer for each row.
        """
        label_sets: list[set[tuple[str, int]]] = []
        for batch in self.batches:
            names = ["labels"] if "labels" in batch else [name for name, value in batch.items() if value.ndim == 1]
            integers = {name: batch[name] for name in names if not batch[name].is_floating_point()}
            for row in range(len(next(iter(batch.values())))):
                values = {(name, value) for name, rows in integers.items() for value in rows[row].flatten().tolist()}
                label_sets.append(values - {(name, IGNORED) for name in names})
        return label_sets

    def weights(self, *, by_labels: bool) -> list[tuple[float, int]]:
        """Return for each row its share in the mean loss of its batch, and the divisor of that mean."""
        units = self.num_labels if by_labels else [1] * len(self)
        totals = [0] * len(self.batches)
        for (number, _), count in zip(self.locations, units, strict=True):
            totals[number] += count
        pairs = zip(self.locations, units, strict=True)
        return [(count / max(totals[number], 1), totals[number]) for (number, _), count in pairs]

    @property
    def can_mix(self) -> bool:
        """Return whether rows of different collated batches can share a batch: they need equal widths, or known padding."""
        if len(self.batches) == 1:
            return True
        widened = [name for name, side in self.sides.items() if side != "row"]
        fixed = [name for name, side in self.sides.items() if side == "row"]
        if len({tuple(batch[name].shape[1:] for name in fixed) for batch in self.batches}) > 1:
            return False  # nothing makes these entries equally wide
        if len({(schema.width, schema.target_width) for schema in self.schemas}) == 1:
            return True
        return self.padding_side is not None and all(name in PADDING for name in widened)

    @property
    def can_flatten(self) -> bool:
        """Return whether rows can lie end to end: it takes causal language modelling, padded on the right."""
        is_causal = self.shifts_labels and self.sides.get("labels") == "source"
        return is_causal and set(self.batches[0]) <= FLAT_KEYS and self.padding_side == "right"

    def build(self, group: RowGroup, *, pad_multiple: int, drop_mask: bool = False) -> dict[str, Tensor]:
        """Return the model's inputs for one micro-batch.

        ``drop_mask`` leaves out the attention mask, which is right if it only hides padding on the right of causal rows.
        """
        if group.has_shared_rows:
            return self._lay_end_to_end(group)
        rows = [row[0] for row in group.rows]
        target = round_up(max(self.target_lengths[row] for row in rows), pad_multiple)
        widths = {"source": group.width, "target": min(target, max(schema.target_width for schema in self.schemas)), "row": 0}
        names = [name for name in self.batches[0] if not (drop_mask and name == "attention_mask")]
        return {name: torch.stack([self._fit_width(name, row, widths[self.sides[name]]) for row in rows]) for name in names}

    def _fit_width(self, name: str, row: int, width: int) -> Tensor:
        """Return one entry of a row, padded or trimmed to ``width``. 0 keeps it as it is."""
        number, index = self.locations[row]
        value: Tensor = self.batches[number][name][index]
        if not width:
            return value
        missing = width - len(value)
        is_left = self.padding_side == "left" and self.sides[name] == "source"
        if missing > 0:
            return pad(value, (missing, 0) if is_left else (0, missing), value=PADDING.get(name, 0))
        return value[-width:] if is_left else value[:width]

    def _lay_end_to_end(self, group: RowGroup) -> dict[str, Tensor]:
        """Return rows whose sequences lie end to end. Positions start at 0 in each: from them transformers masks the others."""
        shape = (len(group.rows), group.width)
        # Padding is a separate text of a real token: the embedding of a padding token may have no finite gradient (collate.py).
        first = self.batches[0]["input_ids"][0, 0]
        inputs = first.long().expand(shape).clone()  # on the batches' own device: a copy to another one would wait
        labels = torch.full(shape, IGNORED, device=first.device)
        positions = torch.empty(shape, dtype=torch.long, device=first.device)
        count = torch.arange(group.width, device=first.device)
        for number, members in enumerate(group.rows):
            filled = 0
            for member in members:
                end = filled + self.lengths[member]
                batch, index = self.locations[member]
                inputs[number, filled:end] = self.batches[batch]["input_ids"][index, : end - filled]
                labels[number, filled + 1 : end] = self.batches[batch]["labels"][index, 1 : end - filled]
                positions[number, filled:end] = count[: end - filled]
                filled = end
            positions[number, filled:] = count[: group.width - filled]
        return {"input_ids": inputs, "labels": labels, "position_ids": positions}


def cut_rows(rows: RowBatch, plan: Plan, *, classes: Sequence[Sequence[int]], trims: bool) -> list[RowGroup]:
    """Return groups of rows, longest first. Rows of different ``classes`` stay apart."""
    widths = [rows.schemas[number].width for number, _ in rows.locations]
    widest = max(widths)
    if not trims:  # the loss depends on padding, so each row keeps its width
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
        max_width = widest if trims else lengths[0]
        if plan.packing:
            max_width = max(plan.sequence_length, *lengths)
        for group in lay_out(lengths, layout, sequence_length=max_width)[0]:
            row_members = tuple(tuple(members[index] for index in row) for row in group.rows)
            groups.append(RowGroup(row_members, group.width))
    return sorted(groups, key=lambda group: -group.num_padded_tokens)


def halve_group(group: RowGroup, rows: RowBatch, plan: Plan) -> tuple[RowGroup, RowGroup] | None:
    """Return two groups with the same rows, or with the sequences of a single row, or None if the group is indivisible."""
    if len(group.rows) > 1:
        middle = (len(group.rows) + 1) // 2
        return RowGroup(group.rows[:middle], group.width), RowGroup(group.rows[middle:], group.width)
    members = group.rows[0]
    if len(members) < 2:
        return None
    middle = len(members) // 2
    first = members[:middle]
    second = members[middle:]
    first_width = sum(rows.lengths[row] for row in first)
    second_width = sum(rows.lengths[row] for row in second)
    return RowGroup((first,), first_width), RowGroup((second,), second_width)


def make_micro_batch(rows: RowBatch, group: RowGroup, *, plan: Plan, drops_mask: bool, by_rows: bool) -> MicroBatch:
    """Return the micro-batch of a group. ``by_rows`` says that the loss is a mean over rows, not over labels."""
    inputs = rows.build(group, pad_multiple=plan.pad_multiple, drop_mask=drops_mask)
    members = [member for row in group.rows for member in row]
    return MicroBatch(
        arrays={name: value.numpy() for name, value in inputs.items()},
        sequence_ids=np.array(members, np.int64),
        num_label_tokens=len(members) if by_rows else sum(rows.num_labels[row] for row in members),
        num_tokens=sum(rows.lengths[row] for row in members),
    )


FILE_NAME = "rows.safetensors"


class CutSettings(Value):
    """The ways in which the rows of a file may be cut."""

    encoder_decoder: bool
    shifts_labels: bool
    unit: Literal["items", "labels", "rows"]
    trims: bool
    drops_mask: bool
    structure: RowStructure | None = None  # of all sampled batches, of which the file may hold a few; None: its batches show it


def write_stored_rows(folder: Path, batches: list[Batch], settings: CutSettings) -> Path:
    """Write collated batches into a file of the folder. Return its path."""
    tensors = {}
    for number, batch in enumerate(batches):
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{number}.{name}"] = value.contiguous()
    path = folder / FILE_NAME
    save_file(tensors, path, metadata={"how": settings.to_json()})
    return path


def read_stored_rows(path: Path) -> tuple[RowBatch, CutSettings]:
    """Read the rows that ``write_stored_rows`` wrote."""
    header = read_header(path)
    settings = CutSettings.from_json(header.metadata["how"], origin=str(path))
    batches: dict[int, dict[str, torch.Tensor]] = {}
    for stored in header.tensors:
        number, _, name = stored.name.partition(".")
        batches.setdefault(int(number), {})[name] = read_tensor(stored)
    ordered = [batches[number] for number in sorted(batches)]
    rows = RowBatch(
        ordered,
        encoder_decoder=settings.encoder_decoder,
        shifts_labels=settings.shifts_labels,
        sampled=settings.structure,
    )
    return rows, settings


def cut_stored_rows(rows: RowBatch, settings: CutSettings, plan: Plan, members: Sequence[int]) -> GlobalBatch:
    """Return one global batch of some of the rows, cut by the plan."""
    classes = [list(members)] if rows.can_mix else _rows_by_batch(rows, members)
    groups = cut_rows(rows, plan, classes=classes, trims=settings.trims)
    by_rows = settings.unit == "rows"
    micro_batches = tuple(
        make_micro_batch(rows, group, plan=plan, drops_mask=settings.drops_mask, by_rows=by_rows) for group in groups
    )
    return GlobalBatch(
        position=Position(),
        next_position=Position(),
        micro_batches=micro_batches,
        sequence_ids=np.array(list(members), np.int64),
        num_label_tokens=sum(micro_batch.num_label_tokens for micro_batch in micro_batches),
        num_tokens=sum(micro_batch.num_tokens for micro_batch in micro_batches),
    )


def _rows_by_batch(rows: RowBatch, members: Sequence[int]) -> list[list[int]]:
    by_batch: dict[int, list[int]] = {}
    for row in members:
        batch, _ = rows.locations[row]
        by_batch.setdefault(batch, []).append(row)
    return list(by_batch.values())
