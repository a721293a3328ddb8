"""Lower operators from many numbers to one or few: sums, means, extremes, sorting, running sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import LOWERINGS, as_wide, dims_of, lowers, moved, positive, result, result_dtype

Dims = int | Sequence[int] | None


@lowers("aten.sum.dim_IntList", "aten.sum.default")
def _sum(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False, **_: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(value, result_dtype(node)), dims_of(dims, len(value.shape)), keepdims=keepdim)


@lowers("aten.mean.dim", "aten.mean.default")
def _mean(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False, **_: Any) -> tf.Tensor:
    dtype = result_dtype(node)
    wide = tf.cast(value, tf.float32 if dtype.size < 4 else dtype)  # as torch sums half precision
    return tf.cast(tf.reduce_mean(wide, dims_of(dims, len(value.shape)), keepdims=keepdim), dtype)


@lowers("aten.linalg_vector_norm.default")
def _vector_norm(node: Node, value: tf.Tensor, order: float = 2, dims: Dims = None, keepdim: bool = False, **_: Any) -> tf.Tensor:
    dtype = result_dtype(node)
    sizes = tf.abs(tf.cast(value, tf.float32 if dtype.size < 4 else dtype))
    over = dims_of(dims, len(value.shape))
    if math.isinf(order):
        found = (tf.reduce_max if order > 0 else tf.reduce_min)(sizes, over, keepdims=keepdim)
    elif order == 2:
        found = tf.sqrt(tf.reduce_sum(tf.square(sizes), over, keepdims=keepdim))
    else:
        found = tf.pow(tf.reduce_sum(tf.pow(sizes, order), over, keepdims=keepdim), 1 / order)
    return tf.cast(found, dtype)


@lowers("aten.prod.dim_int", "aten.prod.default")
def _prod(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False, **_: Any) -> tf.Tensor:
    return tf.reduce_prod(tf.cast(value, result_dtype(node)), dims_of(dims, len(value.shape)), keepdims=keepdim)


@lowers("aten.any.dim", "aten.any.dims", "aten.any.default")
def _any(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False) -> tf.Tensor:
    return tf.reduce_any(tf.cast(value, tf.bool), dims_of(dims, len(value.shape)), keepdims=keepdim)


@lowers("aten.all.dim", "aten.all.dims", "aten.all.default")
def _all(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False) -> tf.Tensor:
    return tf.reduce_all(tf.cast(value, tf.bool), dims_of(dims, len(value.shape)), keepdims=keepdim)


def _extreme(compute: Callable[..., tf.Tensor], of_bool: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    def lowering(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False) -> tf.Tensor:
        reduce = of_bool if value.dtype == tf.bool else compute
        return reduce(value, dims_of(dims, len(value.shape)), keepdims=keepdim)

    return lowering


for _name, _compute, _of_bool in (("max", tf.reduce_max, tf.reduce_any), ("min", tf.reduce_min, tf.reduce_all)):
    for _operator in (f"aten.a{_name}.default", f"aten.{_name}.default"):
        LOWERINGS[_operator] = _extreme(_compute, _of_bool)


@lowers("aten.argmax.default")
def _argmax(node: Node, value: tf.Tensor, dim: int | None = None, keepdim: bool = False) -> tf.Tensor:
    return _place(node, tf.argmax, value, dim)


@lowers("aten.argmin.default")
def _argmin(node: Node, value: tf.Tensor, dim: int | None = None, keepdim: bool = False) -> tf.Tensor:
    return _place(node, tf.argmin, value, dim)


def _place(node: Node, compute: Callable[..., tf.Tensor], value: tf.Tensor, dim: int | None) -> tf.Tensor:
    flat = tf.reshape(value, [-1]) if dim is None else value
    return tf.reshape(compute(flat, axis=0 if dim is None else dim, output_type=tf.int64), list(result(node).shape))


@lowers("aten.max.dim")
def _max_dim(node: Node, value: tf.Tensor, dim: int, keepdim: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
    return _extreme_and_place(node, tf.reduce_max, tf.argmax, value, dim)


@lowers("aten.min.dim")
def _min_dim(node: Node, value: tf.Tensor, dim: int, keepdim: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
    return _extreme_and_place(node, tf.reduce_min, tf.argmin, value, dim)


def _extreme_and_place(
    node: Node, compute: Callable[..., tf.Tensor], place: Callable[..., tf.Tensor], value: tf.Tensor, dim: int
) -> tuple[tf.Tensor, tf.Tensor]:
    shape = list(result(node, 0).shape)
    return tf.reshape(compute(value, axis=dim), shape), tf.reshape(place(value, axis=dim, output_type=tf.int64), shape)


@lowers("aten.cumsum.default")
def _cumsum(node: Node, value: tf.Tensor, dim: int, **_: Any) -> tf.Tensor:
    return tf.cumsum(tf.cast(value, result_dtype(node)), axis=dim) if len(value.shape) else tf.cast(value, result_dtype(node))


@lowers("aten.cumprod.default")
def _cumprod(node: Node, value: tf.Tensor, dim: int, **_: Any) -> tf.Tensor:
    return tf.math.cumprod(tf.cast(value, result_dtype(node)), axis=dim)


@lowers("aten.var.correction", "aten.var.dim")
def _var(
    node: Node, value: tf.Tensor, dims: Dims = None, unbiased: bool = True, keepdim: bool = False, *,
    correction: float | None = None,
) -> tf.Tensor:  # fmt: skip
    over = dims_of(dims, len(value.shape))
    count = 1
    for dim in over:
        count *= int(value.shape[dim])
    taken = (1 if unbiased else 0) if correction is None else correction
    wide = as_wide(value)
    centred = wide - tf.reduce_mean(wide, over, keepdims=True)
    found = tf.reduce_sum(tf.square(centred), over, keepdims=keepdim) / tf.constant(max(count - taken, 0), wide.dtype)
    return tf.cast(found, value.dtype)


@lowers("aten.topk.default")
def _topk(
    node: Node, value: tf.Tensor, count: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[tf.Tensor, tf.Tensor]:  # fmt: skip
    order, back = _last(value, dim)
    asked = moved(value, order)
    found, places = tf.math.top_k(asked if largest else -asked, count)
    return moved(found if largest else -found, back), moved(tf.cast(places, tf.int64), back)


@lowers("aten.sort.default", "aten.sort.stable")
def _sort(node: Node, value: tf.Tensor, dim: int = -1, descending: bool = False, **_: Any) -> tuple[tf.Tensor, tf.Tensor]:
    direction = "DESCENDING" if descending else "ASCENDING"
    places = tf.argsort(value, axis=dim, direction=direction, stable=True)
    axis = positive(dim, len(value.shape))
    order, back = _last(value, axis)
    found = tf.gather(moved(value, order), moved(places, order), axis=-1, batch_dims=len(value.shape) - 1)
    return moved(found, back), tf.cast(places, tf.int64)


def _last(value: tf.Tensor, dim: int) -> tuple[list[int], list[int]]:
    """Return the order that puts a dimension last. The dimension is exchanged with the last one, so the order is its
    own inverse."""
    order = list(range(len(value.shape)))
    dim = positive(dim, len(order))
    order[dim], order[-1] = order[-1], order[dim]
    return order, order
