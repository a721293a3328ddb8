"""Define one optimizer step as a traced program: sum the gradients of micro-batches and replicas, clip them, update the weights.

A single device has one compiled program that updates weights and optimizer in place. With several replicas only the function of a
replica is compiled: TensorFlow cannot compile around strategy.run, and on a TPU's host everything in strategy.run is compiled
anyway. There is one trace for each planned width.

XLA's three rules are checked on the traced program: no branch depends on data, no shape depends on data, and there are no more
programs than planned widths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from upshift.errors import JobFailed, RequestError
from upshift.xla.lowering.program import Program
from upshift.xla.model import XlaModel
from upshift.xla.training.loss import loss_program, loss_sum, shapes_of, shifts_labels
from upshift.xla.training.optimizers import Optimizer, Scalars
from upshift.xla.training.strategy import Devices, divide_rows

BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase", "Switch", "RefSwitch"}
SHAPES_OF_DATA = {"Where", "Unique", "UniqueV2", "DynamicPartition", "SetDiff1D", "ListDiff", "NonMaxSuppressionV3"}


def check_rules(operations: Iterable[Any]) -> None:
    """Check the operations of a traced graph. Raise RequestError for the first one that breaks a rule of XLA."""
    for operation in operations:
        if operation.type in BRANCHES:
            raise RequestError(f"{operation.name} branches on data ({operation.type}); XLA compiles it for every step anew")
        unknown = [out for out in operation.outputs if out.dtype != tf.resource and not out.shape.is_fully_defined()]
        if operation.type in SHAPES_OF_DATA or unknown:
            shown = f"{operation.name} has a shape that depends on data ({operation.type})"
            raise RequestError(f"{shown}; XLA needs every shape before it runs")


def dynamic_dimensions(stablehlo: str) -> int:
    """Count the dimensions of unknown size in a program's text."""
    return len(re.findall(r"tensor<[^>]*\?", stablehlo))


def custom_calls(stablehlo: str) -> list[str]:
    """Return the kernels outside of the program that it calls. A TPU may not have them."""
    return re.findall(r"custom_call @(\w+)", stablehlo)


Batch = Mapping[str, Any]
Results = tuple[tf.Tensor, tf.Tensor]  # mean loss, norm of the gradients before clipping


def as_tf_function(function: Any, *, jit: bool) -> Any:
    """Return the function as a tf.function, compiled by XLA if ``jit``."""
    return tf.function(function, jit_compile=jit or None, autograph=False)


