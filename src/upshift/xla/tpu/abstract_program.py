"""Build generation or a training step as HLO, with weights and optimizer states as arguments.

Only the shapes of the arguments are known and no weight is ever made, so a model of any size takes the memory of its graph."""

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
from upshift.xla.model_export import first_names, skeleton
from upshift.xla.tpu.request import Argument, Part
from upshift.xla.training.loss import loss_program, loss_sum, shifts_labels

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01
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
    """Return the generation of ``rows`` prompts of ``width`` tokens."""
    model = skeleton(source, dtype=DTYPES[dtype])
    passes = passes_of(model, source)
    weights = _weights(model)
    max_new_tokens = options.max_new_tokens
    names = [weight.name for weight in weights]

    def run(*arguments: Any) -> Any:
        weight_tensors = dict(zip(names, arguments, strict=False))
        ids, mask, *sampling = arguments[len(names) :]
        return generate_tokens(passes, options, 0, weight_tensors, ids, mask, Sampling(*sampling))

    data = [
        _Input("input_ids", "data", tf.TensorSpec((rows, width), tf.int64)),
        _Input("attention_mask", "data", tf.TensorSpec((rows, width), tf.int64)),
        _Input("temperature", "data", tf.TensorSpec((), tf.float32)),
        _Input("top_k", "data", tf.TensorSpec((), tf.int32)),
        _Input("top_p", "data", tf.TensorSpec((), tf.float32)),
        _Input("uniform", "data", tf.TensorSpec((rows, max_new_tokens), tf.float32)),
    ]
    return _program(run, [*weights, *data], num_results=1, rows=rows, model=model)


def training_program(source: ModelSource, *, rows: int, length: int, dtype: str) -> Program:
    """Return one AdamW step on the model's own loss, computed in ``dtype``. Weights and optimizer states are in fp32."""
    model = skeleton(source, dtype=DTYPES[dtype])
    if not model.can_generate():
        raise RequestError(f"{source.reference!r} is no language model, whose step alone is compiled; see docs/xla_generation.md")
    program = loss_program(model, dict.fromkeys(BATCH, ((rows, length), "int64")), training=True)
    parameters = dict(model.named_parameters())
    weights: list[_Input] = []
    buffers: list[_Input] = []  # those that a checkpoint stores; they are not trained
    for weight in _weights(model):
        if weight.name in parameters:
            spec = tf.TensorSpec(weight.spec.shape, tf.float32)
            weights.append(weight._replace(spec=spec, becomes=len(weights)))
        else:
            buffers.append(weight)
    count = len(weights)
    # The results are all weights, then all first moments, then all second moments, then the step count and the loss.
    moments = [
        _Input(f"{name} of {weight.name}", "optimizer", weight.spec, becomes=count * group + index)
        for group, name in enumerate(("exp_avg", "exp_avg_sq"), start=1)
        for index, weight in enumerate(weights)
    ]
    step_count = _Input("step", "optimizer", tf.TensorSpec((), tf.float32), becomes=3 * count)
    names = [weight.name for weight in weights]
    buffer_names = [buffer.name for buffer in buffers]

    def run(*arguments: Any) -> Any:
        weight_tensors = arguments[:count]
        first_moments = arguments[count : 2 * count]
        second_moments = arguments[2 * count : 3 * count]
        step = arguments[3 * count]
        batch = dict(zip(BATCH, arguments[-len(BATCH) :], strict=True))
        buffer_tensors = dict(zip(buffer_names, arguments[3 * count + 1 :], strict=False))
        with tf.GradientTape() as tape:
            tape.watch(weight_tensors)
            seed = tf.stack([0, tf.cast(step, tf.int32)])  # of dropout
            all_weights = {**dict(zip(names, weight_tensors, strict=True)), **buffer_tensors}
            total, number = loss_sum(program, batch, all_weights, seed, shifted=shifts_labels(model))
            loss = total / number
        gradients = tape.gradient(loss, weight_tensors, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        inputs = zip(weight_tensors, gradients, first_moments, second_moments, strict=True)
        updated = [_adamw(*tensors, step + 1.0) for tensors in inputs]
        results = [tensors[group] for group in range(3) for tensors in updated]
        return [*results, step + 1.0, loss]

    data = [_Input(name, "data", tf.TensorSpec((rows, length), tf.int64)) for name in BATCH]
    inputs = [*weights, *moments, step_count, *buffers, *data]
    return _program(run, inputs, num_results=3 * count + 2, rows=rows, model=model)


def _adamw(weight: Any, gradient: Any, first: Any, second: Any, step: Any) -> tuple[Any, Any, Any]:
    """Update a weight as torch.optim.AdamW does."""
    gradient = tf.convert_to_tensor(gradient)
    first = BETAS[0] * first + (1 - BETAS[0]) * gradient
    second = BETAS[1] * second + (1 - BETAS[1]) * gradient * gradient
    size = tf.sqrt(second / (1 - BETAS[1] ** step)) + EPSILON
    return weight * (1 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE * (first / (1 - BETAS[0] ** step)) / size, first, second


def _weights(model: Any) -> list[_Input]:
    """Return one input for each weight. Tied weights are one input."""
    state = model.state_dict()
    first = [name for name, first in first_names(model).items() if name == first]
    specs = {name: tf.TensorSpec(tuple(tensor.shape), TENSORFLOW_DTYPES[tensor.dtype]) for name, tensor in state.items()}
    return [_Input(name, "weights", specs[name]) for name in first]


def _program(run: Callable[..., Any], inputs: Sequence[_Input], *, num_results: int, rows: int, model: Any) -> Program:
    function = tf.function(run, jit_compile=True, autograph=False)
    hlo = function.experimental_get_compiler_ir(*(entry.spec for entry in inputs))(stage="hlo_serialized")
    arguments = []
    for entry in inputs:
        shape = entry.spec.shape
        num_bytes = shape.num_elements() * entry.spec.dtype.size
        divided = entry.part == "data" and shape.rank > 0 and shape[0] == rows
        arguments.append(Argument(name=entry.name, part=entry.part, num_bytes=num_bytes, becomes=entry.becomes, divided=divided))
    return Program(hlo, tuple(arguments), num_results, sum(parameter.numel() for parameter in model.parameters()))
