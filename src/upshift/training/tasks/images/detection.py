"""Make batches of images and of the boxes of their objects for a detector, by the model's own image processor."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.training.data.chat_rows import decode_json
from upshift.training.data.data_files import say_once
from upshift.training.data.row_formats import list_columns
from upshift.training.tasks.contents import RowImage, plain, structs_of
from upshift.training.tasks.labels import Label, check_label, find_labels
from upshift.training.tasks.media_classification import ImageReader
from upshift.training.tasks.metrics.boxes import box_metrics
from upshift.training.tasks.rows import Preprocessors, TaskData, TaskInputs, TaskRow, make_task_data, read_splits

OBJECTS = "objects"
CATEGORY_NAMES = ("category", "categories", "category_id", "label")  # of a box; datasets' pages have the first two
OUTSIDE_PIXELS = 1.0  # by which a rounded box may reach outside of its image


class Box(NamedTuple):
    """A box in pixels as COCO has it: x and y of the upper left corner, width and height. ``area`` is in pixels."""

    corners: tuple[float, float, float, float]
    category: Label
    area: float
    is_crowd: int


class DetectionExample(NamedTuple):
    """An image with the annotations of its boxes, as the image processor takes them."""

    image: RowImage
    annotations: list[dict[str, Any]]


def learns_boxes(model_class: type[PreTrainedModel]) -> bool:
    """Return whether a detector computes a loss."""
    return "labels" in inspect.signature(model_class.forward).parameters


def prepare_detection(inputs: TaskInputs) -> TaskData:
    """Return the examples of images with boxes."""
    rows = inputs.rows
    reader = ImageReader(inputs.source)
    column = next((name for name in CATEGORY_NAMES if f"{OBJECTS}.{name}" in rows.class_names), CATEGORY_NAMES[0])
    class_names = rows.class_names.get(f"{OBJECTS}.{column}", ())
    boxes = {id(row): _read_boxes(row, class_names) for row in (*rows.training, *rows.evaluation)}
    categories = {box.category for of_row in boxes.values() for box in of_row}
    if not categories:
        raise RequestError(f"{rows.origin} has no box; give at least one")
    labels = find_labels(inputs.source, categories, has_head=True, class_names=class_names, least=1)
    say_once(f"{rows.origin}: object detection, the boxes of {OBJECTS!r} ({len(labels.names)} labels: {labels.shown()})")

    def read(row: TaskRow) -> DetectionExample:
        image = reader.read(row)
        size = image.read(header_only=True)
        annotations = []
        for box in boxes.pop(id(row)):
            _check_inside(box, size, row.place)
            number = labels.number(box.category, row.place)
            entry = {"image_id": 0, "category_id": number, "bbox": list(box.corners), "area": box.area, "iscrowd": box.is_crowd}
            annotations.append(entry)
        return DetectionExample(image, annotations)

    def collate(examples: Sequence[DetectionExample]) -> dict[str, Any]:
        images = [example.image.read() for example in examples]
        annotations = [{"image_id": 0, "annotations": example.annotations} for example in examples]
        batch = dict(reader.processor(images=images, annotations=annotations, return_tensors="pt"))
        return {**batch, "labels": [dict(label) for label in batch["labels"]]}

    def describe(example: DetectionExample) -> list[tuple[str, bool]]:
        named = [
            f"{labels.names[entry['category_id']]} at {', '.join(f'{number:g}' for number in entry['bbox'])}"
            for entry in example.annotations
        ]
        content = example.image.content
        return [(f"{content if isinstance(content, str) else example.image.place} ", False), ("; ".join(named), True)]

    return make_task_data(
        read_splits(rows, read, inputs.progress),
        tries_batch=True,
        collate=collate,
        preprocessors=Preprocessors((reader.processor,)),
        describe=describe,
        new_head=labels.new_head(inputs.source),
        batch_loss="mean over rows",
        metrics=box_metrics(reader.processor),
    )


def _read_boxes(row: TaskRow, class_names: Sequence[str]) -> list[Box]:
    """Return the boxes of a row, which may be a struct of lists or a list of structs. Raise RequestError for others."""
    if OBJECTS not in row.fields:
        raise RequestError(f"{row.place} has no column {OBJECTS!r}; {list_columns(row.fields)}; rename that of the boxes")
    value = decode_json(row.fields[OBJECTS])
    if value is None:
        return []
    return [_read_box(entry, row.place, class_names) for entry in structs_of(value, OBJECTS, row.place)]


def _read_box(entry: Mapping[str, Any], place: str, class_names: Sequence[str]) -> Box:
    corners = plain(entry.get("bbox"))
    is_box = isinstance(corners, list) and len(corners) == 4 and all(_is_number(number) for number in corners)
    if not is_box or min(corners[2:]) <= 0:
        raise RequestError(f"{place} has the box {corners!r:.60}; give x, y, width and height in pixels, as COCO does")
    name = next((name for name in CATEGORY_NAMES if name in entry), None)
    if name is None:
        raise RequestError(f"{place} has a box without a category; give {OBJECTS} with bbox and category")
    area: Any = entry.get("area")
    x, y, width, height = map(float, corners)
    return Box(
        corners=(x, y, width, height),
        category=check_label(entry[name], place, class_names),
        area=float(area) if _is_number(area) else width * height,
        is_crowd=int(bool(entry.get("iscrowd"))),
    )


def _check_inside(box: Box, size: tuple[int, int], place: str) -> None:
    """Raise RequestError for a box that reaches outside of its image, as two corners in place of a size do."""
    x, y, width, height = box.corners
    is_inside = min(x, y) >= -OUTSIDE_PIXELS and x + width <= size[0] + OUTSIDE_PIXELS and y + height <= size[1] + OUTSIDE_PIXELS
    if not is_inside:
        raise RequestError(
            f"{place} has the box {list(box.corners)}, which reaches outside of its image of {size[0]} x {size[1]} pixels; give "
            "x, y, width and height, as COCO does"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
