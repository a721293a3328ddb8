"""Build generation and a training step as HLO. Weights and optimizer states are arguments of which only shapes are
known.

No weight is ever made: a model of any size takes the memory of its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import torch

from upshift.errors import RequestError
from upshift.models.source import ModelSource
from upshift.xla.generation.generator import passes_of
from upshift.xla.generation.options import XlaGeneration
from upshift.xla.generation.program import generate_tokens
from upshift.xla.generation.sampling import Sampling
from upshift.xla.lowering.registry import DTYPES as TENSORFLOW_DTYPES
from upshift.xla.skeleton import first_names, skeleton
from upshift.xla.tpu.request import Argument, Part
from upshift.xla.training.loss import loss_program, loss_sum, shifts_labels

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.999)
EPSILON = 1e-8
DECAY = 0.01
BATCH = ("input_ids", "attention_mask", "labels")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Program(NamedTuple):
    hlo: bytes
    arguments: tuple[Argument, ...]
    num_results: int
    num_parameters: int


class _Input(NamedTuple):
    name: str
    part: Part
    spec: tf.TensorSpec
    becomes: int | None = None


def generation_program(source: ModelSource, options: XlaGeneration, *, rows: int, width: int, dtype: str) -> Program:
    model = skeleton(source, dtype=DTYPES[dtype])
    passes = passes_of(model, source)
    weights = _weights(model)
    new = options.max_new_tokens
    names = [one.name for one in weights]

    def run(*given: Any) -> Any:
        held = dict(zip(names, given, strict=False))
        ids, mask, *sampling = given[len(names) :]
        return generate_tokens(passes, options, 0, held, ids, mask, Sampling(*sampling))

    data = [
        _Input("input_ids", "data", tf.TensorSpec((rows, width), tf.int64)),
        _Input("attention_mask", "data", tf.TensorSpec((rows, width), tf.int64)),
        _Input("temperature", "data", tf.TensorSpec((), tf.float32)), _Input("top_k", "data", tf.TensorSpec((), tf.int32)),
        _Input("top_p", "data", tf.TensorSpec((), tf.float32)), _Input("uniform", "data", tf.TensorSpec((rows, new), tf.float32)),
    ]  # fmt: skip
    return _program(run, [*weights, *data], num_results=1, rows=rows, model=model)


def training_program(source: ModelSource, *, rows: int, length: int, dtype: str) -> Program:
    """Return one AdamW step on the model's own loss. Weights and states are fp32, and ``dtype`` is computed in."""
    model = skeleton(source, dtype=DTYPES[dtype])
    if not model.can_generate():
        raise RequestError(f"{source.reference!r} is no language model, whose step alone is compiled; see docs/xla_generation.md")
    program = loss_program(model, dict.fromkeys(BATCH, ((rows, length), "int64")), training=True)
    parameters = dict(model.named_parameters())
    fixed = [one for one in _weights(model) if one.name not in parameters]  # buffers that a checkpoint holds
    trained = [one for one in _weights(model) if one.name in parameters]
    weights = [one._replace(spec=tf.TensorSpec(one.spec.shape, tf.float32), becomes=n) for n, one in enumerate(trained)]
    count = len(weights)
    slots = [
        _Input(f"{slot} of {one.name}", "optimizer", one.spec, becomes=count * place + n)
        for place, slot in enumerate(("exp_avg", "exp_avg_sq"), start=1)
        for n, one in enumerate(weights)
    ]
    step_count = _Input("step", "optimizer", tf.TensorSpec((), tf.float32), becomes=3 * count)
    names = [one.name for one in weights]
    fixed_names = [one.name for one in fixed]

    def run(*given: Any) -> Any:
        held, first, second = (given[count * place : count * (place + 1)] for place in range(3))
        step = given[3 * count]
        batch = dict(zip(BATCH, given[-len(BATCH) :], strict=True))
        others = dict(zip(fixed_names, given[3 * count + 1 :], strict=False))
        with tf.GradientTape() as tape:
            tape.watch(held)
            seed = tf.stack([0, tf.cast(step, tf.int32)])  # of dropout
            everything = {**dict(zip(names, held, strict=True)), **others}
            total, number = loss_sum(program, batch, everything, seed, shifted=shifts_labels(model))
            loss = total / number
        gradients = tape.gradient(loss, held, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        after = [_adamw(*one, step + 1.0) for one in zip(held, gradients, first, second, strict=True)]
        return [*(one[0] for one in after), *(one[1] for one in after), *(one[2] for one in after), step + 1.0, loss]

    data = [_Input(name, "data", tf.TensorSpec((rows, length), tf.int64)) for name in BATCH]
    return _program(run, [*weights, *slots, step_count, *fixed, *data], num_results=3 * count + 2, rows=rows, model=model)


def _adamw(weight: Any, gradient: Any, first: Any, second: Any, step: Any) -> tuple[Any, Any, Any]:
    """Update a weight as torch.optim.AdamW does."""
    gradient = tf.convert_to_tensor(gradient)
    first = BETAS[0] * first + (1 - BETAS[0]) * gradient
    second = BETAS[1] * second + (1 - BETAS[1]) * gradient * gradient
    size = tf.sqrt(second / (1 - BETAS[1] ** step)) + EPSILON
    return weight * (1 - LEARNING_RATE * DECAY) - LEARNING_RATE * (first / (1 - BETAS[0] ** step)) / size, first, second


def _weights(model: Any) -> list[_Input]:
    """Return one argument for all weights that are tied."""
    state = model.state_dict()
    first = [name for name, first in first_names(model).items() if name == first]
    specs = {name: tf.TensorSpec(tuple(one.shape), TENSORFLOW_DTYPES[one.dtype]) for name, one in state.items()}
    return [_Input(name, "weights", specs[name]) for name in first]


def _program(run: Callable[..., Any], inputs: Sequence[_Input], *, num_results: int, rows: int, model: Any) -> Program:
    function = tf.function(run, jit_compile=True, autograph=False)
    hlo = function.experimental_get_compiler_ir(*(one.spec for one in inputs))(stage="hlo_serialized")
    arguments = tuple(
        Argument(
            name=one.name, part=one.part, num_bytes=one.spec.shape.num_elements() * one.spec.dtype.size, becomes=one.becomes,
            divided=one.part == "data" and one.spec.shape.rank > 0 and one.spec.shape[0] == rows,
        )
        for one in inputs
    )  # fmt: skip
    return Program(hlo, arguments, num_results, sum(parameter.numel() for parameter in model.parameters()))
