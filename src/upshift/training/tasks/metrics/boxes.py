"""Compare the boxes that a detector finds with those of the rows: mean average precision, as COCO computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from upshift.training.tasks.metrics.task_metrics import Inputs, TaskMetrics

OVERLAPS = np.linspace(0.5, 0.95, 10)  # least intersections over unions with which a box is found
RECALLS = np.linspace(0, 1, 101)
MOST_BOXES = 100  # of a category in an image
NO_BOX = -1  # category of a place without a box


class ImageBoxes(NamedTuple):
    """The boxes of an image: corners [N, 4] (left, top, right, bottom), categories [N], and scores [N].

    Real boxes have as scores whether each is a crowd."""

    corners: np.ndarray
    categories: np.ndarray
    scores: np.ndarray


def box_metrics(processor: Any) -> TaskMetrics:
    """Return the metrics of boxes. ``processor``: the image processor, which makes boxes in pixels of a model's outputs."""

    def predict(model: nn.Module, inputs: Inputs, outputs: Any) -> Tensor:
        """Return the boxes of images [rows, boxes, 6]: corners, category and score."""
        sizes = torch.stack([label["orig_size"] for label in inputs["labels"]])
        found = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=sizes)
        most = max(len(boxes["scores"]) for boxes in found)
        rows = torch.full((len(found), most, 6), float(NO_BOX), device=sizes.device)
        for row, boxes in zip(rows, found, strict=True):
            parts = (boxes["boxes"], boxes["labels"][:, None], boxes["scores"][:, None])
            row[: len(boxes["scores"])] = torch.cat([part.float() for part in parts], dim=1)
        return rows

    def compute(predicted: np.ndarray, examples: Sequence[Any]) -> dict[str, float]:
        found = []
        for row in predicted:
            boxes = row[row[:, 4] >= 0]
            found.append(ImageBoxes(boxes[:, :4].astype(np.float64), boxes[:, 4].astype(int), boxes[:, 5]))
        return mean_average_precision(found, [_real_boxes(example.annotations) for example in examples])

    return TaskMetrics(larger_is_better=dict.fromkeys(("map", "map_50", "map_75"), True), predict=predict, compute=compute)


def _real_boxes(annotations: Sequence[dict[str, Any]]) -> ImageBoxes:
    corners = np.array([entry["bbox"] for entry in annotations], dtype=np.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    categories = np.array([entry["category_id"] for entry in annotations], dtype=int)
    return ImageBoxes(corners, categories, np.array([entry["iscrowd"] for entry in annotations], dtype=bool))


def mean_average_precision(found: Sequence[ImageBoxes], real: Sequence[ImageBoxes]) -> dict[str, float]:
    """Return the mean average precision over categories and overlaps of 0.5 to 0.95, and those with overlaps of 0.5 and 0.75.

    Categories without a real box do not count. A box that is a crowd is not looked for, and boxes inside it are not wrong."""
    categories = np.unique(np.concatenate([boxes.categories[~boxes.scores] for boxes in real]))
    precisions = np.array([_average_precision(found, real, category) for category in categories]).reshape(-1, len(OVERLAPS))
    by_overlap = precisions.mean(axis=0) if len(precisions) else np.zeros(len(OVERLAPS))
    return {"map": float(by_overlap.mean()), "map_50": float(by_overlap[0]), "map_75": float(by_overlap[5])}


def _average_precision(found: Sequence[ImageBoxes], real: Sequence[ImageBoxes], category: int) -> np.ndarray:
    """Return the average precision [overlaps] of a category."""
    scores, are_right, are_ignored = [], [], []
    num_real = 0
    for image_found, image_real in zip(found, real, strict=True):
        boxes, others = (
            ImageBoxes(*(part[image.categories == category] for part in image)) for image in (image_found, image_real)
        )
        order = np.argsort(-boxes.scores, kind="stable")[:MOST_BOXES]
        is_right, is_ignored = _match(boxes.corners[order], others)
        scores.append(boxes.scores[order])
        are_right.append(is_right)
        are_ignored.append(is_ignored)
        num_real += int((~others.scores).sum())
    order = np.argsort(-np.concatenate(scores), kind="stable")
    is_right, is_ignored = (np.concatenate(parts, axis=1)[:, order] for parts in (are_right, are_ignored))
    return np.array([_area(right[~ignored], num_real) for right, ignored in zip(is_right, is_ignored, strict=True)])


def _area(is_right: np.ndarray, num_real: int) -> float:
    """Return the mean precision at all recalls. ``is_right``: of the boxes, the highest score first."""
    num_right = is_right.cumsum()
    precision = num_right / np.arange(1, len(is_right) + 1)
    best_behind = np.maximum.accumulate(precision[::-1])[::-1]
    places = np.searchsorted(num_right / num_real, RECALLS)
    return float(np.append(best_behind, 0.0)[places].mean())


def _match(corners: np.ndarray, real: ImageBoxes) -> tuple[np.ndarray, np.ndarray]:
    """Return whether the boxes of an image [overlaps, N] each find a real one of their own, and whether each finds a crowd.

    The box with the highest score is first. Each takes the free box with the largest overlap, a crowd only if there is none."""
    overlaps = _intersections_over_unions(corners, real)
    is_right = np.zeros((len(OVERLAPS), len(corners)), dtype=bool)
    is_ignored = np.zeros_like(is_right)
    for number, least in enumerate(OVERLAPS):
        is_free = ~real.scores
        for box, row in enumerate(overlaps):
            own = np.where(is_free & (row >= least), row, -1.0)
            if own.max(initial=-1.0) >= 0:
                is_right[number, box] = True
                is_free[len(row) - 1 - int(own[::-1].argmax())] = False  # of equal ones the last, as COCO's own code
            else:
                is_ignored[number, box] = bool((real.scores & (row >= least)).any())
    return is_right, is_ignored


def _intersections_over_unions(corners: np.ndarray, real: ImageBoxes) -> np.ndarray:
    """Return the overlaps [N, M] of boxes with real ones. Those with a crowd are shares of the box alone."""
    low = np.maximum(corners[:, None, :2], real.corners[None, :, :2])
    high = np.minimum(corners[:, None, 2:], real.corners[None, :, 2:])
    shared = (high - low).clip(min=0).prod(axis=-1)
    areas, real_areas = ((boxes[:, 2:] - boxes[:, :2]).prod(axis=-1) for boxes in (corners, real.corners))
    unions = np.where(real.scores[None, :], areas[:, None], areas[:, None] + real_areas[None, :] - shared)
    overlaps: np.ndarray = np.divide(shared, unions, out=np.zeros_like(shared), where=unions > 0)
    return overlaps
