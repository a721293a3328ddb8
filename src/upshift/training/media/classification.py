"""Make batches of images and their labels for a classifier, and find the names of its labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from upshift.errors import RequestError
from upshift.models.config import label_names
from upshift.models.source import ModelSource
from upshift.text import join_names
from upshift.training.data.data_files import say_once
from upshift.training.data.row_formats import list_columns
from upshift.training.media.contents import RowImage, image_of
from upshift.training.media.rows import (
    Examples,
    MediaData,
    MediaRow,
    MediaRows,
    Preprocessors,
    Progress,
    load_processor,
    read_splits,
)

LABEL = "label"
IMAGE_NAMES = ("image", "file_name")  # columns of the image; datasets' image folders have the second one
SHOWN_LABELS = 8


class LabelledImage(NamedTuple):
    """An image and the number of its label."""

    image: RowImage
    label: int


@dataclass(frozen=True)
class Labels:
    """The names of a classifier's labels, in their order. ``are_new``: the classifier gets a new head for them."""

    names: tuple[str, ...]
    are_new: bool


def prepare_classification(source: ModelSource, rows: MediaRows, *, has_head: bool, progress: Progress) -> MediaData:
    """Return the examples of images with labels. ``has_head``: the model's files have a head with labels."""
    values = [_label_of(row) for row in (*rows.training, *rows.evaluation)]
    labels = _find_labels(source, values, has_head=has_head)
    numbers = {name: number for number, name in enumerate(labels.names)}

    def read(row: MediaRow) -> LabelledImage:
        value = _label_of(row)
        number = value if isinstance(value, int) else numbers.get(value, -1)
        if not 0 <= number < len(labels.names):
            raise RequestError(
                f"{row.place} has the label {value!r}, and the labels are {join_names(labels.names[:SHOWN_LABELS])}"
            )
        image = image_of(_image_value(row), row)
        image.read(header_only=True)
        return LabelledImage(image, number)

    processor = load_processor(source, "AutoImageProcessor")
    if labels.are_new:
        shown = join_names(labels.names[:SHOWN_LABELS]) + (", ..." if len(labels.names) > SHOWN_LABELS else "")
        say_once(f"{source.base_reference} gets a new head for {len(labels.names)} labels ({shown}), whose weights are random")

    def collate(examples: Sequence[LabelledImage]) -> dict[str, Any]:
        inputs = processor(images=[example.image.read() for example in examples], return_tensors="pt")
        return {**inputs, "labels": torch.tensor([example.label for example in examples])}

    training, evaluation = read_splits(rows, read, progress)
    collate(training[:1])
    return MediaData(
        training=Examples(training),
        evaluation=Examples(evaluation) if evaluation else None,
        collate=collate,
        preprocessors=Preprocessors((processor,)),
        describe=lambda example: [(_shown(example.image), False), (f" {labels.names[example.label]}", True)],
        label_names=labels.names if labels.are_new else (),
    )


def _shown(image: RowImage) -> str:
    return image.content if isinstance(image.content, str) else image.place


def _image_value(row: MediaRow) -> Any:
    name = next((name for name in IMAGE_NAMES if name in row.fields), None)
    if name is None:
        raise RequestError(f"{row.place} has no column 'image'; {list_columns(row.fields)}; rename that of the images")
    return row.fields[name]


def _label_of(row: MediaRow) -> str | int:
    """Return the label of a row: its name, or its number. Raise RequestError for other values."""
    if LABEL not in row.fields:
        raise RequestError(f"{row.place} has no column {LABEL!r}; {list_columns(row.fields)}; rename that of the labels")
    value = row.fields[LABEL]
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if is_number or (isinstance(value, str) and value):
        return value  # type: ignore[no-any-return]
    raise RequestError(f"{row.place} has the label {value!r}; give a name, or a number from 0")


def _find_labels(source: ModelSource, values: Sequence[str | int], *, has_head: bool) -> Labels:
    """Return the labels of the classifier: those of its config if they have all labels of the data, else new ones.

    Names are new in alphabetical order. Raise RequestError for names beside numbers, and for one label alone."""
    known = label_names(source.hf_config) if has_head else ()
    texts = {value for value in values if isinstance(value, str)}
    numbers = {value for value in values if not isinstance(value, str)}
    if texts and numbers:
        raise RequestError(f"the labels are names ({min(texts)!r}) and numbers ({min(numbers)}); give one of the two")
    if texts <= set(known) and max(numbers, default=0) < len(known):
        return Labels(known, are_new=False)
    names = tuple(sorted(texts)) if texts else tuple(f"LABEL_{number}" for number in range(max(numbers) + 1))
    if len(names) < 2:
        raise RequestError(f"all rows have the label {join_names(names)}, and a classifier needs at least two")
    return Labels(names, are_new=True)
