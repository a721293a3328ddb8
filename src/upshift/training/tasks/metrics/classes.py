"""Compare the classes that a classifier predicts with those of the rows: accuracy, and F1. Numbers: the error and r."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from upshift.training.tasks.metrics.task_metrics import TaskMetrics, f1_of, share


def class_metrics(label_of: Any) -> TaskMetrics:
    """Return the metrics of one class a row: the accuracy, and the mean F1 of the classes that are real or predicted.

    ``label_of`` returns the number of an example's class."""

    def compute(predicted: np.ndarray, examples: Sequence[Any]) -> dict[str, float]:
        real = np.array([label_of(example) for example in examples])
        return {"accuracy": float((predicted == real).mean()), "f1_macro": _mean_f1(predicted, real)}

    return TaskMetrics(
        larger_is_better={"accuracy": True, "f1_macro": True},
        predict=lambda model, inputs, outputs: outputs["logits"].argmax(-1),
        compute=compute,
    )


def _mean_f1(predicted: np.ndarray, real: np.ndarray) -> float:
    scores = [
        f1_of(
            int(((predicted == number) & (real == number)).sum()), int((predicted == number).sum()), int((real == number).sum())
        )
        for number in np.union1d(predicted, real)
    ]
    return sum(scores) / len(scores)


def several_class_metrics(labels_of: Any) -> TaskMetrics:
    """Return the metrics of several classes a row: the share of rows of which all are right, and the F1 of all classes.

    ``labels_of`` returns an example's share of each class. A class is predicted if it is likelier than not."""

    def compute(predicted: np.ndarray, examples: Sequence[Any]) -> dict[str, float]:
        real = np.array([labels_of(example) for example in examples]) >= 0.5
        is_right = int((predicted & real).sum())
        return {
            "accuracy": float((predicted == real).all(axis=1).mean()),
            "f1_micro": f1_of(is_right, int(predicted.sum()), int(real.sum())),
        }

    return TaskMetrics(
        larger_is_better={"accuracy": True, "f1_micro": True},
        predict=lambda model, inputs, outputs: outputs["logits"] > 0,
        compute=compute,
    )


def number_metrics(number_of: Any) -> TaskMetrics:
    """Return the metrics of a number a row: the mean absolute error, and Pearson's correlation (0 if one side is constant)."""

    def compute(predicted: np.ndarray, examples: Sequence[Any]) -> dict[str, float]:
        real = np.array([number_of(example) for example in examples], dtype=np.float64)
        found = predicted.astype(np.float64)
        real_change, found_change = real - real.mean(), found - found.mean()
        covariance = float((real_change * found_change).sum())
        pearson = share(covariance, float(np.sqrt((real_change**2).sum() * (found_change**2).sum())))
        return {"mae": float(np.abs(found - real).mean()), "pearson": pearson}

    return TaskMetrics(
        larger_is_better={"mae": False, "pearson": True},
        predict=lambda model, inputs, outputs: outputs["logits"].float().squeeze(-1),
        compute=compute,
    )
