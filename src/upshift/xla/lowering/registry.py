"""Register a lowering for each ATen operator, and define the helpers that all lowerings share.

A lowering takes the node of the graph, then the operator's arguments with TensorFlow's tensors in place of torch's. The node's
``meta["val"]`` has the shape and the dtype of torch's own result. Shapes are static: a program is exported for one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
from torch.fx import Node

Lowering = Callable[..., Any]
LOWERINGS: dict[str, Lowering] = {}

DTYPES = {
    torch.float32: tf.float32, torch.float64: tf.float64, torch.float16: tf.float16, torch.bfloat16: tf.bfloat16,
    torch.int64: tf.int64, torch.int32: tf.int32, torch.int16: tf.int16, torch.int8: tf.int8, torch.uint8: tf.uint8,
    torch.bool: tf.bool, torch.complex64: tf.complex64, torch.complex128: tf.complex128,
}  # fmt: skip


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Return a decorator that registers a lowering for operators, named as in str(node.target): aten.add.Tensor."""

    def register(lowering: Lowering) -> Lowering:
        for name in names:
            assert name not in LOWERINGS, f"{name} is lowered twice"
            LOWERINGS[name] = lowering
        return lowering

    return register


def torch_result(node: Node, index: int | None = None) -> torch.Tensor:
    """Return torch's result for the node, a tensor without data. ``index`` selects one of several results."""
    value = node.meta["val"]
    tensor: torch.Tensor = value if index is None else value[index]
    return tensor


def result_dtype(node: Node, index: int | None = None) -> tf.DType:
    return DTYPES[torch_result(node, index).dtype]


def is_tensor(value: Any) -> bool:
    return bool(tf.is_tensor(value))


def as_dtype(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Return a tensor or a number as a tensor of this dtype. torch may write an integer as -100.0."""
    if is_tensor(value):
        return tf.cast(value, dtype)
    return tf.constant(int(value) if dtype.is_integer else value, dtype)


def widen_half(value: tf.Tensor) -> tf.Tensor:
    """Return half precision as float32. torch's kernels compute in float32, too, and round once at the end."""
    return tf.cast(value, tf.float32) if is_half(value.dtype) else value


def is_half(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating and dtype.size < 4)


def positive_dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def positive_dims(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """Return the dimensions counted from 0. None and an empty list mean all dimensions, as in torch."""
    if isinstance(dims, int):
        return [positive_dim(dims, rank)]
    if dims is None or len(dims) == 0:
        return list(range(rank))
    return [positive_dim(dim, rank) for dim in dims]


def permute(value: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    """Return the value with its dimensions in this order."""
    return value if list(order) == list(range(len(order))) else tf.transpose(value, order)


def swap_with_last(rank: int, dim: int) -> list[int]:
    """Return the order that exchanges a dimension with the last one. It is its own inverse."""
    order = list(range(rank))
    dim = positive_dim(dim, rank)
    order[dim], order[-1] = order[-1], order[dim]
    return order


def inverse_order(order: Sequence[int]) -> list[int]:
    """Return the order that undoes ``order``."""
    inverse = [0] * len(order)
    for position, dim in enumerate(order):
        inverse[dim] = position
    return inverse
