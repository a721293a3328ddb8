"""Lower lookups, gathers and scatters of numbers by their places. Out of range is not checked, as on every
accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from torch.fx import Node

from upshift.xla.lowering.registry import as_dtype, inverse, lowers, moved, positive


@lowers("aten.embedding.default")
def _embedding(node: Node, table: tf.Tensor, places: tf.Tensor, *_: Any, **__: Any) -> tf.Tensor:
    return tf.gather(table, places)


@lowers("aten.index_select.default")
def _index_select(node: Node, value: tf.Tensor, dim: int, places: tf.Tensor) -> tf.Tensor:
    return tf.gather(value, tf.reshape(places, [-1]), axis=dim)


@lowers("aten.gather.default")
def _gather(node: Node, value: tf.Tensor, dim: int, places: tf.Tensor, **_: Any) -> tf.Tensor:
    rank = len(value.shape)
    if rank == 0:
        return value
    order = _last(rank, dim)
    turned = moved(places, order)
    kept = moved(value, order)[tuple(slice(0, size) for size in turned.shape[:-1])]  # places may have fewer rows
    return moved(tf.gather(kept, turned, axis=-1, batch_dims=rank - 1), order)


def _last(rank: int, dim: int) -> list[int]:
    order = list(range(rank))
    dim = positive(dim, rank)
    order[dim], order[-1] = order[-1], order[dim]
    return order


def _coordinates(value: tf.Tensor, places: Sequence[tf.Tensor | None]) -> tuple[tf.Tensor, list[int]]:
    """Return the coordinates of every number that ``places`` name, over the dimensions that they index, and these
    dimensions."""
    dims = [dim for dim, one in enumerate(places) if one is not None]
    found = []
    for dim in dims:
        one = tf.cast(places[dim], tf.int64)
        found.append(tf.where(one < 0, one + int(value.shape[dim]), one))
    shape = found[0].shape
    for one in found[1:]:
        shape = tf.broadcast_static_shape(shape, one.shape)
    return tf.stack([tf.broadcast_to(one, shape) for one in found], -1), dims


def _indexed_first(dims: list[int], rank: int) -> list[int]:
    return [*dims, *(dim for dim in range(rank) if dim not in dims)]


def _result_order(dims: list[int], rank: int, width: int) -> list[int]:
    """Return where torch puts the indexed dimensions: in their place if they stand together, in front if they do not."""
    rest = rank - len(dims)
    before = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    return [*range(width, width + before), *range(width), *range(width + before, width + rest)]


def _without_masks(value: tf.Tensor, places: Sequence[tf.Tensor | None]) -> None:
    if any(one is not None and one.dtype == tf.bool for one in places):
        raise NotImplementedError("a boolean index makes a shape that depends on data")


@lowers("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(node: Node, value: tf.Tensor, places: Sequence[tf.Tensor | None]) -> tf.Tensor:
    _without_masks(value, places)
    rank = len(value.shape)
    coordinates, dims = _coordinates(value, places)
    found = tf.gather_nd(moved(value, _indexed_first(dims, rank)), coordinates)
    return moved(found, _result_order(dims, rank, len(coordinates.shape) - 1))


@lowers("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(
    node: Node, value: tf.Tensor, places: Sequence[tf.Tensor | None], source: tf.Tensor, accumulate: bool = False
) -> tf.Tensor:  # fmt: skip
    if len(places) == 1 and places[0] is not None and places[0].dtype == tf.bool:
        mask = tf.reshape(places[0], [*places[0].shape, *[1] * (len(value.shape) - len(places[0].shape))])
        if len(source.shape) == 0:
            return tf.where(mask, tf.cast(source, value.dtype), value)
    _without_masks(value, places)
    rank = len(value.shape)
    coordinates, dims = _coordinates(value, places)
    order = _indexed_first(dims, rank)
    width = len(coordinates.shape) - 1
    turned = moved(value, order)
    at_result = _result_order(dims, rank, width)
    shape = [*coordinates.shape[:-1], *turned.shape[len(dims) :]]
    updates = moved(tf.broadcast_to(tf.cast(source, value.dtype), [shape[dim] for dim in at_result]), inverse(at_result))
    scatter = tf.tensor_scatter_nd_add if accumulate else tf.tensor_scatter_nd_update
    return moved(scatter(turned, coordinates, updates), inverse(order))


@lowers("aten.index_copy.default")
def _index_copy(node: Node, value: tf.Tensor, dim: int, places: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """Copy values to places. One place, as a step of generation writes, is one slice that XLA updates where it is."""
    dim = positive(dim, len(value.shape))
    if places.shape != (1,):
        order = _indexed_first([dim], len(value.shape))
        written = tf.tensor_scatter_nd_update(moved(value, order), tf.cast(places, tf.int64)[:, None], moved(source, order))
        return moved(written, inverse(order))
    start = [tf.constant(0, tf.int64)] * len(value.shape)
    start[dim] = tf.cast(places[0], tf.int64)
    return xla.dynamic_update_slice(value, source, tf.stack(start))


@lowers("aten.scatter.src")
def _scatter(node: Node, value: tf.Tensor, dim: int, places: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    cut = source[tuple(slice(0, size) for size in places.shape)]
    return tf.tensor_scatter_nd_update(value, _full_coordinates(dim, places), tf.cast(cut, value.dtype))


@lowers("aten.scatter.value")
def _scatter_value(node: Node, value: tf.Tensor, dim: int, places: tf.Tensor, number: Any) -> tf.Tensor:
    updates = tf.fill(places.shape, as_dtype(number, value.dtype))
    return tf.tensor_scatter_nd_update(value, _full_coordinates(dim, places), updates)


@lowers("aten.scatter_add.default")
def _scatter_add(node: Node, value: tf.Tensor, dim: int, places: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    cut = source[tuple(slice(0, size) for size in places.shape)]
    return tf.tensor_scatter_nd_add(value, _full_coordinates(dim, places), cut)


def _full_coordinates(dim: int, places: tf.Tensor) -> tf.Tensor:
    shape = [int(size) for size in places.shape]
    found = []
    for place, size in enumerate(shape):
        along = [1] * len(shape)
        along[place] = size
        found.append(tf.broadcast_to(tf.reshape(tf.range(size, dtype=tf.int64), along), shape))
    found[positive(dim, len(shape))] = tf.cast(places, tf.int64)
    return tf.stack(found, -1)
