"""Make batches of images or sounds and their labels for a classifier, and find the names of its labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from upshift.errors import RequestError
from upshift.loading.media_files import MediaItem, read_sound_at
from upshift.models.source import ModelSource
from upshift.training.data.row_formats import list_columns
from upshift.training.tasks.contents import RowImage, image_of, sound_of
from upshift.training.tasks.labels import Label, check_label, find_labels
from upshift.training.tasks.metrics.classes import class_metrics
from upshift.training.tasks.rows import (
    Preprocessors,
    TaskData,
    TaskInputs,
    TaskRow,
    load_processor,
    make_task_data,
    read_splits,
)

LABEL = "label"


class LabelledMedia(NamedTuple):
    """An image or a sound, and the number of its label."""

    content: RowImage | MediaItem
    label: int


def _file_of(row: TaskRow, columns: Sequence[str]) -> Any:
    """Return the value of the first of these columns that a row has. Raise RequestError if it has none."""
    name = next((name for name in columns if name in row.fields), None)
    if name is None:
        raise RequestError(f"{row.place} has no column {columns[0]!r}; {list_columns(row.fields)}; rename that of the files")
    return row.fields[name]


class ImageReader:
    """Reads the images of rows, and makes the model's inputs of them."""

    columns = ("image", "file_name")  # datasets' image folders have the second one

    def __init__(self, source: ModelSource) -> None:
        self.processor = load_processor(source, "AutoImageProcessor")

    def read(self, row: TaskRow) -> RowImage:
        """Return the image of a row. Raise RequestError if it cannot be read."""
        image = image_of(_file_of(row, self.columns), row)
        image.read(header_only=True)
        return image

    def inputs(self, images: Sequence[Any]) -> dict[str, Any]:
        return dict(self.processor(images=[image.read() for image in images], return_tensors="pt"))


class SoundReader:
    """Reads the sounds of rows, and makes the model's inputs of them."""

    columns = ("audio", "file_name")

    def __init__(self, source: ModelSource) -> None:
        self.processor = load_processor(source, "AutoFeatureExtractor")

    def read(self, row: TaskRow) -> MediaItem:
        """Return the sound of a row. Raise RequestError if it cannot be read, or is longer than the model reads."""
        return sound_of(_file_of(row, self.columns), row, self.processor)

    def inputs(self, sounds: Sequence[Any]) -> dict[str, Any]:
        rate = self.processor.sampling_rate
        options = {} if hasattr(self.processor, "chunk_length") else {"padding": True}  # Whisper's extractor pads to its window
        samples = [read_sound_at(sound, rate).samples for sound in sounds]
        return dict(self.processor(samples, sampling_rate=rate, return_tensors="pt", **options))


def prepare_images(inputs: TaskInputs) -> TaskData:
    """Return the examples of images with labels."""
    return _prepare_media(inputs, ImageReader)


def prepare_sounds(inputs: TaskInputs) -> TaskData:
    """Return the examples of sounds with labels."""
    return _prepare_media(inputs, SoundReader)


def _prepare_media(inputs: TaskInputs, reader_class: type[ImageReader] | type[SoundReader]) -> TaskData:
    rows = inputs.rows
    class_names = rows.class_names.get(LABEL, ())
    values = {_label_of(row, class_names) for row in (*rows.training, *rows.evaluation)}
    labels = find_labels(inputs.source, values, has_head=inputs.has_head, class_names=class_names)
    reader = reader_class(inputs.source)

    def read(row: TaskRow) -> LabelledMedia:
        number = labels.number(_label_of(row, class_names), row.place)
        return LabelledMedia(reader.read(row), number)

    def collate(examples: Sequence[LabelledMedia]) -> dict[str, Any]:
        contents = reader.inputs([example.content for example in examples])
        return {**contents, "labels": torch.tensor([example.label for example in examples])}

    return make_task_data(
        read_splits(rows, read, inputs.progress),
        tries_batch=True,
        collate=collate,
        preprocessors=Preprocessors((reader.processor,)),
        describe=lambda example: [(_shown(example.content), False), (f" {labels.names[example.label]}", True)],
        new_head=labels.new_head(inputs.source),
        metrics=class_metrics(lambda example: example.label),
    )


def _shown(content: RowImage | MediaItem) -> str:
    return content.content if isinstance(content.content, str) else content.place


def _label_of(row: TaskRow, class_names: Sequence[str]) -> Label:
    if LABEL not in row.fields:
        raise RequestError(f"{row.place} has no column {LABEL!r}; {list_columns(row.fields)}; rename that of the labels")
    return check_label(row.fields[LABEL], row.place, class_names)
