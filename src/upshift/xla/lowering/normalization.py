"""Lower softmax and the normalizations. Statistics of half precision are in float32, as in torch's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import as_wide, lowers, result_dtype


@lowers("aten._softmax.default", "aten._safe_softmax.default")
def _softmax(node: Node, value: tf.Tensor, dim: int, *_: Any) -> tf.Tensor:
    return tf.cast(tf.nn.softmax(as_wide(value), axis=dim), result_dtype(node))


@lowers("aten._log_softmax.default")
def _log_softmax(node: Node, value: tf.Tensor, dim: int, *_: Any) -> tf.Tensor:
    return tf.cast(tf.nn.log_softmax(as_wide(value), axis=dim), result_dtype(node))


def _normalized(
    value: tf.Tensor, dims: Sequence[int], epsilon: float, weight: tf.Tensor | None, bias: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The value, its mean and the inverse of its deviation, all wide. ``weight`` and ``bias`` are broadcast as they are."""
    wide = as_wide(value)
    mean = tf.reduce_mean(wide, list(dims), keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(wide, mean), list(dims), keepdims=True)
    inverse = tf.math.rsqrt(variance + epsilon)
    made = (wide - mean) * inverse
    made = made if weight is None else made * tf.cast(weight, made.dtype)
    return made if bias is None else made + tf.cast(bias, made.dtype), mean, inverse


@lowers("aten.native_layer_norm.default")
def _layer_norm(
    node: Node, value: tf.Tensor, shape: Sequence[int], weight: tf.Tensor | None, bias: tf.Tensor | None, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    rank = len(value.shape)
    made, mean, inverse = _normalized(value, range(rank - len(shape), rank), epsilon, weight, bias)
    return tf.cast(made, value.dtype), mean, inverse


@lowers("aten.native_group_norm.default")
def _group_norm(
    node: Node, value: tf.Tensor, weight: tf.Tensor | None, bias: tf.Tensor | None, batch: int, channels: int, size: int,
    groups: int, epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:  # fmt: skip
    grouped = tf.reshape(value, [batch, groups, channels // groups, size])
    along = [1, groups, channels // groups, 1]
    shaped = [None if one is None else tf.reshape(one, along) for one in (weight, bias)]
    made, mean, inverse = _normalized(grouped, (2, 3), epsilon, *shaped)
    return tf.cast(tf.reshape(made, value.shape), value.dtype), mean[:, :, 0, 0], inverse[:, :, 0, 0]


@lowers("aten._native_batch_norm_legit_no_training.default")
def _batch_norm(
    node: Node, value: tf.Tensor, weight: tf.Tensor | None, bias: tf.Tensor | None, mean: tf.Tensor, variance: tf.Tensor,
    momentum: float, epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:  # fmt: skip
    """Normalize by the statistics that the model keeps. With those of the batch, which training would change, it is
    not lowered."""
    wide = as_wide(value)
    along = [1, int(value.shape[1]), *[1] * (len(value.shape) - 2)]
    made = (wide - tf.reshape(as_wide(mean), along)) * tf.math.rsqrt(tf.reshape(as_wide(variance), along) + epsilon)
    made = made if weight is None else made * tf.reshape(as_wide(weight), along)
    made = made if bias is None else made + tf.reshape(as_wide(bias), along)
    nothing = tf.zeros([0], wide.dtype)
    return tf.cast(made, value.dtype), nothing, nothing
