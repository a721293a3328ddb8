"""Make batches of images and of label images for a segmenter, by the model's own image processor.

A model of one kind gives each pixel a class: it takes label images. A model of the other kind finds parts of an image, each with
a class: it takes a mask for each part. The processor gets label images as bytes from 1 on, so that 0, with which processors fill
what they add at the edges, is no label.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.models.source import ModelSource
from upshift.text import one_line
from upshift.training.data.data_files import say_once
from upshift.training.data.row_formats import list_columns
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.tasks.contents import RowImage, image_of, structs_of
from upshift.training.tasks.images.folders import IMAGES, find_label_column, names_beside
from upshift.training.tasks.images.label_images import (
    CATEGORIES,
    CODES,
    NO_LABEL,
    SEGMENTS,
    LabelImage,
    LabelRules,
    read_label_image,
)
from upshift.training.tasks.labels import Labels, find_labels
from upshift.training.tasks.metrics.pixels import LABEL_IMAGES, pixel_metrics
from upshift.training.tasks.rows import (
    Preprocessors,
    Progress,
    TaskData,
    TaskInputs,
    TaskRow,
    TaskRows,
    join_places,
    load_processor,
    make_task_data,
    read_splits,
)

EMPTY_IMAGE = np.zeros((8, 8, 3), dtype=np.uint8)


class SegmentationExample(NamedTuple):
    """An image, its label image, and the entries of its parts. ``is_evaluated``: a batch keeps the label image for metrics."""

    image: RowImage
    label_image: RowImage
    segments: list[Mapping[str, Any]] | None
    is_evaluated: bool = False


class Segmenter(NamedTuple):
    """The parts with which a run makes batches. ``finds_parts``: the model takes a mask for each part of an image."""

    processor: Any
    rules: LabelRules
    labels: Labels
    finds_parts: bool
    reads_tasks: bool  # the model also takes the name of its task, as OneFormer does

    def read(self, example: SegmentationExample) -> LabelImage:
        return read_label_image(example.label_image, example.segments, self.rules)

    def number_of(self, label: Any, place: str) -> int:
        """Return the number of a label plus one, or 0 for no label."""
        return 0 if label is None else self.labels.number(label, place) + 1


def learns_label_images(model_class: type[PreTrainedModel]) -> bool:
    """Return whether a segmenter of images computes a loss of label images, or of masks of their parts."""
    names = inspect.signature(model_class.forward).parameters
    return "pixel_values" in names and ("mask_labels" in names or not _takes_annotations(model_class))


def _takes_annotations(model_class: type[PreTrainedModel]) -> bool:
    """Return whether the labels are annotations of boxes, as a detector takes them."""
    return "pixel_mask" in inspect.signature(model_class.forward).parameters


def prepare_segmentation(inputs: TaskInputs) -> TaskData:
    """Return the examples of images with label images."""
    source = inputs.source
    rows = inputs.rows
    parameters = inspect.signature(inputs.model_class.forward).parameters
    finds_parts, reads_tasks = "mask_labels" in parameters, "task_inputs" in parameters
    processor = _load_processor(source, reads_tasks=reads_tasks)
    pixels = getattr(processor, "image_processor", processor)
    rules = _rules_of(source, rows, pixels, finds_parts=finds_parts)
    examples = {id(row): _read_row(row) for row in (*rows.training, *rows.evaluation)}
    labels = _read_labels(source, rows, examples, rules, has_head=inputs.has_head, progress=inputs.progress)
    segmenter = Segmenter(processor, rules, labels, finds_parts, reads_tasks)
    say_once(f"{rows.origin}: segmentation ({len(labels.names)} labels: {labels.shown()})")
    training, evaluation = read_splits(rows, lambda row: examples.get(id(row)), lambda done, total: None)
    ignored = _ignored_label(source)
    return make_task_data(
        (training, [example._replace(is_evaluated=True) for example in evaluation]),
        tries_batch=True,
        collate=lambda batch: _make_batch(batch, segmenter),
        preprocessors=Preprocessors((processor,)),
        describe=lambda example: _describe(example, segmenter),
        new_head=labels.new_head(source),
        label_inputs=("mask_labels", "class_labels") if finds_parts else ("labels",),
        batch_loss="mean over rows" if finds_parts else "mean over labels",
        ignored_label=IGNORED if finds_parts else ignored,
        class_names=rules.class_names,
        metrics=pixel_metrics(pixels, len(labels.names)),
    )


def _load_processor(source: ModelSource, *, reads_tasks: bool) -> Any:
    processor = load_processor(source, "AutoProcessor" if reads_tasks else "AutoImageProcessor")
    if not hasattr(processor, "post_process_semantic_segmentation"):
        raise RequestError(
            f"the image processor of {source.base_reference!r} is a {type(processor).__name__}, which takes no label images; "
            "save the processor that belongs to the model beside it"
        )
    return processor


def _ignored_label(source: ModelSource) -> int:
    """Return the number that the loss of a model leaves out."""
    config = source.hf_config
    names = ("semantic_loss_ignore_index", "loss_ignore_index")
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), NO_LABEL)


def _rules_of(source: ModelSource, rows: TaskRows, pixels: Any, *, finds_parts: bool) -> LabelRules:
    columns = (f"{SEGMENTS}.{name}" for name in CATEGORIES)
    named = next((rows.class_names[column] for column in columns if column in rows.class_names), ())
    return LabelRules(
        reduces=bool(getattr(pixels, "do_reduce_labels", False)),
        ignored=getattr(pixels, "ignore_index", None) if finds_parts else _ignored_label(source),
        class_names=named or names_beside(rows.training[0].folder),
        has_objects=finds_parts,
    )


def _read_row(row: TaskRow) -> SegmentationExample:
    name = next((name for name in IMAGES if name in row.fields), None)
    if name is None:
        raise RequestError(f"{row.place} has no column 'image'; {list_columns(row.fields)}; rename that of the images")
    image = image_of(row.fields[name], row)
    column = find_label_column(row)
    if column is None:
        raise RequestError(
            f"{row.place} has no column with one label image; {list_columns(row.fields)}; name its file in a column 'mask'"
        )
    label_image = image_of(row.fields[column], row)
    size, label_size = image.read(header_only=True), label_image.read(header_only=True)
    if size != label_size:
        raise RequestError(
            f"{row.place} has an image of {size[0]} x {size[1]} pixels and in {column!r} a label image of {label_size[0]} x "
            f"{label_size[1]}; give both the same size"
        )
    entries = row.fields.get(SEGMENTS)
    return SegmentationExample(image, label_image, None if entries is None else structs_of(entries, SEGMENTS, row.place))


def _read_labels(
    source: ModelSource,
    rows: TaskRows,
    examples: dict[int, SegmentationExample],
    rules: LabelRules,
    *,
    has_head: bool,
    progress: Progress,
) -> Labels:
    """Return the labels of the label images. Take those of which nothing is learned out of ``examples``."""
    values: set[Any] = set()
    first: dict[Any, str] = {}
    is_binary = False  # a label image may have one label, and 255 where the other one should be
    for number, (key, example) in enumerate(list(examples.items()), start=1):
        label_image = read_label_image(example.label_image, example.segments, rules)
        found = label_image.labels
        learned = {label for label in found if label is not None}
        values |= learned
        is_binary |= None in found and not label_image.tells_objects
        first |= {label: first.get(label, example.label_image.place) for label in learned}
        if not learned:
            del examples[key]
        if rules.has_objects and len(found) > CODES:
            raise RequestError(f"{example.label_image.place} has {len(found)} parts, and an image may have {CODES}; join some")
        progress(number, len(examples))
    if not values:
        raise RequestError(f"{rows.origin} has no label image with a label; write numbers of classes, such as 0 and 1")
    if len(values) == 1 and is_binary and not (rules.reduces and rules.has_objects):
        none, advice = NO_LABEL, "write 1 for it"
        if rules.reduces:
            none, advice = 0, "set do_reduce_labels to false in preprocessor_config.json, or write 1 and 2"
        raise RequestError(
            f"all pixels of {rows.origin} have the label {next(iter(values))!r} or none: {none} is no label; {advice}"
        )
    least = 1 if rules.has_objects else 2
    labels = find_labels(source, values, has_head=has_head, class_names=rules.class_names, least=least)
    if len(labels.names) > CODES:
        raise RequestError(f"{rows.origin} has {len(labels.names)} labels, and an image of bytes has {CODES}; use fewer")
    if len(labels.names) < least:
        raise RequestError(f"{source.base_reference!r} has the label {labels.shown()} alone, and a segmenter needs two")
    for label, place in first.items():
        labels.number(label, place)
    return labels


def _make_batch(examples: Sequence[SegmentationExample], segmenter: Segmenter) -> dict[str, Any]:
    places = [example.image.place for example in examples]
    images = [example.image.read() for example in examples]
    label_images = [segmenter.read(example) for example in examples]
    codes = [
        tuple(segmenter.number_of(label, place) for label in label_image.labels)
        for label_image, place in zip(label_images, places, strict=True)
    ]
    try:
        make = _with_masks if segmenter.finds_parts else _with_labels
        inputs = make(images, label_images, codes, segmenter)
    except ValueError as error:
        raise RequestError(
            f"the image processor makes no batch of {join_places(places)} ({one_line(error, limit=200)}); give images of one "
            "size, or --set per_device_train_batch_size=1"
        ) from None
    kept = [
        torch.from_numpy(label_image.coded(code))
        for example, label_image, code in zip(examples, label_images, codes, strict=True)
        if example.is_evaluated
    ]
    return {**inputs, LABEL_IMAGES: kept} if kept else inputs


def _with_labels(
    images: list[Any], label_images: list[LabelImage], codes: list[tuple[int, ...]], segmenter: Segmenter
) -> dict[str, Any]:
    """Return the inputs of a model that gives each pixel a class. Some processors would mix the numbers of neighbours."""
    from PIL.Image import Resampling

    inputs = dict(segmenter.processor(images=images, return_tensors="pt"))
    maps = [label_image.coded(code) for label_image, code in zip(label_images, codes, strict=True)]
    options = _plain_labels(segmenter.processor)
    sized = segmenter.processor(images=[EMPTY_IMAGE] * len(maps), segmentation_maps=maps, resample=Resampling.NEAREST, **options)[
        "labels"
    ]
    labels = torch.from_numpy(np.stack([np.asarray(each) for each in sized])).long() - 1
    return {**inputs, "labels": labels.masked_fill(labels < 0, IGNORED)}


def _with_masks(
    images: list[Any], label_images: list[LabelImage], codes: list[tuple[int, ...]], segmenter: Segmenter
) -> dict[str, Any]:
    """Return the inputs of a model that finds parts of an image."""
    options = _plain_labels(segmenter.processor)
    takes_off = 0 if options else 1  # without the option a processor takes 1 off all numbers, and 0 becomes the ignored one
    maps, classes = [], []
    for label_image, code in zip(label_images, codes, strict=True):
        numbers = np.cumsum([number > 0 for number in code]) * [number > 0 for number in code]
        maps.append(label_image.coded(tuple(numbers.tolist())))
        classes.append({int(part): number - 1 + takes_off for part, number in zip(numbers, code, strict=True) if number})
    options |= {"ignore_index": NO_LABEL if takes_off else 0, "instance_id_to_semantic_id": classes}
    if segmenter.reads_tasks:
        options["task_inputs"] = ["panoptic"] * len(images)
    return dict(segmenter.processor(images=images, segmentation_maps=maps, return_tensors="pt", **options))


def _plain_labels(processor: Any) -> dict[str, Any]:
    """Return the options with which a processor keeps the numbers of labels."""
    pixels = getattr(processor, "image_processor", processor)
    return {"do_reduce_labels": False} if hasattr(pixels, "do_reduce_labels") else {}


def _describe(example: SegmentationExample, segmenter: Segmenter) -> list[tuple[str, bool]]:
    label_image = segmenter.read(example)
    place = example.image.place
    parts = [
        f"{segmenter.labels.names[segmenter.number_of(label, place) - 1]} {share:.0%}"
        for label, share in zip(label_image.labels, label_image.shares(), strict=True)
        if label is not None
    ]
    content = example.image.content
    return [(f"{content if isinstance(content, str) else place} ", False), ("; ".join(parts), True)]
