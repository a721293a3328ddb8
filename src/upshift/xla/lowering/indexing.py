"""Lower look-ups, gathers and scatters by index. Indices out of range are not checked, as on every accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from torch.fx import Node

from upshift.xla.lowering.registry import as_dtype, inverse_order, lowers, permute, positive_dim, swap_with_last


@lowers("aten.embedding.default")
def _embedding(node: Node, table: tf.Tensor, indices: tf.Tensor, *_: Any, **__: Any) -> tf.Tensor:
    return tf.gather(table, indices)


@lowers("aten.index_select.default")
def _index_select(node: Node, value: tf.Tensor, dim: int, indices: tf.Tensor) -> tf.Tensor:
    return tf.gather(value, tf.reshape(indices, [-1]), axis=dim)


@lowers("aten.gather.default")
def _gather(node: Node, value: tf.Tensor, dim: int, indices: tf.Tensor, **_: Any) -> tf.Tensor:
    rank = len(value.shape)
    if rank == 0:
        return value
    order = swap_with_last(rank, dim)
    turned = permute(indices, order)
    rows = permute(value, order)[
        tuple(slice(0, size) for size in turned.shape[:-1])
    ]  # indices may have fewer rows than the value
    return permute(tf.gather(rows, turned, axis=-1, batch_dims=rank - 1), order)


def _coordinates(value: tf.Tensor, indices: Sequence[tf.Tensor | None]) -> tuple[tf.Tensor, list[int]]:
    """Return the coordinates of every number that ``places`` name, over the dimensions that they index, and these
    dimensions."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    coordinates = []
    for dim in dims:
        index = tf.cast(indices[dim], tf.int64)
        coordinates.append(tf.where(index < 0, index + int(value.shape[dim]), index))
    shape = coordinates[0].shape
    for index in coordinates[1:]:
        shape = tf.broadcast_static_shape(shape, index.shape)
    return tf.stack([tf.broadcast_to(index, shape) for index in coordinates], -1), dims


def _indexed_first(dims: list[int], rank: int) -> list[int]:
    """Return the order of dimensions with the indexed ones first."""
    return [*dims, *(dim for dim in range(rank) if dim not in dims)]


def _result_order(dims: list[int], rank: int, width: int) -> list[int]:
    """Return the order of the result's dimensions, given that the ``width`` indexed ones come first.

    torch leaves the indexed dimensions where they are if they are adjacent, and otherwise puts them in front."""
    remaining = rank - len(dims)
    leading = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    return [*range(width, width + leading), *range(width), *range(width + leading, width + remaining)]


def _reject_masks(indices: Sequence[tf.Tensor | None]) -> None:
    """Raise NotImplementedError for a boolean index."""
    if any(index is not None and index.dtype == tf.bool for index in indices):
        raise NotImplementedError("a boolean index makes a shape that depends on data")


@lowers("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(node: Node, value: tf.Tensor, indices: Sequence[tf.Tensor | None]) -> tf.Tensor:
    _reject_masks(indices)
    rank = len(value.shape)
    coordinates, dims = _coordinates(value, indices)
    gathered = tf.gather_nd(permute(value, _indexed_first(dims, rank)), coordinates)
    return permute(gathered, _result_order(dims, rank, len(coordinates.shape) - 1))


@lowers("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(
    node: Node, value: tf.Tensor, indices: Sequence[tf.Tensor | None], source: tf.Tensor, accumulate: bool = False
) -> tf.Tensor:
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == tf.bool:
        mask = tf.reshape(indices[0], [*indices[0].shape, *[1] * (len(value.shape) - len(indices[0].shape))])
        if len(source.shape) == 0:
            return tf.where(mask, tf.cast(source, value.dtype), value)
    _reject_masks(indices)
    rank = len(value.shape)
    coordinates, dims = _coordinates(value, indices)
    order = _indexed_first(dims, rank)
    width = len(coordinates.shape) - 1
    turned = permute(value, order)
    result_order = _result_order(dims, rank, width)
    shape = [*coordinates.shape[:-1], *turned.shape[len(dims) :]]
    broadcast = tf.broadcast_to(tf.cast(source, value.dtype), [shape[dim] for dim in result_order])
    updates = permute(broadcast, inverse_order(result_order))
    scatter = tf.tensor_scatter_nd_add if accumulate else tf.tensor_scatter_nd_update
    return permute(scatter(turned, coordinates, updates), inverse_order(order))


@lowers("aten.index_copy.default")
def _index_copy(node: Node, value: tf.Tensor, dim: int, indices: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """Copy values to indices of a dimension. A single index, as in a step of generation, is a slice that XLA updates in place."""
    dim = positive_dim(dim, len(value.shape))
    if indices.shape != (1,):
        order = _indexed_first([dim], len(value.shape))
        written = tf.tensor_scatter_nd_update(permute(value, order), tf.cast(indices, tf.int64)[:, None], permute(source, order))
        return permute(written, inverse_order(order))
    start = [tf.constant(0, tf.int64)] * len(value.shape)
    start[dim] = tf.cast(indices[0], tf.int64)
    return xla.dynamic_update_slice(value, source, tf.stack(start))


@lowers("aten.scatter.src")
def _scatter(node: Node, value: tf.Tensor, dim: int, indices: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    cut = source[tuple(slice(0, size) for size in indices.shape)]
    return tf.tensor_scatter_nd_update(value, _full_coordinates(dim, indices), tf.cast(cut, value.dtype))


@lowers("aten.scatter.value")
def _scatter_value(node: Node, value: tf.Tensor, dim: int, indices: tf.Tensor, number: Any) -> tf.Tensor:
    updates = tf.fill(indices.shape, as_dtype(number, value.dtype))
    return tf.tensor_scatter_nd_update(value, _full_coordinates(dim, indices), updates)


@lowers("aten.scatter_add.default")
def _scatter_add(node: Node, value: tf.Tensor, dim: int, indices: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    cut = source[tuple(slice(0, size) for size in indices.shape)]
    return tf.tensor_scatter_nd_add(value, _full_coordinates(dim, indices), cut)


def _full_coordinates(dim: int, indices: tf.Tensor) -> tf.Tensor:
    """Return the coordinates, over all dimensions, of the numbers that ``indices`` select along ``dim``."""
    shape = [int(size) for size in indices.shape]
    coordinates = []
    for axis, size in enumerate(shape):
        along = [1] * len(shape)
        along[axis] = size
        coordinates.append(tf.broadcast_to(tf.reshape(tf.range(size, dtype=tf.int64), along), shape))
    coordinates[positive_dim(dim, len(shape))] = tf.cast(indices, tf.int64)
    return tf.stack(coordinates, -1)
