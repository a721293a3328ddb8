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
from upshift.training.tasks.rows import (
    Examples,
    Preprocessors,
    Progress,
    TaskData,
    TaskRow,
    TaskRows,
    load_processor,
    read_splits,
)

LABEL = "label"


class LabelledMedia(NamedTuple):
    """An image or a sound, and the number of its label."""

    content: RowImage | MediaItem
    label: int


class ImageReader:
    """Reads the images of rows, and makes the model's inputs of them."""

    columns = ("image", "file_name")  # datasets' image folders have the second one

    def __init__(self, source: ModelSource) -> None:
        self.processor = load_processor(source, "AutoImageProcessor")

    def check(self, value: Any, row: TaskRow) -> RowImage:
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

    def check(self, value: Any, row: TaskRow) -> MediaItem:
        """Return the sound that a value names. Raise RequestError if it cannot be read, or is longer than the model reads."""
        return sound_of(value, row, self.processor)

    def inputs(self, sounds: Sequence[Any]) -> dict[str, Any]:
        rate = self.processor.sampling_rate
        options = {} if hasattr(self.processor, "chunk_length") else {"padding": True}  # Whisper's extractor pads to its window
        samples = [read_sound_at(sound, rate).samples for sound in sounds]
        return dict(self.processor(samples, sampling_rate=rate, return_tensors="pt", **options))


def prepare_classification(
    source: ModelSource, rows: TaskRows, *, of_sounds: bool, has_head: bool, progress: Progress
) -> TaskData:
    """Return the examples of images, or of sounds, with labels. ``has_head``: the model's files have a head with labels."""
    class_names = rows.class_names.get(LABEL, ())
    values = {_label_of(row, class_names) for row in (*rows.training, *rows.evaluation)}
    labels = find_labels(source, values, has_head=has_head, class_names=class_names)
    reader = SoundReader(source) if of_sounds else ImageReader(source)

    def read(row: TaskRow) -> LabelledMedia:
        number = labels.number(_label_of(row, class_names), row.place)
        name = next((name for name in reader.columns if name in row.fields), None)
        if name is None:
            raise RequestError(
                f"{row.place} has no column {reader.columns[0]!r}; {list_columns(row.fields)}; rename that of the files"
            )
        return LabelledMedia(reader.check(row.fields[name], row), number)

    def collate(examples: Sequence[LabelledMedia]) -> dict[str, Any]:
        inputs = reader.inputs([example.content for example in examples])
        return {**inputs, "labels": torch.tensor([example.label for example in examples])}

    training, evaluation = read_splits(rows, read, progress)
    collate(training[:1])
    return TaskData(
        training=Examples(training),
        evaluation=Examples(evaluation) if evaluation else None,
        collate=collate,
        preprocessors=Preprocessors((reader.processor,)),
        describe=lambda example: [(_shown(example.content), False), (f" {labels.names[example.label]}", True)],
        new_head=labels.new_head(source),
    )


def _shown(content: RowImage | MediaItem) -> str:
    return content.content if isinstance(content.content, str) else content.place


def _label_of(row: TaskRow, class_names: Sequence[str]) -> Label:
    if LABEL not in row.fields:
        raise RequestError(f"{row.place} has no column {LABEL!r}; {list_columns(row.fields)}; rename that of the labels")
    return check_label(row.fields[LABEL], row.place, class_names)
