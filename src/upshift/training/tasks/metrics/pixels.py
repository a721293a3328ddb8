"""Compare the classes that a model gives pixels with those of label images: intersections over unions, and shares of pixels.

A pixel without a label does not count. The sizes are those of the label images, before the image processor changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from upshift.training.tasks.metrics.task_metrics import Inputs, TaskMetrics

LABEL_IMAGES = "label_images"  # of a batch: for each row the classes of its pixels plus one [H, W]; 0 is no label


def pixel_metrics(processor: Any, num_labels: int) -> TaskMetrics:
    """Return the metrics of label images. ``processor``: the image processor, which makes a class for each pixel of outputs."""

    def predict(model: nn.Module, inputs: Inputs, outputs: Any) -> Tensor:
        """Return the pixels of images [rows, classes, 3]: those that are right, those predicted, and those of label images."""
        label_images = inputs[LABEL_IMAGES]
        sizes = [tuple(label_image.shape) for label_image in label_images]
        found = processor.post_process_semantic_segmentation(outputs, target_sizes=sizes)
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


def _count(found: Tensor, label_image: Tensor, num_labels: int) -> Tensor:
    is_real = label_image > 0
    real = label_image[is_real].long() - 1
    classes = found[is_real].long()
    counted = (classes[classes == real], classes, real)
    return torch.stack([torch.bincount(part, minlength=num_labels)[:num_labels] for part in counted], dim=1)
