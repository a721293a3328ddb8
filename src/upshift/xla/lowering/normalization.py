"""Lower softmax and normalization layers. Statistics of half precision are computed in float32, as in torch's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import lowers, result_dtype, widen_half


@lowers("aten._softmax.default", "aten._safe_softmax.default")
def _softmax(node: Node, value: tf.Tensor, dim: int, *_: Any) -> tf.Tensor:
    return tf.cast(tf.nn.softmax(widen_half(value), axis=dim), result_dtype(node))


@lowers("aten._log_softmax.default")
def _log_softmax(node: Node, value: tf.Tensor, dim: int, *_: Any) -> tf.Tensor:
    return tf.cast(tf.nn.log_softmax(widen_half(value), axis=dim), result_dtype(node))


def _normalize(
    value: tf.Tensor, dims: Sequence[int], epsilon: float, weight: tf.Tensor | None, bias: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the normalized value, its mean and the inverse of its standard deviation, all in float32.

    ``weight`` and ``bias`` must be broadcastable to the value."""
    wide = widen_half(value)
    mean = tf.reduce_mean(wide, list(dims), keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(wide, mean), list(dims), keepdims=True)
    inverse = tf.math.rsqrt(variance + epsilon)
    output = (wide - mean) * inverse
    if weight is not None:
        output = output * tf.cast(weight, output.dtype)
    if bias is not None:
        output = output + tf.cast(bias, output.dtype)
    return output, mean, inverse


@lowers("aten.native_layer_norm.default")
def _layer_norm(
    node: Node, value: tf.Tensor, shape: Sequence[int], weight: tf.Tensor | None, bias: tf.Tensor | None, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    rank = len(value.shape)
    output, mean, inverse = _normalize(value, range(rank - len(shape), rank), epsilon, weight, bias)
    return tf.cast(output, value.dtype), mean, inverse


@lowers("aten.native_group_norm.default")
def _group_norm(
    node: Node,
    value: tf.Tensor,
    weight: tf.Tensor | None,
    bias: tf.Tensor | None,
    batch: int,
    channels: int,
    size: int,
    groups: int,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    grouped = tf.reshape(value, [batch, groups, channels // groups, size])
    along = [1, groups, channels // groups, 1]
    shaped = [None if parameter is None else tf.reshape(parameter, along) for parameter in (weight, bias)]
    output, mean, inverse = _normalize(grouped, (2, 3), epsilon, *shaped)
    return tf.cast(tf.reshape(output, value.shape), value.dtype), mean[:, :, 0, 0], inverse[:, :, 0, 0]


@lowers("aten._native_batch_norm_legit_no_training.default")
def _batch_norm(
    node: Node,
    value: tf.Tensor,
    weight: tf.Tensor | None,
    bias: tf.Tensor | None,
    mean: tf.Tensor,
    variance: tf.Tensor,
    momentum: float,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalize by the running statistics that the model stores. Statistics of the batch, as in training, are not lowered."""
    wide = widen_half(value)
    along = [1, int(value.shape[1]), *[1] * (len(value.shape) - 2)]
    output = (wide - tf.reshape(widen_half(mean), along)) * tf.math.rsqrt(tf.reshape(widen_half(variance), along) + epsilon)
    if weight is not None:
        output = output * tf.reshape(widen_half(weight), along)
    if bias is not None:
        output = output + tf.reshape(widen_half(bias), along)
    no_statistics = tf.zeros([0], wide.dtype)
    return tf.cast(output, value.dtype), no_statistics, no_statistics
