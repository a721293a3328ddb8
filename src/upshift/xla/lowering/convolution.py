"""Lower convolutions, pooling and the resizing of images.

torch puts channels before the spatial dimensions, and TensorFlow on CPUs puts them after. So each operator is transposed before
and after, and XLA chooses its own layout. Sizes are static, so a linear resize is a product with a constant matrix for each
dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import lowers, permute, torch_result, widen_half


def _channels_last(rank: int) -> list[int]:
    return [0, *range(2, rank), 1]


def _channels_first(rank: int) -> list[int]:
    return [0, rank - 1, *range(1, rank - 1)]


def _per_dimension(values: Sequence[int], count: int) -> list[int]:
    """Return one value for each of ``count`` dimensions. torch may give a single value for all."""
    return list(values) if len(values) == count else [values[0]] * count


@lowers("aten.convolution.default")
def _convolution(
    node: Node,
    value: tf.Tensor,
    weight: tf.Tensor,
    bias: tf.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> tf.Tensor:
    rank = len(value.shape)
    space = rank - 2
    stride = _per_dimension(stride, space)
    padding = _per_dimension(padding, space)
    dilation = _per_dimension(dilation, space)
    dtype = value.dtype
    if bias is not None:  # half precision is rounded once, after the bias
        value = widen_half(value)
        weight = widen_half(weight)
        bias = widen_half(bias)
    turned = permute(value, _channels_last(rank))
    if transposed:
        output = _transposed(turned, weight, stride, padding, dilation, _per_dimension(output_padding, space), groups)
    else:
        padded = tf.pad(turned, [[0, 0], *([pad, pad] for pad in padding), [0, 0]])
        output = _grouped(padded, tf.transpose(weight, [*range(2, rank), 1, 0]), stride, dilation, groups)
    if bias is not None:
        output = tf.cast(output + bias, dtype)
    return permute(output, _channels_first(rank))


def _grouped(value: tf.Tensor, kernel: tf.Tensor, stride: list[int], dilation: list[int], groups: int) -> tf.Tensor:
    """Convolve a value with channels last and no padding, in ``groups`` groups of channels."""

    def convolve(part: tf.Tensor, filters: tf.Tensor) -> tf.Tensor:
        return tf.nn.convolution(part, filters, strides=stride, padding="VALID", dilations=dilation)

    if groups == 1:
        return convolve(value, kernel)
    channels = int(value.shape[-1])
    if len(stride) == 2 and groups == channels and stride[0] == stride[1]:  # depthwise: one pass over the image
        multiplier = int(kernel.shape[-1]) // groups
        shape = [*kernel.shape[:2], groups, multiplier]
        return tf.nn.depthwise_conv2d(value, tf.reshape(kernel, shape), [1, *stride, 1], "VALID", dilations=dilation)
    if len(stride) == 1 and groups == channels:
        return tf.squeeze(_grouped(value[:, :, None], kernel[:, None], [*stride, *stride], [*dilation, 1], groups), 2)
    parts = zip(tf.split(value, groups, axis=-1), tf.split(kernel, groups, axis=-1), strict=True)
    return tf.concat([convolve(part, filters) for part, filters in parts], axis=-1)


def _transposed(
    value: tf.Tensor,
    weight: tf.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_padding: list[int],
    groups: int,
) -> tf.Tensor:
    """Convolve the value, with zeros inserted between its numbers, with the reversed kernel: a transposed convolution."""
    rank = len(value.shape)
    sizes = [int(size) for size in weight.shape[2:]]
    spread = value
    for axis, step in enumerate(stride):
        spread = _insert_zeros(spread, axis + 1, step)
    edges = []
    for size, pad, dilate, extra in zip(sizes, padding, dilation, output_padding, strict=True):
        left = dilate * (size - 1) - pad
        edges.append([left, left + extra])
    cut = tuple([slice(None), *(slice(max(0, -low), None if high >= 0 else high) for low, high in edges)])
    spread = tf.pad(spread[cut], [[0, 0], *([max(0, low), max(0, high)] for low, high in edges), [0, 0]])
    turned = tf.reverse(weight, list(range(2, rank)))  # [in, out / groups, ..]
    kernels = [tf.transpose(group, [*range(2, rank), 0, 1]) for group in tf.split(turned, groups, axis=0)]
    return _grouped(spread, tf.concat(kernels, axis=-1), [1] * len(stride), dilation, groups)


def _insert_zeros(value: tf.Tensor, dim: int, step: int) -> tf.Tensor:
    """Insert ``step - 1`` zeros between neighbours along a dimension."""
    if step == 1:
        return value
    shape = [int(size) for size in value.shape]
    wide = tf.pad(tf.expand_dims(value, dim + 1), [[0, 0]] * (dim + 1) + [[0, step - 1]] + [[0, 0]] * (len(shape) - dim - 1))
    shape[dim] *= step
    spread = tf.reshape(wide, shape)
    return spread[tuple([slice(None)] * dim + [slice(0, shape[dim] - step + 1)])]


@lowers("aten.max_pool2d_with_indices.default")
def _max_pool(
    node: Node,
    value: tf.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[tf.Tensor, None]:
    """Lower the maximum. The indices of the maxima are not lowered, because no model of transformers reads them."""
    pads = _per_dimension(padding, 2)
    edges = [[0, 0], [0, 0]]
    for axis, pad in enumerate(pads):
        edges.append([pad, pad + _ceil_padding(node, value, kernel, stride, pads, axis, ceil_mode)])
    padded = permute(tf.pad(value, edges, constant_values=value.dtype.min), _channels_last(4))
    output = tf.nn.pool(
        padded,
        _per_dimension(kernel, 2),
        "MAX",
        _per_dimension(stride or kernel, 2),
        "VALID",
        dilations=_per_dimension(dilation, 2),
    )
    return permute(output, _channels_first(4)), None


def _ceil_padding(node: Node, value: Any, kernel: Any, stride: Any, pads: list[int], axis: int, ceil_mode: bool) -> int:
    """Return the padding to add at the end of a spatial axis for torch's ``ceil_mode``."""
    if not ceil_mode:
        return 0
    step = _per_dimension(stride or kernel, 2)[axis]
    size = _per_dimension(kernel, 2)[axis]
    output_size = node.meta["val"][0].shape[2 + axis]
    return max(0, (int(output_size) - 1) * step + size - int(value.shape[2 + axis]) - 2 * pads[axis])


