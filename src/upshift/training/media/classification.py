"""Make batches of images or sounds and their labels for a classifier, and find the names of its labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from upshift.errors import RequestError
from upshift.loading.media_files import MediaItem, read_sound_at
from upshift.models.config import label_names
from upshift.models.source import ModelSource
from upshift.text import join_names
from upshift.training.data.data_files import say_once
from upshift.training.data.row_formats import list_columns
from upshift.training.media.contents import RowImage, image_of, sound_of
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
SHOWN_LABELS = 8


class LabelledMedia(NamedTuple):
    """An image or a sound, and the number of its label."""

    content: RowImage | MediaItem
    label: int


class ImageReader:
    """Reads the images of rows, and makes the model's inputs of them."""

    columns = ("image", "file_name")  # datasets' image folders have the second one

    def __init__(self, source: ModelSource) -> None:
        self.processor = load_processor(source, "AutoImageProcessor")

    def check(self, value: Any, row: MediaRow) -> RowImage:
        """Return the image that a value names. Raise RequestError if it cannot be read."""
        image = image_of(value, row)
        image.read(header_only=True)
        return image

    def inputs(self, images: Sequence[Any]) -> dict[str, Any]:
        return dict(self.processor(images=[image.read() for image in images], return_tensors="pt"))


class SoundReader:
    """Reads the sounds of rows, and makes the model's inputs of them."""

    columns = ("audio", "file_name")

    def __init__(self, source: ModelSource) -> None:
        self.processor = load_processor(source, "AutoFeatureExtractor")

    def check(self, value: Any, row: MediaRow) -> MediaItem:
        """Return the sound that a value names. Raise RequestError if it cannot be read, or is longer than the model reads."""
        return sound_of(value, row, self.processor)

    def inputs(self, sounds: Sequence[Any]) -> dict[str, Any]:
        rate = self.processor.sampling_rate
        options = {} if hasattr(self.processor, "chunk_length") else {"padding": True}  # Whisper's extractor pads to its window
        samples = [read_sound_at(sound, rate).samples for sound in sounds]
        return dict(self.processor(samples, sampling_rate=rate, return_tensors="pt", **options))


@dataclass(frozen=True)
class Labels:
    """The names of a classifier's labels, in their order. ``are_new``: the classifier gets a new head for them."""

    names: tuple[str, ...]
    are_new: bool


def prepare_classification(
    source: ModelSource, rows: MediaRows, *, of_sounds: bool, has_head: bool, progress: Progress
) -> MediaData:
    """Return the examples of images, or of sounds, with labels. ``has_head``: the model's files have a head with labels."""
    values = [_label_of(row) for row in (*rows.training, *rows.evaluation)]
    labels = _find_labels(source, values, has_head=has_head)
    numbers = {name: number for number, name in enumerate(labels.names)}
    reader = SoundReader(source) if of_sounds else ImageReader(source)

    def read(row: MediaRow) -> LabelledMedia:
        value = _label_of(row)
        number = value if isinstance(value, int) else numbers.get(value, -1)
        if not 0 <= number < len(labels.names):
            raise RequestError(
                f"{row.place} has the label {value!r}, and the labels are {join_names(labels.names[:SHOWN_LABELS])}"
            )
        name = next((name for name in reader.columns if name in row.fields), None)
        if name is None:
            raise RequestError(
                f"{row.place} has no column {reader.columns[0]!r}; {list_columns(row.fields)}; rename that of the files"
            )
        return LabelledMedia(reader.check(row.fields[name], row), number)

    if labels.are_new:
        shown = join_names(labels.names[:SHOWN_LABELS]) + (", ..." if len(labels.names) > SHOWN_LABELS else "")
        say_once(f"{source.base_reference} gets a new head for {len(labels.names)} labels ({shown}), whose weights are random")

    def collate(examples: Sequence[LabelledMedia]) -> dict[str, Any]:
        inputs = reader.inputs([example.content for example in examples])
        return {**inputs, "labels": torch.tensor([example.label for example in examples])}

    training, evaluation = read_splits(rows, read, progress)
    collate(training[:1])
    return MediaData(
        training=Examples(training),
        evaluation=Examples(evaluation) if evaluation else None,
        collate=collate,
        preprocessors=Preprocessors((reader.processor,)),
        describe=lambda example: [(_shown(example.content), False), (f" {labels.names[example.label]}", True)],
        label_names=labels.names if labels.are_new else (),
    )


def _shown(content: RowImage | MediaItem) -> str:
    return content.content if isinstance(content.content, str) else content.place


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
