"""Lower matrix products and Fourier transforms. TPUs and CPUs add up in float32 for every dtype, as torch does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import is_half, lowers, permute, positive_dim, swap_with_last, widen_half


@lowers("aten.mm.default", "aten.bmm.default", "aten.matmul.default")
def _product(node: Node, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.matmul(left, right)


@lowers("aten.addmm.default", "aten.baddbmm.default")
def _product_with_bias(
    node: Node, bias: tf.Tensor, left: tf.Tensor, right: tf.Tensor, *, beta: float = 1, alpha: float = 1
) -> tf.Tensor:
    """Add a bias to a product. Half precision is rounded once, after the bias."""
    product = _wide_product(left, right) if is_half(left.dtype) else tf.matmul(left, right)
    if alpha != 1:
        product = product * tf.constant(alpha, product.dtype)
    if beta != 0:
        wide = widen_half(bias)
        product += wide if beta == 1 else wide * tf.constant(beta, wide.dtype)
    return tf.cast(product, left.dtype)


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _wide_product(left: tf.Tensor, right: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tuple[tf.Tensor, tf.Tensor]]]:
    """Multiply half precision into a float32 result. Its gradients are products in half precision, unlike TensorFlow's own."""

    def gradient(output_gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # Nothing is lost: the gradient of a rounded result was in half precision.
        half = tf.cast(output_gradient, left.dtype)
        return tf.matmul(half, right, transpose_b=True), tf.matmul(left, half, transpose_a=True)

    return tf.matmul(left, right, output_type=tf.float32), gradient


@lowers("aten.dot.default")
def _dot(node: Node, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reduce_sum(widen_half(left) * widen_half(right)), left.dtype)


@lowers("aten.mv.default")
def _mv(node: Node, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.linalg.matvec(left, right)


@lowers("aten._cdist_forward.default", "aten.cdist.default")
def _cdist(node: Node, left: tf.Tensor, right: tf.Tensor, power: float = 2.0, *_: object) -> tf.Tensor:
    difference = tf.abs(widen_half(left)[..., :, None, :] - widen_half(right)[..., None, :, :])
    return tf.cast(tf.pow(tf.reduce_sum(tf.pow(difference, power), -1), 1 / power), left.dtype)


@lowers("aten._fft_c2c.default")
def _fft(node: Node, value: tf.Tensor, dims: Sequence[int], normalization: int, forward: bool) -> tf.Tensor:
    """Transform over ``dims``. ``normalization``: 0, 1 and 2 divide by 1, by the root of the size, and by the size."""
    transform = tf.signal.fft if forward else tf.signal.ifft
    rank = len(value.shape)
    size = 1
    for dim in (positive_dim(dim, rank) for dim in dims):
        order = swap_with_last(rank, dim)
        size *= int(value.shape[dim])
        value = permute(transform(permute(value, order)), order)
    scale = (1.0 if forward else float(size)) / (1.0, math.sqrt(size), float(size))[normalization]
    return value if scale == 1 else value * tf.constant(scale, value.dtype)
