"""Compute AdamW and SGD as torch does, on variables of TensorFlow, with the learning rates of transformers' schedules.

The host computes bias corrections and learning rates in double precision and passes them to each step as tensors. So no step is
traced again, and 1 - 0.999 ** t does not lose digits in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from upshift.training.optimizers.schedule import check_schedule, learning_rate_factor
from upshift.xla.training.arguments import XlaArguments

Scalars = dict[str, tf.Tensor]
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class Optimizer(tf.Module):  # type: ignore[misc]  # tensorflow has no types
    """Update weights. ``state`` has the optimizer's variables by "<weight>.<state>".

    Make the optimizer in the same strategy scope as the weights."""

    def __init__(self, weights: Mapping[str, tf.Variable], arguments: XlaArguments) -> None:
        super().__init__(name="optimizer")
        self.arguments = arguments
        self.trained = {name: weight for name, weight in weights.items() if weight.trainable}
        has_state = arguments.optim == "adamw" or arguments.momentum
        self._state_names = STATES[arguments.optim] if has_state else ()
        variables = {}
        for name, weight in self.trained.items():
            for state in self._state_names:
                zeros = tf.zeros(weight.shape, weight.dtype)
                variables[f"{name}.{state}"] = tf.Variable(zeros, trainable=False, name=state)
        self.state = variables

    def states_of(self, name: str) -> list[tf.Variable]:
        """Return the optimizer's variables of a weight."""
        return [self.state[f"{name}.{state}"] for state in self._state_names]

    def scalars(self, step: int, learning_rate: float) -> dict[str, float]:
        """Return the inputs of optimizer step ``step``, counted from 0."""
        arguments = self.arguments
        return {
            "learning_rate": learning_rate,
            "correction1": 1 - arguments.adam_beta1 ** (step + 1),
            "correction2_root": (1 - arguments.adam_beta2 ** (step + 1)) ** 0.5,
        }

    def update(self, weight: tf.Variable, states: list[tf.Variable], gradient: tf.Tensor, scalars: Scalars) -> tf.Operation:
        """Update one weight in place. Vectors (biases and norms) have no weight decay."""
        arguments = self.arguments
        rate = scalars["learning_rate"]
        decay = arguments.weight_decay if len(weight.shape) >= 2 else 0.0
        if arguments.optim == "sgd":
            if decay:
                gradient = gradient + decay * weight
            return self._sgd(weight, states, gradient, rate)
        average, squares = states
        average.assign(arguments.adam_beta1 * average + (1 - arguments.adam_beta1) * gradient)
        squares.assign(arguments.adam_beta2 * squares + (1 - arguments.adam_beta2) * tf.square(gradient))
        size = tf.sqrt(squares) / scalars["correction2_root"] + arguments.adam_epsilon
        decayed = weight * (1 - rate * decay) if decay else weight
        return weight.assign(decayed - rate / scalars["correction1"] * average / size)

    def _sgd(self, weight: tf.Variable, states: list[tf.Variable], gradient: tf.Tensor, rate: tf.Tensor) -> tf.Operation:
        if states:
            states[0].assign(self.arguments.momentum * states[0] + gradient)
            gradient = states[0]
        return weight.assign(weight - rate * gradient)


def learning_rates(arguments: XlaArguments) -> list[float]:
    """Return the learning rate of every step, as in the torch backend. Raise RequestError for a wrong schedule."""
    check_schedule(arguments)
    name = arguments.lr_scheduler_type
    rate = arguments.learning_rate
    return [rate * learning_rate_factor(step, name=name, arguments=arguments) for step in range(arguments.max_steps)]