@lowers("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default")
def _avg_pool(
    node: Node,
    value: tf.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> tf.Tensor:
    """Average each window with zeros beyond the edges included, then correct the windows where torch divides by less."""
    rank = len(value.shape)
    output_sizes = torch_result(node).shape[2:]
    space = rank - 2
    kernel = _per_dimension(kernel, space)
    padding = _per_dimension(padding, space)
    stride = _per_dimension(stride or kernel, space)
    edges = []
    correction = np.ones([1] * rank)
    for axis, (size, step, pad, count) in enumerate(zip(kernel, stride, padding, output_sizes, strict=True)):
        length = int(value.shape[2 + axis])
        edges.append([pad, max(0, (int(count) - 1) * step + size - length - pad)])
        first = np.arange(int(count)) * step - pad
        low, high = (-pad, length + pad) if count_include_pad else (0, length)
        counted = np.minimum(first + size, high) - np.maximum(first, low)
        along = [1] * rank
        along[2 + axis] = int(count)
        correction = correction * (size / np.reshape(counted, along))
    if divisor_override is not None:
        correction = np.full([1] * rank, math.prod(kernel) / divisor_override)
    padded = permute(tf.pad(widen_half(value), [[0, 0], [0, 0], *edges]), _channels_last(rank))
    output = permute(tf.nn.pool(padded, kernel, "AVG", stride, "VALID"), _channels_first(rank))
    if not np.all(correction == 1):
        output = output * tf.constant(correction, output.dtype)
    return tf.cast(output, value.dtype)


@lowers("aten._adaptive_avg_pool2d.default", "aten.adaptive_avg_pool1d.default")
def _adaptive_avg_pool(node: Node, value: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """Average each of ``size`` parts of the image. The parts overlap if ``size`` does not divide the image evenly."""
    dtype = value.dtype
    value = widen_half(value)
    for dim, count in enumerate(size, start=len(value.shape) - len(size)):
        length = int(value.shape[dim])
        parts = [slice(index * length // count, -(-(index + 1) * length // count)) for index in range(count)]
        pieces = [value[tuple([slice(None)] * dim + [part])] for part in parts]
        value = tf.concat([tf.reduce_mean(piece, axis=dim, keepdims=True) for piece in pieces], axis=dim)
    return tf.cast(value, dtype)


Array = np.ndarray


@lowers("aten.upsample_bilinear2d.vec", "aten.upsample_linear1d.vec", "aten.upsample_trilinear3d.vec")
def _interpolate_linear(
    node: Node, value: tf.Tensor, size: Sequence[int] | None, align_corners: bool, scales: Sequence[float] | None
) -> tf.Tensor:
    """Interpolate linearly between the two nearest numbers, at the positions of torch's area_pixel_compute_source_index."""

    def source_positions(count: int, length: int, scale: float | None) -> Array:
        if align_corners:
            return np.arange(count) * ((length - 1) / (count - 1) if count > 1 else 0.0)
        step = 1 / scale if scale else length / count
        centres: Array = np.maximum((np.arange(count) + 0.5) * step - 0.5, 0)
        return centres

    def interpolation_matrix(count: int, length: int, scale: float | None) -> Array:
        positions = source_positions(count, length, scale)
        low = np.minimum(np.floor(positions).astype(int), length - 1)
        share = positions - low
        matrix = np.zeros((count, length))
        np.add.at(matrix, (np.arange(count), low), 1 - share)
        np.add.at(matrix, (np.arange(count), np.minimum(low + 1, length - 1)), share)
        return matrix

    wide = widen_half(value)
    for dim, count in enumerate(torch_result(node).shape[2:], start=2):
        length = int(value.shape[dim])
        scale = scales[dim - 2] if scales else None
        matrix = tf.constant(interpolation_matrix(int(count), length, scale), wide.dtype)
        wide = _move_last_to(tf.tensordot(wide, matrix, [[dim], [1]]), dim)
    return tf.cast(wide, value.dtype)


@lowers("aten.upsample_nearest1d.vec", "aten.upsample_nearest2d.vec", "aten.upsample_nearest3d.vec")
def _interpolate_nearest(node: Node, value: tf.Tensor, size: Sequence[int] | None, scales: Sequence[float] | None) -> tf.Tensor:
    for dim, count in enumerate(torch_result(node).shape[2:], start=2):
        length = int(value.shape[dim])
        step = np.float32(1 / scales[dim - 2] if scales else length / int(count))  # torch counts in float32
        indices = np.minimum(np.floor(np.arange(int(count), dtype=np.float32) * step).astype(int), length - 1)
        value = tf.gather(value, indices, axis=dim)
    return value


def _move_last_to(value: tf.Tensor, dim: int) -> tf.Tensor:
    last = len(value.shape) - 1
    return permute(value, [*range(dim), last, *range(dim, last)])
