"""Lower operators that change the shape or the order of numbers: views, slices, concatenation, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import LOWERINGS, as_dtype, lowers, permute, positive_dim, result_dtype, torch_result

LOWERINGS["<built-in function getitem>"] = lambda node, values, index: values[index]


@lowers(
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.squeeze.dims",
    "aten.squeeze.dim",
    "aten.squeeze.default",
    "aten.unsqueeze.default",
)
def _reshaped(node: Node, value: tf.Tensor, *_: Any) -> tf.Tensor:
    return tf.reshape(value, list(torch_result(node).shape))


@lowers("aten.view.dtype")
def _bitcast(node: Node, value: tf.Tensor, *_: Any) -> tf.Tensor:
    return tf.bitcast(value, result_dtype(node))


@lowers("aten.expand.default")
def _expand(node: Node, value: tf.Tensor, *_: Any, **__: Any) -> tf.Tensor:
    return tf.broadcast_to(value, list(torch_result(node).shape))


@lowers("aten.permute.default")
def _permute(node: Node, value: tf.Tensor, dims: Sequence[int]) -> tf.Tensor:
    return permute(value, [positive_dim(dim, len(dims)) for dim in dims])


@lowers("aten.repeat.default")
def _repeat(node: Node, value: tf.Tensor, repeats: Sequence[int]) -> tf.Tensor:
    rank = len(value.shape)
    return tf.tile(tf.reshape(value, [1] * (len(repeats) - rank) + list(value.shape)), list(repeats))


def selection_at(value: tf.Tensor, dim: int, selection: slice | int) -> tuple[slice | int, ...]:
    """Return an index that selects along one dimension and everything along the dimensions before it."""
    return (*[slice(None)] * positive_dim(dim, len(value.shape)), selection)


def bounded_slice(value: tf.Tensor, dim: int, start: int | None, end: int | None, step: int) -> slice:
    """Return a slice that is limited to the size of the dimension, as torch limits it."""
    size = int(value.shape[dim])
    return slice(*slice(start, end, step).indices(size))


@lowers("aten.slice.Tensor")
def _slice(node: Node, value: tf.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return value[selection_at(value, dim, bounded_slice(value, dim, start, end, step))]


@lowers("aten.select.int")
def _select(node: Node, value: tf.Tensor, dim: int, index: int) -> tf.Tensor:
    return value[selection_at(value, dim, index)]


@lowers("aten.slice_scatter.default")
def _slice_scatter(
    node: Node, value: tf.Tensor, source: tf.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tf.Tensor:
    dim = positive_dim(dim, len(value.shape))
    cut = bounded_slice(value, dim, start, end, step)
    order = [dim, *(axis for axis in range(len(value.shape)) if axis != dim)]
    indices = tf.range(cut.start, cut.stop, cut.step)[:, None]
    written = tf.tensor_scatter_nd_update(permute(value, order), indices, permute(tf.cast(source, value.dtype), order))
    return permute(written, [*range(1, dim + 1), 0, *range(dim + 1, len(order))])


@lowers("aten.select_scatter.default")
def _select_scatter(node: Node, value: tf.Tensor, source: tf.Tensor, dim: int, index: int) -> tf.Tensor:
    dim = positive_dim(dim, len(value.shape))
    index = positive_dim(index, int(value.shape[dim]))
    return _slice_scatter(node, value, tf.expand_dims(source, dim), dim, index, index + 1)


@lowers("aten.cat.default")
def _cat(node: Node, values: Sequence[tf.Tensor], dim: int = 0) -> tf.Tensor:
    rank = torch_result(node).dim()
    tensors = [value for value in values if len(value.shape) == rank]  # torch ignores empty vectors of another rank
    return tf.concat([tf.cast(value, result_dtype(node)) for value in tensors], axis=positive_dim(dim, rank))


@lowers("aten.stack.default")
def _stack(node: Node, values: Sequence[tf.Tensor], dim: int = 0) -> tf.Tensor:
    return tf.stack([tf.cast(value, result_dtype(node)) for value in values], axis=positive_dim(dim, torch_result(node).dim()))


@lowers("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default")
def _split_with_sizes(node: Node, value: tf.Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    return tf.split(value, list(sizes), axis=dim)


@lowers("aten.split.Tensor")
def _split(node: Node, value: tf.Tensor, size: int, dim: int = 0) -> Any:
    length = int(value.shape[dim])
    return tf.split(value, [min(size, length - start) for start in range(0, length, size)], axis=dim)


@lowers("aten.unbind.int", "aten.unbind_copy.int")
def _unbind(node: Node, value: tf.Tensor, dim: int = 0) -> Any:
    return tf.unstack(value, axis=dim)


@lowers("aten.flip.default")
def _flip(node: Node, value: tf.Tensor, dims: Sequence[int]) -> tf.Tensor:
    return tf.reverse(value, [positive_dim(dim, len(value.shape)) for dim in dims])


@lowers("aten.roll.default")
def _roll(node: Node, value: tf.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> tf.Tensor:
    if not dims:
        return tf.reshape(tf.roll(tf.reshape(value, [-1]), list(shifts), [0]), value.shape)
    return tf.roll(value, list(shifts), [positive_dim(dim, len(value.shape)) for dim in dims])


def paddings(pad: Sequence[int], rank: int) -> list[list[int]]:
    """Return (before, after) for each dimension, in TensorFlow's order. torch lists the last dimension first."""
    pairs = [[pad[2 * index], pad[2 * index + 1]] for index in range(len(pad) // 2)]
    return [[0, 0]] * (rank - len(pairs)) + pairs[::-1]


@lowers("aten.constant_pad_nd.default")
def _constant_pad(node: Node, value: tf.Tensor, pad: Sequence[int], constant: float = 0) -> tf.Tensor:
    pairs = paddings(pad, len(value.shape))
    crops = []  # negative paddings remove numbers
    pads = []
    for (before, after), size in zip(pairs, value.shape, strict=True):
        crops.append(slice(max(0, -before), int(size) - max(0, -after)))
        pads.append([max(0, before), max(0, after)])
    return tf.pad(value[tuple(crops)], pads, constant_values=as_dtype(constant, value.dtype))


@lowers("aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.reflection_pad3d.default")
def _reflection_pad(node: Node, value: tf.Tensor, pad: Sequence[int]) -> tf.Tensor:
    return tf.pad(value, paddings(pad, len(value.shape)), mode="REFLECT")


@lowers("aten.replication_pad2d.default", "aten.replication_pad3d.default")
def _replication_pad(node: Node, value: tf.Tensor, pad: Sequence[int]) -> tf.Tensor:
    for dim, (before, after) in enumerate(paddings(pad, len(value.shape))):
        if before or after:
            size = int(value.shape[dim])
            indices = tf.clip_by_value(tf.range(-before, size + after), 0, size - 1)
            value = tf.gather(value, indices, axis=dim)
    return value


@lowers("aten.unfold.default")
def _unfold(node: Node, value: tf.Tensor, dim: int, size: int, step: int) -> tf.Tensor:
    rank = len(value.shape)
    dim = positive_dim(dim, rank)
    count = (int(value.shape[dim]) - size) // step + 1
    indices = tf.range(count)[:, None] * step + tf.range(size)[None]
    windows = tf.gather(value, indices, axis=dim)  # [.., count, size, ..]
    return permute(windows, [*range(dim + 1), *range(dim + 2, rank + 1), dim + 1])


@lowers("aten.diagonal.default", "aten.diagonal_copy.default")
def _diagonal(node: Node, value: tf.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> tf.Tensor:
    rank = len(value.shape)
    first = positive_dim(dim1, rank)
    second = positive_dim(dim2, rank)
    order = [dim for dim in range(rank) if dim not in (first, second)] + [first, second]
    return tf.linalg.diag_part(permute(value, order), k=offset)


@lowers("aten.as_strided.default", "aten.as_strided_copy.default")
def _as_strided(node: Node, value: tf.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> tf.Tensor:
    """Lower as_strided of a contiguous tensor. Every tensor of TensorFlow is contiguous."""
    indices = tf.fill(list(size), offset or 0)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[dim] = count
        indices += tf.reshape(tf.range(count) * step, shape)
    return tf.gather(tf.reshape(value, [-1]), indices)
