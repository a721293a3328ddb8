"""Lower matrix products, and Fourier transforms. Sums are in float32 on TPUs and CPUs whatever the dtype, which is
torch's own practice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import as_wide, is_half, lowers, moved, positive


@lowers("aten.mm.default", "aten.bmm.default", "aten.matmul.default")
def _product(node: Node, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.matmul(left, right)


@lowers("aten.addmm.default", "aten.baddbmm.default")
def _added_product(
    node: Node, bias: tf.Tensor, left: tf.Tensor, right: tf.Tensor, *, beta: float = 1, alpha: float = 1
) -> tf.Tensor:  # fmt: skip
    """Add a bias to a product. Half precision is rounded once, behind the bias."""
    product = _wide_product(left, right) if is_half(left.dtype) else tf.matmul(left, right)
    if alpha != 1:
        product = product * tf.constant(alpha, product.dtype)
    if beta != 0:
        wide = as_wide(bias)
        product += wide if beta == 1 else wide * tf.constant(beta, wide.dtype)
    return tf.cast(product, left.dtype)


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _wide_product(left: tf.Tensor, right: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tuple[tf.Tensor, tf.Tensor]]]:
    """Multiply half precision in float32. TensorFlow's own gradients of it would be products in float32, too."""

    def gradient(of_product: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # Nothing is lost: what comes from a rounded result was half precision.
        half = tf.cast(of_product, left.dtype)
        return tf.matmul(half, right, transpose_b=True), tf.matmul(left, half, transpose_a=True)

    return tf.matmul(left, right, output_type=tf.float32), gradient


@lowers("aten.dot.default")
def _dot(node: Node, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reduce_sum(as_wide(left) * as_wide(right)), left.dtype)


@lowers("aten.mv.default")
def _mv(node: Node, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.linalg.matvec(left, right)


@lowers("aten._cdist_forward.default", "aten.cdist.default")
def _cdist(node: Node, left: tf.Tensor, right: tf.Tensor, power: float = 2.0, *_: object) -> tf.Tensor:
    difference = tf.abs(as_wide(left)[..., :, None, :] - as_wide(right)[..., None, :, :])
    return tf.cast(tf.pow(tf.reduce_sum(tf.pow(difference, power), -1), 1 / power), left.dtype)


@lowers("aten._fft_c2c.default")
def _fft(node: Node, value: tf.Tensor, dims: Sequence[int], normalization: int, forward: bool) -> tf.Tensor:
    """Transform over ``dims``. ``normalization``: torch divides by nothing, the root of the size, or the size."""
    rank = len(value.shape)
    size = 1
    for dim in (positive(dim, rank) for dim in dims):
        order = list(range(rank))
        order[dim], order[-1] = order[-1], order[dim]
        size *= int(value.shape[dim])
        value = moved((tf.signal.fft if forward else tf.signal.ifft)(moved(value, order)), order)
    scale = (1.0 if forward else float(size)) / (1.0, math.sqrt(size), float(size))[normalization]
    return value if scale == 1 else value * tf.constant(scale, value.dtype)
