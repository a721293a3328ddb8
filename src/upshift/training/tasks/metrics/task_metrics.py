"""Define what an evaluation of a task measures beside the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

Predictions = Tensor | tuple[Tensor, ...]  # [rows, ...], of rows of a batch
Inputs = Mapping[str, Any]
BatchLoss = Literal["mean over labels", "mean over rows", "sum over rows"]  # what the loss of a batch is


@dataclass(frozen=True)
class TaskMetrics:
    """The metrics of a task. All are shares from 0 to 1, but those of numbers."""

    larger_is_better: Mapping[str, bool]  # by the name of each metric
    predict: Callable[[nn.Module, Inputs, Any], Predictions]  # of a model, the inputs of a batch, and the model's outputs
    compute: Callable[[Any, Sequence[Any]], dict[str, float]]  # of the predictions as arrays, and the examples in their order
    own_inputs: tuple[str, ...] = ()  # of a batch, which only ``predict`` gets, and the model does not


def share(part: float, whole: float) -> float:
    """Return a share, or 0 of nothing."""
    return part / whole if whole else 0.0


def f1_of(true_positives: float, num_predicted: float, num_real: float) -> float:
    """Return the harmonic mean of precision and recall."""
    return share(2 * true_positives, num_predicted + num_real)
