"""Export the model's own loss as a program, for one shape of a micro-batch with labels.

The model returns the mean loss of a micro-batch. It is multiplied by the number of labels, so that the loss of a global batch
does not depend on how the batch is divided.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import torch
from torch import nn
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.transformers_names import CAUSAL_LOSS
from upshift.xla.data.batches import IGNORED
from upshift.xla.lowering.program import Program, lower
from upshift.xla.model_export import export

Shapes = Mapping[str, tuple[tuple[int, ...], str]]  # by argument of the model: shape, and numpy's name of the dtype


class _Loss(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        takes_use_cache = "use_cache" in inspect.signature(model.forward).parameters
        self.extra = {"use_cache": False} if takes_use_cache else {}

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**inputs, **self.extra).loss
        return loss.float()


def shapes_of(batch: Mapping[str, Any]) -> Shapes:
    return {name: (tuple(value.shape), value.dtype.name) for name, value in batch.items()}


def loss_program(model: PreTrainedModel, shapes: Shapes, *, training: bool) -> Program:
    """Return the loss as a program. ``training``: with dropout.

    Raise RequestError without labels, for a model without a static graph, and for an operator that is not lowered."""
    if "labels" not in shapes:
        raise RequestError(f"the batches have {', '.join(shapes)} and no labels; training needs labels")
    example = {name: torch.ones(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()}
    for name in shapes:
        if shapes[name][1].startswith("float"):
            example[name] = example[name].to(model.dtype)
    model.train(training)
    try:
        return lower(export(_Loss(model), example))
    finally:
        model.eval()


def shifts_labels(model: PreTrainedModel) -> bool:
    """Return whether the model predicts each label from the token before it, so that the first label of a row never counts.

    Such models compute their loss with transformers' ForCausalLMLoss. The config's loss_type does not tell: it names that loss
    for T5, too, and not for GPT-2."""
    computes_by_it = "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names
    return computes_by_it and model.loss_function is CAUSAL_LOSS.get()


def count_labels(labels: tf.Tensor, *, shifted: bool) -> tf.Tensor:
    """Count the labels that the model's mean is over. It is the number of rows if each row has one class or one number."""
    if not labels.dtype.is_integer or len(labels.shape) < 2:
        return tf.constant(float(labels.shape[0]))
    counted = labels[:, 1:] if shifted else labels
    return tf.reduce_sum(tf.cast(counted != IGNORED, tf.float32))


def loss_sum(
    program: Program, inputs: Mapping[str, Any], weights: Mapping[str, tf.Variable], seed: tf.Tensor, *, shifted: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the sum of the labels' losses, and the number of labels. Without labels the sum and its gradients are 0."""
    labels = inputs["labels"]
    num_labels = count_labels(labels, shifted=shifted)
    if labels.dtype.is_integer:
        labels = tf.where(num_labels > 0, labels, tf.zeros_like(labels))  # the mean over no label would be NaN
    values = {**inputs, "labels": labels}
    (mean,) = program([values[name] for name in program.inputs], weights, seed=seed)
    return mean * num_labels, num_labels
