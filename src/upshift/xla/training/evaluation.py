"""Compute the held-out loss under XLA: the mean over all labels, dropout off, as the torch backend has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from upshift.xla.build import XlaModel
from upshift.xla.training.loss import loss_program, loss_sum, shapes_of, shifts_labels
from upshift.xla.training.step import traced
from upshift.xla.training.strategy import Devices, divided

Sums = tuple[tf.Tensor, tf.Tensor]  # of the labels' losses, and their number


class Evaluation:
    """The evaluation of a run, with one program for each width of the batches."""

    def __init__(self, model: XlaModel, devices: Devices) -> None:
        self.model, self.devices = model, devices
        self._of_replica = traced(self._sums, jit=not devices.on_tpu)
        self._function = self._of_replica if devices.strategy is None else traced(self._on_replicas, jit=False)

    def __call__(self, batches: Iterable[Mapping[str, Any]]) -> float:
        loss, number = 0.0, 0.0
        for batch in batches:
            found = self._function(divided(batch, self.devices))
            loss, number = loss + float(found[0]), number + float(found[1])
        return loss / max(number, 1.0)

    def _sums(self, batch: Mapping[str, Any]) -> Sums:
        program = loss_program(self.model.torch_model, shapes_of(batch), training=False)
        shifted = shifts_labels(self.model.torch_model)
        return loss_sum(program, batch, self.model.weights, tf.constant([0, 0]), shifted=shifted)

    def _in_replica(self, batch: Mapping[str, Any]) -> Sums:
        """Not the compiled function itself: strategy.run would compile around what it does with it."""
        sums: Sums = self._of_replica(batch)
        return sums

    def _on_replicas(self, batch: Mapping[str, Any]) -> Sums:
        strategy = self.devices.strategy
        assert strategy is not None
        loss, number = strategy.run(self._in_replica, args=(batch,))
        total = tf.distribute.ReduceOp.SUM
        return strategy.reduce(total, loss, axis=None), strategy.reduce(total, number, axis=None)
