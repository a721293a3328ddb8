"""AdamW and SGD as torch computes them, on variables of TensorFlow; learning rates are those of transformers' schedules.

Bias corrections and learning rates are computed by the host in double precision and given to each step as numbers, so that no
step is traced again and float32 does not lose what 1 - 0.999 ** t needs.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from upshift.training.optimizers.schedule import check_schedule, learning_rate_factor
from upshift.xla.training.arguments import XlaArguments

Scalars = dict[str, tf.Tensor]
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class Optimizer(tf.Module):  # type: ignore[misc]  # tensorflow has no types
    """``state``: variables by "<weight>.<state>", made in the scope that the weights were made in."""

    def __init__(self, weights: Mapping[str, tf.Variable], arguments: XlaArguments) -> None:
        super().__init__(name="optimizer")
        self.arguments = arguments
        self.trained = {name: weight for name, weight in weights.items() if weight.trainable}
        kept = STATES[arguments.optim] if arguments.optim == "adamw" or arguments.momentum else ()
        self.state = {
            f"{name}.{state}": tf.Variable(tf.zeros(weight.shape, weight.dtype), trainable=False, name=f"{state}")
            for name, weight in self.trained.items()
            for state in kept
        }

    def states_of(self, name: str) -> list[tf.Variable]:
        return [self.state[key] for state in STATES[self.arguments.optim] if (key := f"{name}.{state}") in self.state]

    def scalars(self, step: int, learning_rate: float) -> dict[str, float]:
        """Return the numbers of optimizer step ``step``, counted from 0."""
        given = self.arguments
        return {
            "learning_rate": learning_rate,
            "correction1": 1 - given.adam_beta1 ** (step + 1),
            "correction2_root": (1 - given.adam_beta2 ** (step + 1)) ** 0.5,
        }

    def update(self, weight: tf.Variable, states: list[tf.Variable], gradient: tf.Tensor, scalars: Scalars) -> tf.Operation:
        """Update one weight in place. Biases and norms (vectors) have no weight decay, as transformers.Trainer has
        it."""
        given, rate = self.arguments, scalars["learning_rate"]
        decay = given.weight_decay if len(weight.shape) >= 2 else 0.0
        if given.optim == "sgd":
            return self._sgd(weight, states, gradient + decay * weight if decay else gradient, rate)
        average, squares = states
        average.assign(given.adam_beta1 * average + (1 - given.adam_beta1) * gradient)
        squares.assign(given.adam_beta2 * squares + (1 - given.adam_beta2) * tf.square(gradient))
        size = tf.sqrt(squares) / scalars["correction2_root"] + given.adam_epsilon
        kept = weight * (1 - rate * decay) if decay else weight
        return weight.assign(kept - rate / scalars["correction1"] * average / size)

    def _sgd(self, weight: tf.Variable, states: list[tf.Variable], gradient: tf.Tensor, rate: tf.Tensor) -> tf.Operation:
        if states:
            states[0].assign(self.arguments.momentum * states[0] + gradient)
            gradient = states[0]
        return weight.assign(weight - rate * gradient)


def learning_rates(arguments: XlaArguments) -> list[float]:
    """Return the learning rate of every step, by the schedules that the torch backend has. Raises RequestError."""
    check_schedule(arguments)
    name, rate = arguments.lr_scheduler_type, arguments.learning_rate
    return [rate * learning_rate_factor(step, name=name, arguments=arguments) for step in range(arguments.max_steps)]