class Step:
    """Run optimizer steps. ``max_traces``: the number of planned widths. More traces are an error, as each is a compilation."""

    def __init__(self, model: XlaModel, optimizer: Optimizer, devices: Devices, *, max_traces: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.devices = devices
        self.max_traces = max_traces
        self._shifted = shifts_labels(model.torch_model)
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._gradients_of_replica = as_tf_function(self._sum_gradients, jit=not devices.on_tpu)
        if devices.strategy is None:
            self.function = as_tf_function(self._run_on_one_device, jit=True)
        else:
            self.function = as_tf_function(self._run_on_replicas, jit=False)

    @property
    def num_traces(self) -> int:
        return int(self.function.experimental_get_tracing_count())

    def __call__(self, batch: Mapping[str, np.ndarray], scalars: Mapping[str, float], seed: tuple[int, int]) -> Results:
        """Run the step on the batch of all replicas. Raise JobFailed if it is traced for a shape that was not planned."""
        scalar_tensors = {name: tf.constant(value, tf.float32) for name, value in scalars.items()}
        results: Results = self.function(divide_rows(batch, self.devices), scalar_tensors, tf.constant(seed, tf.int32))
        if self.num_traces > self.max_traces:
            shapes = {name: value.shape for name, value in batch.items()}
            raise JobFailed(f"the step was traced {self.num_traces} times, {self.max_traces} shapes were planned; last {shapes}")
        return results

    def _run_on_one_device(self, batch: Batch, scalars: Scalars, seed: tf.Tensor) -> Results:
        loss, num_labels, gradients = self._sum_gradients(batch, seed)
        gradients, norm = self._clip(gradients, num_labels)
        for (name, weight), gradient in zip(self.optimizer.trained.items(), gradients, strict=True):
            self.optimizer.update(weight, self.optimizer.states_of(name), gradient, scalars)
        return loss / num_labels, norm

    def _run_on_replicas(self, batch: Batch, scalars: Scalars, seed: tf.Tensor) -> Results:
        strategy = self.devices.strategy
        assert strategy is not None
        loss, norm = strategy.run(self._run_in_replica, args=(batch, scalars, seed))
        mean = tf.distribute.ReduceOp.MEAN  # the replicas have equal numbers
        return strategy.reduce(mean, loss, axis=None), strategy.reduce(mean, norm, axis=None)

    def _run_in_replica(self, batch: Batch, scalars: Scalars, seed: tf.Tensor) -> Results:
        context = tf.distribute.get_replica_context()
        replica_seed = tf.random.experimental.stateless_fold_in(seed, context.replica_id_in_sync_group)
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, self._gradients_of_replica(batch, replica_seed))
        loss, num_labels, gradients = summed
        gradients, norm = self._clip(gradients, num_labels)
        context.merge_call(self._update_all, args=(gradients, scalars))
        return loss / num_labels, norm

    def _update_all(self, strategy: Any, gradients: list[Any], scalars: Scalars) -> None:
        """Update the weights of all replicas. They have the same gradients, and each replica updates its own copy."""
        for (name, weight), gradient in zip(self.optimizer.trained.items(), gradients, strict=True):
            states = self.optimizer.states_of(name)

            def update(weight: Any, gradient: Any, scalars: Any, *states: Any) -> None:
                self.optimizer.update(weight, list(states), gradient, scalars)

            strategy.extended.update(weight, update, args=(gradient, scalars, *states), group=False)

    def _clip(self, gradients: list[tf.Tensor], num_labels: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Divide gradients by the number of labels, and clip their norm as torch.nn.utils.clip_grad_norm_ does.

        Return the gradients, and their norm before clipping."""
        means = [gradient / num_labels for gradient in gradients]
        norm = tf.linalg.global_norm(means)
        limit = self.optimizer.arguments.max_grad_norm
        if not limit:
            return means, norm
        scale = tf.minimum(1.0, limit / (norm + 1e-6))
        return [gradient * scale for gradient in means], norm

    def _sum_gradients(self, batch: Batch, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Return the sums over a replica's micro-batches, which run one after the other: loss, labels, gradients."""
        num_parts = self.optimizer.arguments.gradient_accumulation_steps
        if num_parts == 1:
            return self._micro_batch_gradients(batch, seed)
        stacked = {
            name: tf.reshape(value, [num_parts, value.shape[0] // num_parts, *value.shape[1:]]) for name, value in batch.items()
        }
        zeros = [tf.zeros(weight.shape, weight.dtype) for weight in self.optimizer.trained.values()]

        def add(index: tf.Tensor, loss: tf.Tensor, num_labels: tf.Tensor, *gradients: tf.Tensor) -> tuple[tf.Tensor, ...]:
            part_seed = tf.random.experimental.stateless_fold_in(seed, index)
            sums = self._micro_batch_gradients({name: value[index] for name, value in stacked.items()}, part_seed)
            return index + 1, loss + sums[0], num_labels + sums[1], *(a + b for a, b in zip(gradients, sums[2], strict=True))

        first = (tf.constant(0), tf.constant(0.0), tf.constant(0.0), *zeros)
        _, loss, num_labels, *gradients = tf.while_loop(
            lambda index, *_: index < num_parts, add, first, maximum_iterations=num_parts
        )
        return loss, num_labels, gradients

    def _micro_batch_gradients(self, batch: Batch, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        program = self._program(batch)
        weights = self.optimizer.trained
        with tf.GradientTape() as tape:
            loss, num_labels = loss_sum(program, batch, self.model.weights, seed, shifted=self._shifted)
            check_rules(tf.compat.v1.get_default_graph().get_operations())  # gradients have the weights' shapes
        gradients = tape.gradient(loss, list(weights.values()), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return loss, num_labels, [tf.convert_to_tensor(gradient) for gradient in gradients]

    def _program(self, batch: Batch) -> Program:
        shapes = shapes_of(batch)
        key = tuple(sorted(shapes.items()))
        if key not in self._programs:
            self._programs[key] = loss_program(self.model.torch_model, shapes, training=True)
        return self._programs[key]
