"""Lower operators that create tensors: constants, ranges, random numbers and dropout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import as_dtype, lowers, result_dtype, torch_result, widen_half

SEED: ContextVar[tf.Tensor | None] = ContextVar("seed of the program that runs", default=None)


@lowers("aten.full.default", "aten.full_like.default", "aten.fill.Scalar", "aten.new_full.default")
def _full(node: Node, *arguments: Any, **_: Any) -> tf.Tensor:
    return tf.fill(list(torch_result(node).shape), as_dtype(arguments[-1], result_dtype(node)))


@lowers("aten.empty.memory_format", "aten.empty_like.default", "aten.zeros.default", "aten.zeros_like.default")
def _zeros(node: Node, *_: Any, **__: Any) -> tf.Tensor:
    return tf.zeros(list(torch_result(node).shape), result_dtype(node))


@lowers("aten.ones.default", "aten.ones_like.default")
def _ones(node: Node, *_: Any, **__: Any) -> tf.Tensor:
    return tf.ones(list(torch_result(node).shape), result_dtype(node))


@lowers("aten.scalar_tensor.default")
def _scalar_tensor(node: Node, value: Any, **_: Any) -> tf.Tensor:
    return as_dtype(value, result_dtype(node))


@lowers("aten.fill.Tensor", "aten.copy.default")
def _fill(node: Node, value: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    return tf.broadcast_to(tf.cast(source, value.dtype), value.shape)


@lowers("aten.arange.start_step")
def _arange(node: Node, start: Any, end: Any, step: Any = 1, **_: Any) -> tf.Tensor:
    dtype = result_dtype(node)
    range_dtype = dtype
    if dtype.size <= 2:  # tf.range does not know uint8 and float16
        range_dtype = tf.float32 if dtype.is_floating else tf.int32
    if range_dtype.is_integer:  # torch may write 1.0 for an integer
        start = int(start)
        end = int(end)
        step = int(step)
    return tf.cast(tf.range(start, end, step, dtype=range_dtype), dtype)


@lowers("aten.rand.default")
def _rand(node: Node, size: Sequence[int], **_: Any) -> tf.Tensor:
    return tf.cast(uniform(node, size), result_dtype(node))


@lowers("aten.randn.default")
def _randn(node: Node, size: Sequence[int], **_: Any) -> tf.Tensor:
    return tf.cast(tf.random.stateless_normal(list(size), _seed_of(node)), result_dtype(node))


@lowers("aten.native_dropout.default")
def _native_dropout(node: Node, value: tf.Tensor, probability: float, train: bool | None) -> tuple[tf.Tensor, tf.Tensor]:
    if not train or probability == 0:
        return value, tf.ones(value.shape, tf.bool)
    is_kept = uniform(node, value.shape) >= probability
    wide = widen_half(value)
    factor = 1 / (1 - probability) if probability < 1 else 0.0
    scaled = tf.cast(wide * tf.constant(factor, wide.dtype), value.dtype)
    return tf.where(is_kept, scaled, tf.zeros_like(scaled)), is_kept


@lowers("aten.bernoulli.p", "aten.bernoulli.default")
def _bernoulli(node: Node, value: tf.Tensor, probability: float | None = None) -> tf.Tensor:
    limit = tf.cast(value, tf.float32) if probability is None else probability
    return tf.cast(uniform(node, value.shape) < limit, value.dtype)


def uniform(node: Node, size: Sequence[int]) -> tf.Tensor:
    """Return random numbers in [0, 1) of this shape."""
    return tf.random.stateless_uniform(list(size), _seed_of(node))


def _seed_of(node: Node) -> tf.Tensor:
    """Return a seed for this node: the same program with the same seed draws the same numbers on every device."""
    seed = SEED.get()
    if seed is None:
        raise NotImplementedError("it draws random numbers, and the program was called without a seed")
    return tf.random.experimental.stateless_fold_in(seed, zlib.crc32(node.name.encode()) & 0x7FFFFFFF)
