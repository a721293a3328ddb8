"""Register the TensorFlow operations that stand for each ATen operator, and define what every family of them needs.

A lowering takes the node of the graph (its ``meta["val"]`` has torch's own result: shape and dtype), then the operator's
arguments with tensors of TensorFlow in the place of torch's. Shapes are static: programs are exported for one shape each.
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
    """Register a lowering. ``names`` are as str(node.target) writes them, such as aten.add.Tensor."""

    def register(lowering: Lowering) -> Lowering:
        for name in names:
            assert name not in LOWERINGS, f"{name} is lowered twice"
            LOWERINGS[name] = lowering
        return lowering

    return register


def result(node: Node, index: int | None = None) -> torch.Tensor:
    """Return what torch computed for the node, without data. ``index`` picks one of several results."""
    value = node.meta["val"]
    found: torch.Tensor = value if index is None else value[index]
    return found


def result_dtype(node: Node, index: int | None = None) -> tf.DType:
    return DTYPES[result(node, index).dtype]


def is_tensor(value: Any) -> bool:
    return bool(tf.is_tensor(value))


def as_dtype(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Return a tensor or a number in this dtype. torch writes -100.0 for integers, too."""
    if is_tensor(value):
        return tf.cast(value, dtype)
    return tf.constant(int(value) if dtype.is_integer else value, dtype)


def as_wide(value: tf.Tensor) -> tf.Tensor:
    """Return half precision as float32: torch's kernels compute in it, and round to half once, at their end."""
    return tf.cast(value, tf.float32) if is_half(value.dtype) else value


def is_half(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating and dtype.size < 4)


def positive(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def dims_of(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """Return the dimensions, or all of them if none is named, as torch reads an empty list."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(rank))
    return [positive(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)]


def moved(value: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    return value if list(order) == list(range(len(order))) else tf.transpose(value, order)


def inverse(order: Sequence[int]) -> list[int]:
    places = [0] * len(order)
    for place, dim in enumerate(order):
        places[dim] = place
    return places
