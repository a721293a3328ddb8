"""Compare the classes that a model gives pixels with those of label images: intersections over unions, and shares of pixels.

A pixel without a label does not count. The sizes are those of the label images, before the image processor changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from upshift.training.tasks.metrics.task_metrics import Inputs, TaskMetrics

LABEL_IMAGES = "label_images"  # of a batch: for each row the classes of its pixels plus one [H, W]; 0 is no label

FILLED = "pixel_mask"  # of a batch of a model that finds parts: 1 on the image, 0 on what fills it up at the right and below


def pixel_metrics(processor: Any, num_labels: int) -> TaskMetrics:
    """Return the metrics of label images. ``processor``: the image processor, which makes a class for each pixel of outputs."""

    def predict(model: nn.Module, inputs: Inputs, outputs: Any) -> Tensor:
        """Return the pixels of images [rows, classes, 3]: those that are right, those predicted, and those of label images."""
        label_images = inputs[LABEL_IMAGES]
        sizes = [tuple(label_image.shape) for label_image in label_images]
        found = _classes(processor, inputs, outputs, sizes)
        return torch.stack([_count(*pair, num_labels) for pair in zip(found, label_images, strict=True)])

    def compute(predicted: np.ndarray, examples: Sequence[Any]) -> dict[str, float]:
        right, found, real = predicted.astype(np.float64).sum(axis=0).T
        unions = found + real - right
        return {
            "mean_iou": float((right[unions > 0] / unions[unions > 0]).mean()),
            "mean_accuracy": float((right[real > 0] / real[real > 0]).mean()),
            "pixel_accuracy": float(right.sum() / real.sum()),
        }

    names = ("mean_iou", "mean_accuracy", "pixel_accuracy")
    return TaskMetrics(larger_is_better=dict.fromkeys(names, True), predict=predict, compute=compute, own_inputs=(LABEL_IMAGES,))


def _classes(processor: Any, inputs: Inputs, outputs: Any, sizes: list[tuple[int, ...]]) -> list[Tensor]:
    """Return the class of each pixel of images, in the sizes of their label images.

    Where an image is filled up to the largest of its batch, only the masks on the image itself are taken: transformers would
    stretch all to the size."""
    filled = inputs.get(FILLED)
    if filled is None or bool(filled.all()):
        found: list[Tensor] = processor.post_process_semantic_segmentation(outputs, target_sizes=sizes)
        return found
    found = []
    for number, (size, real) in enumerate(zip(sizes, filled.bool(), strict=True)):
        masks = outputs.masks_queries_logits[number : number + 1]
        height, width = (
            round(float(real.any(dim=other).float().mean()) * length)
            for other, length in zip((1, 0), masks.shape[-2:], strict=True)
        )
        row = SimpleNamespace(
            class_queries_logits=outputs.class_queries_logits[number : number + 1],
            masks_queries_logits=masks[..., : max(height, 1), : max(width, 1)],
        )
        found += processor.post_process_semantic_segmentation(row, target_sizes=[size])
    return found


def _count(found: Tensor, label_image: Tensor, num_labels: int) -> Tensor:
    is_real = label_image > 0
    real = label_image[is_real].long() - 1
    classes = found[is_real].long()
    counted = (classes[classes == real], classes, real)
    return torch.stack([torch.bincount(part, minlength=num_labels)[:num_labels] for part in counted], dim=1)
