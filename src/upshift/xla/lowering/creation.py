"""Lower operators that create tensors: constants, ranges, random numbers, and dropout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import as_dtype, as_wide, lowers, result, result_dtype

SEED: ContextVar[tf.Tensor | None] = ContextVar("seed of the program that is being walked", default=None)


@lowers("aten.full.default", "aten.full_like.default", "aten.fill.Scalar", "aten.new_full.default")
def _full(node: Node, *arguments: Any, **_: Any) -> tf.Tensor:
    return tf.fill(list(result(node).shape), as_dtype(arguments[-1], result_dtype(node)))


@lowers("aten.empty.memory_format", "aten.empty_like.default", "aten.zeros.default", "aten.zeros_like.default")
def _zeros(node: Node, *_: Any, **__: Any) -> tf.Tensor:
    return tf.zeros(list(result(node).shape), result_dtype(node))


@lowers("aten.ones.default", "aten.ones_like.default")
def _ones(node: Node, *_: Any, **__: Any) -> tf.Tensor:
    return tf.ones(list(result(node).shape), result_dtype(node))


@lowers("aten.scalar_tensor.default")
def _scalar_tensor(node: Node, value: Any, **_: Any) -> tf.Tensor:
    return as_dtype(value, result_dtype(node))


@lowers("aten.fill.Tensor")
def _fill(node: Node, value: tf.Tensor, filled: tf.Tensor) -> tf.Tensor:
    return tf.broadcast_to(tf.cast(filled, value.dtype), value.shape)


@lowers("aten.arange.start_step")
def _arange(node: Node, start: Any, end: Any, step: Any = 1, **_: Any) -> tf.Tensor:
    dtype = result_dtype(node)
    counted = dtype if dtype.size > 2 else tf.float32 if dtype.is_floating else tf.int32  # tf.range knows no uint8 and float16
    start, end, step = (int(one) if counted.is_integer else one for one in (start, end, step))  # 1.0 is a step of integers, too
    return tf.cast(tf.range(start, end, step, dtype=counted), dtype)


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
    kept = uniform(node, value.shape) >= probability
    wide = as_wide(value)
    scaled = tf.cast(wide * tf.constant(1 / (1 - probability) if probability < 1 else 0.0, wide.dtype), value.dtype)
    return tf.where(kept, scaled, tf.zeros_like(scaled)), kept


@lowers("aten.bernoulli.p", "aten.bernoulli.default")
def _bernoulli(node: Node, value: tf.Tensor, probability: float | None = None) -> tf.Tensor:
    limit = tf.cast(value, tf.float32) if probability is None else probability
    return tf.cast(uniform(node, value.shape) < limit, value.dtype)


def uniform(node: Node, size: Sequence[int]) -> tf.Tensor:
    return tf.random.stateless_uniform(list(size), _seed_of(node))


def _seed_of(node: Node) -> tf.Tensor:
    """Return the seed of this node alone: the same program with the same seed draws the same numbers, wherever it
    runs."""
    seed = SEED.get()
    if seed is None:
        raise NotImplementedError("it draws random numbers, and the program was called without a seed")
    return tf.random.experimental.stateless_fold_in(seed, zlib.crc32(node.name.encode()) & 0x7FFFFFFF)
