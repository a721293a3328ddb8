"""Matrix products. Sums are in float32 on TPUs and CPUs whatever the dtype, which is torch's own practice."""

from __future__ import annotations

import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import lowers


@lowers("aten.mm.default", "aten.bmm.default", "aten.matmul.default")
def _product(node: Node, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.matmul(left, right)


@lowers("aten.addmm.default", "aten.baddbmm.default")
def _added_product(
    node: Node, bias: tf.Tensor, left: tf.Tensor, right: tf.Tensor, *, beta: float = 1, alpha: float = 1
) -> tf.Tensor:  # fmt: skip
    product = tf.matmul(left, right)
    if alpha != 1:
        product = product * tf.constant(alpha, product.dtype)
    if beta == 0:
        return product
    return product + (bias if beta == 1 else bias * tf.constant(beta, bias.dtype))


@lowers("aten.dot.default")
def _dot(node: Node, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(left * right)


@lowers("aten.mv.default")
def _mv(node: Node, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.linalg.matvec(left, right)


@lowers("aten._cdist_forward.default", "aten.cdist.default")
def _cdist(node: Node, left: tf.Tensor, right: tf.Tensor, power: float = 2.0, *_: object) -> tf.Tensor:
    difference = tf.abs(left[..., :, None, :] - right[..., None, :, :])
    return tf.pow(tf.reduce_sum(tf.pow(difference, power), -1), 1 / power)
