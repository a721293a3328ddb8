"""Lower reductions, sorting and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import (
    LOWERINGS,
    lowers,
    permute,
    positive_dims,
    result_dtype,
    swap_with_last,
    torch_result,
    widen_half,
)

Dims = int | Sequence[int] | None


@lowers("aten.sum.dim_IntList", "aten.sum.default")
def _sum(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False, **_: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(value, result_dtype(node)), positive_dims(dims, len(value.shape)), keepdims=keepdim)


@lowers("aten.mean.dim", "aten.mean.default")
def _mean(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False, **_: Any) -> tf.Tensor:
    dtype = result_dtype(node)
    wide = tf.cast(value, tf.float32 if dtype.size < 4 else dtype)  # as torch sums half precision
    return tf.cast(tf.reduce_mean(wide, positive_dims(dims, len(value.shape)), keepdims=keepdim), dtype)


@lowers("aten.linalg_vector_norm.default")
def _vector_norm(node: Node, value: tf.Tensor, order: float = 2, dims: Dims = None, keepdim: bool = False, **_: Any) -> tf.Tensor:
    dtype = result_dtype(node)
    magnitudes = tf.abs(tf.cast(value, tf.float32 if dtype.size < 4 else dtype))
    reduced_dims = positive_dims(dims, len(value.shape))
    if math.isinf(order):
        extreme = tf.reduce_max if order > 0 else tf.reduce_min
        norm = extreme(magnitudes, reduced_dims, keepdims=keepdim)
    elif order == 2:
        norm = tf.sqrt(tf.reduce_sum(tf.square(magnitudes), reduced_dims, keepdims=keepdim))
    else:
        norm = tf.pow(tf.reduce_sum(tf.pow(magnitudes, order), reduced_dims, keepdims=keepdim), 1 / order)
    return tf.cast(norm, dtype)


@lowers("aten.prod.dim_int", "aten.prod.default")
def _prod(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False, **_: Any) -> tf.Tensor:
    return tf.reduce_prod(tf.cast(value, result_dtype(node)), positive_dims(dims, len(value.shape)), keepdims=keepdim)


@lowers("aten.any.dim", "aten.any.dims", "aten.any.default")
def _any(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False) -> tf.Tensor:
    return tf.reduce_any(tf.cast(value, tf.bool), positive_dims(dims, len(value.shape)), keepdims=keepdim)


@lowers("aten.all.dim", "aten.all.dims", "aten.all.default")
def _all(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False) -> tf.Tensor:
    return tf.reduce_all(tf.cast(value, tf.bool), positive_dims(dims, len(value.shape)), keepdims=keepdim)


def _extreme(compute: Callable[..., tf.Tensor], of_bool: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Return a lowering that reduces booleans by ``of_bool`` and numbers by ``compute``."""

    def lowering(node: Node, value: tf.Tensor, dims: Dims = None, keepdim: bool = False) -> tf.Tensor:
        reduce = of_bool if value.dtype == tf.bool else compute
        return reduce(value, positive_dims(dims, len(value.shape)), keepdims=keepdim)

    return lowering


for _name, _compute, _of_bool in (("max", tf.reduce_max, tf.reduce_any), ("min", tf.reduce_min, tf.reduce_all)):
    for _operator in (f"aten.a{_name}.default", f"aten.{_name}.default"):
        LOWERINGS[_operator] = _extreme(_compute, _of_bool)


@lowers("aten.argmax.default")
def _argmax(node: Node, value: tf.Tensor, dim: int | None = None, keepdim: bool = False) -> tf.Tensor:
    return _extreme_index(node, tf.argmax, value, dim)


@lowers("aten.argmin.default")
def _argmin(node: Node, value: tf.Tensor, dim: int | None = None, keepdim: bool = False) -> tf.Tensor:
    return _extreme_index(node, tf.argmin, value, dim)


def _extreme_index(node: Node, compute: Callable[..., tf.Tensor], value: tf.Tensor, dim: int | None) -> tf.Tensor:
    if dim is None:
        value = tf.reshape(value, [-1])
        dim = 0
    return tf.reshape(compute(value, axis=dim, output_type=tf.int64), list(torch_result(node).shape))


@lowers("aten.max.dim")
def _max_dim(node: Node, value: tf.Tensor, dim: int, keepdim: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
    return _extreme_with_index(node, tf.reduce_max, tf.argmax, value, dim)


@lowers("aten.min.dim")
def _min_dim(node: Node, value: tf.Tensor, dim: int, keepdim: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
    return _extreme_with_index(node, tf.reduce_min, tf.argmin, value, dim)


def _extreme_with_index(
    node: Node, compute: Callable[..., tf.Tensor], compute_index: Callable[..., tf.Tensor], value: tf.Tensor, dim: int
) -> tuple[tf.Tensor, tf.Tensor]:
    shape = list(torch_result(node, 0).shape)
    extreme = tf.reshape(compute(value, axis=dim), shape)
    index = tf.reshape(compute_index(value, axis=dim, output_type=tf.int64), shape)
    return extreme, index


@lowers("aten.cumsum.default")
def _cumsum(node: Node, value: tf.Tensor, dim: int, **_: Any) -> tf.Tensor:
    cast = tf.cast(value, result_dtype(node))
    return tf.cumsum(cast, axis=dim) if len(value.shape) else cast


@lowers("aten.cumprod.default")
def _cumprod(node: Node, value: tf.Tensor, dim: int, **_: Any) -> tf.Tensor:
    return tf.math.cumprod(tf.cast(value, result_dtype(node)), axis=dim)


@lowers("aten.var.correction", "aten.var.dim")
def _var(
    node: Node,
    value: tf.Tensor,
    dims: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tf.Tensor:
    reduced_dims = positive_dims(dims, len(value.shape))
    count = 1
    for dim in reduced_dims:
        count *= int(value.shape[dim])
    if correction is None:
        correction = 1 if unbiased else 0
    wide = widen_half(value)
    centred = wide - tf.reduce_mean(wide, reduced_dims, keepdims=True)
    variance = tf.reduce_sum(tf.square(centred), reduced_dims, keepdims=keepdim) / tf.constant(
        max(count - correction, 0), wide.dtype
    )
    return tf.cast(variance, value.dtype)


@lowers("aten.topk.default")
def _topk(
    node: Node, value: tf.Tensor, count: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[tf.Tensor, tf.Tensor]:
    order = swap_with_last(len(value.shape), dim)
    turned = permute(value, order)
    values, indices = tf.math.top_k(turned if largest else -turned, count)
    return permute(values if largest else -values, order), permute(tf.cast(indices, tf.int64), order)


@lowers("aten.sort.default", "aten.sort.stable")
def _sort(node: Node, value: tf.Tensor, dim: int = -1, descending: bool = False, **_: Any) -> tuple[tf.Tensor, tf.Tensor]:
    direction = "DESCENDING" if descending else "ASCENDING"
    indices = tf.argsort(value, axis=dim, direction=direction, stable=True)
    order = swap_with_last(len(value.shape), dim)
    values = tf.gather(permute(value, order), permute(indices, order), axis=-1, batch_dims=len(value.shape) - 1)
    return permute(values, order), tf.cast(indices, tf.int64)
