"""Lower convolutions and pooling. torch has channels before space, TensorFlow on CPUs after: they are moved around
each one, and XLA chooses its own layout.

Resize images. Sizes are static, so how much of which row goes where is known before the program is compiled: each
direction is a product with a constant matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import as_wide, lowers, moved, result


def _channels_last(rank: int) -> list[int]:
    return [0, *range(2, rank), 1]


def _channels_first(rank: int) -> list[int]:
    return [0, rank - 1, *range(1, rank - 1)]


def _each(values: Sequence[int], count: int) -> list[int]:
    return list(values) if len(values) == count else [values[0]] * count


@lowers("aten.convolution.default")
def _convolution(
    node: Node, value: tf.Tensor, weight: tf.Tensor, bias: tf.Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> tf.Tensor:  # fmt: skip
    rank = len(value.shape)
    space = rank - 2
    stride, padding, dilation = (_each(one, space) for one in (stride, padding, dilation))
    dtype = value.dtype
    if bias is not None:  # half precision is rounded once, behind it
        value = as_wide(value)
        weight = as_wide(weight)
        bias = as_wide(bias)
    turned = moved(value, _channels_last(rank))
    if transposed:
        made = _transposed(turned, weight, stride, padding, dilation, _each(output_padding, space), groups)
    else:
        padded = tf.pad(turned, [[0, 0], *([one, one] for one in padding), [0, 0]])
        made = _grouped(padded, tf.transpose(weight, [*range(2, rank), 1, 0]), stride, dilation, groups)
    made = made if bias is None else tf.cast(made + bias, dtype)
    return moved(made, _channels_first(rank))


def _grouped(value: tf.Tensor, kernel: tf.Tensor, stride: list[int], dilation: list[int], groups: int) -> tf.Tensor:
    def convolved(one: tf.Tensor, of: tf.Tensor) -> tf.Tensor:
        return tf.nn.convolution(one, of, strides=stride, padding="VALID", dilations=dilation)

    if groups == 1:
        return convolved(value, kernel)
    channels = int(value.shape[-1])
    if len(stride) == 2 and groups == channels and stride[0] == stride[1]:  # depthwise: one pass over the image
        multiplier = int(kernel.shape[-1]) // groups
        shape = [*kernel.shape[:2], groups, multiplier]
        return tf.nn.depthwise_conv2d(value, tf.reshape(kernel, shape), [1, *stride, 1], "VALID", dilations=dilation)
    if len(stride) == 1 and groups == channels:
        return tf.squeeze(_grouped(value[:, :, None], kernel[:, None], [*stride, *stride], [*dilation, 1], groups), 2)
    parts = zip(tf.split(value, groups, axis=-1), tf.split(kernel, groups, axis=-1), strict=True)
    return tf.concat([convolved(one, of) for one, of in parts], axis=-1)


def _transposed(
    value: tf.Tensor, weight: tf.Tensor, stride: list[int], padding: list[int], dilation: list[int], extra: list[int], groups: int
) -> tf.Tensor:
    """Return a convolution of the value with zeros between its numbers, by the kernel turned around."""
    rank = len(value.shape)
    sizes = [int(size) for size in weight.shape[2:]]
    spread = value
    for place, step in enumerate(stride):
        spread = _spread(spread, place + 1, step)
    edges = []
    for size, pad, dilate, more in zip(sizes, padding, dilation, extra, strict=True):
        left = dilate * (size - 1) - pad
        edges.append([left, left + more])
    cut = tuple([slice(None), *(slice(max(0, -low), None if high >= 0 else high) for low, high in edges)])
    spread = tf.pad(spread[cut], [[0, 0], *([max(0, low), max(0, high)] for low, high in edges), [0, 0]])
    turned = tf.reverse(weight, list(range(2, rank)))  # [in, out / groups, ..]
    kernels = [tf.transpose(one, [*range(2, rank), 0, 1]) for one in tf.split(turned, groups, axis=0)]
    return _grouped(spread, tf.concat(kernels, axis=-1), [1] * len(stride), dilation, groups)


def _spread(value: tf.Tensor, dim: int, step: int) -> tf.Tensor:
    if step == 1:
        return value
    shape = [int(size) for size in value.shape]
    wide = tf.pad(tf.expand_dims(value, dim + 1), [[0, 0]] * (dim + 1) + [[0, step - 1]] + [[0, 0]] * (len(shape) - dim - 1))
    shape[dim] *= step
    whole = tf.reshape(wide, shape)
    return whole[tuple([slice(None)] * dim + [slice(0, shape[dim] - step + 1)])]


@lowers("aten.max_pool2d_with_indices.default")
def _max_pool(
    node: Node, value: tf.Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> tuple[tf.Tensor, None]:  # fmt: skip
    """Lower the maximum. Its places are not lowered: no model of transformers reads them."""
    pads = _each(padding, 2)
    edges = [[0, 0], [0, 0], *([one, one + _ceil_more(node, value, kernel, stride, pads, place, ceil_mode)]
             for place, one in enumerate(pads))]  # fmt: skip
    padded = moved(tf.pad(value, edges, constant_values=value.dtype.min), _channels_last(4))
    made = tf.nn.pool(padded, _each(kernel, 2), "MAX", _each(stride or kernel, 2), "VALID", dilations=_each(dilation, 2))
    return moved(made, _channels_first(4)), None


def _ceil_more(node: Node, value: Any, kernel: Any, stride: Any, pads: list[int], place: int, ceil_mode: bool) -> int:
    if not ceil_mode:
        return 0
    step = _each(stride or kernel, 2)[place]
    size = _each(kernel, 2)[place]
    wanted = node.meta["val"][0].shape[2 + place]
    return max(0, (int(wanted) - 1) * step + size - int(value.shape[2 + place]) - 2 * pads[place])


@lowers("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default")
def _avg_pool(
    node: Node, value: tf.Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> tf.Tensor:  # fmt: skip
    """Return the mean of each whole window, zeros beyond the edges included, corrected where torch divides by less."""
    rank = len(value.shape)
    out = result(node).shape[2:]
    space = rank - 2
    kernel = _each(kernel, space)
    padding = _each(padding, space)
    stride = _each(stride or kernel, space)
    edges = []
    less = np.ones([1] * rank)
    for place, (size, step, pad, count) in enumerate(zip(kernel, stride, padding, out, strict=True)):
        whole = int(value.shape[2 + place])
        edges.append([pad, max(0, (int(count) - 1) * step + size - whole - pad)])
        first = np.arange(int(count)) * step - pad
        low, high = (-pad, whole + pad) if count_include_pad else (0, whole)
        counted = np.minimum(first + size, high) - np.maximum(first, low)
        along = [1] * rank
        along[2 + place] = int(count)
        less = less * (size / np.reshape(counted, along))
    if divisor_override is not None:
        less = np.full([1] * rank, math.prod(kernel) / divisor_override)
    padded = moved(tf.pad(as_wide(value), [[0, 0], [0, 0], *edges]), _channels_last(rank))
    made = moved(tf.nn.pool(padded, kernel, "AVG", stride, "VALID"), _channels_first(rank))
    return tf.cast(made if np.all(less == 1) else made * tf.constant(less, made.dtype), value.dtype)


@lowers("aten._adaptive_avg_pool2d.default", "aten.adaptive_avg_pool1d.default")
def _adaptive_avg_pool(node: Node, value: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """Return the mean of each of ``size`` parts, which overlap if they do not divide the image."""
    value, dtype = as_wide(value), value.dtype
    for dim, count in enumerate(size, start=len(value.shape) - len(size)):
        whole = int(value.shape[dim])
        parts = [slice(place * whole // count, -(-(place + 1) * whole // count)) for place in range(count)]
        cut = [value[tuple([slice(None)] * dim + [part])] for part in parts]
        value = tf.concat([tf.reduce_mean(one, axis=dim, keepdims=True) for one in cut], axis=dim)
    return tf.cast(value, dtype)


Numbers = np.ndarray


@lowers("aten.upsample_bilinear2d.vec", "aten.upsample_linear1d.vec", "aten.upsample_trilinear3d.vec")
def _linear(
    node: Node, value: tf.Tensor, size: Sequence[int] | None, align_corners: bool, scales: Sequence[float] | None
) -> tf.Tensor:  # fmt: skip
    """Interpolate between the two nearest, placed as by torch's area_pixel_compute_source_index."""

    def places(count: int, whole: int, scale: float | None) -> Numbers:
        if align_corners:
            return np.arange(count) * ((whole - 1) / (count - 1) if count > 1 else 0.0)
        centres: Numbers = np.maximum((np.arange(count) + 0.5) * (1 / scale if scale else whole / count) - 0.5, 0)
        return centres

    def matrix(count: int, whole: int, scale: float | None) -> Numbers:
        at = places(count, whole, scale)
        low = np.minimum(np.floor(at).astype(int), whole - 1)
        share = at - low
        found = np.zeros((count, whole))
        np.add.at(found, (np.arange(count), low), 1 - share)
        np.add.at(found, (np.arange(count), np.minimum(low + 1, whole - 1)), share)
        return found

    wide = as_wide(value)
    for dim, count in enumerate(result(node).shape[2:], start=2):
        whole = int(value.shape[dim])
        along = tf.constant(matrix(int(count), whole, scales[dim - 2] if scales else None), wide.dtype)
        wide = _last_to(tf.tensordot(wide, along, [[dim], [1]]), dim)
    return tf.cast(wide, value.dtype)


@lowers("aten.upsample_nearest1d.vec", "aten.upsample_nearest2d.vec", "aten.upsample_nearest3d.vec")
def _nearest(node: Node, value: tf.Tensor, size: Sequence[int] | None, scales: Sequence[float] | None) -> tf.Tensor:
    for dim, count in enumerate(result(node).shape[2:], start=2):
        whole = int(value.shape[dim])
        step = np.float32(1 / scales[dim - 2] if scales else whole / int(count))  # torch counts in float32
        places = np.minimum(np.floor(np.arange(int(count), dtype=np.float32) * step).astype(int), whole - 1)
        value = tf.gather(value, places, axis=dim)
    return value


def _last_to(value: tf.Tensor, dim: int) -> tf.Tensor:
    last = len(value.shape) - 1
    return moved(value, [*range(dim), last, *range(dim, last)])
