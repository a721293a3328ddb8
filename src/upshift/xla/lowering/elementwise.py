"""Lower operators of one number for one of each argument: arithmetic, comparisons, activations, casts.

Functions of half precision, and its arithmetic with a number, are in float32 and rounded once, as in torch's kernels:
0.044715 in bfloat16 is another number, and a GELU of five steps that each round is another GELU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import torch
from torch.fx import Node

from upshift.xla.lowering.registry import DTYPES, LOWERINGS, as_dtype, as_wide, is_half, is_tensor, lowers, result_dtype

Unary = Callable[[tf.Tensor], tf.Tensor]
Binary = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def _arithmetic(compute: Binary) -> Callable[..., tf.Tensor]:
    """Return a lowering in the dtype of torch's result. Two tensors of it need no wider one: one operation rounds
    once by itself."""

    def lowering(node: Node, left: Any, right: Any, *, alpha: float = 1, **_: Any) -> tf.Tensor:
        dtype = result_dtype(node)
        alone = alpha == 1 and all(is_tensor(one) and one.dtype == dtype for one in (left, right))
        computed = tf.float32 if is_half(dtype) and not alone else dtype
        scaled = as_dtype(right, computed)
        if alpha != 1:
            scaled = scaled * tf.constant(alpha, computed)
        return tf.cast(compute(as_dtype(left, computed), scaled), dtype)

    return lowering


def _compared(compute: Binary) -> Callable[..., tf.Tensor]:
    """Return a lowering in the dtype that torch would compute left + right in."""

    def lowering(node: Node, left: Any, right: Any) -> tf.Tensor:
        values: list[Any] = [argument.meta["val"] if isinstance(argument, Node) else argument for argument in node.args[:2]]
        dtype = DTYPES[torch.result_type(*values)]
        return compute(as_dtype(left, dtype), as_dtype(right, dtype))

    return lowering


def _on_bits(of_bool: Binary, of_int: Binary) -> Binary:
    return lambda left, right: (of_bool if left.dtype == tf.bool else of_int)(left, right)


def _multiplied(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.logical_and(left, right) if left.dtype == tf.bool else tf.multiply(left, right)


def _added(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.logical_or(left, right) if left.dtype == tf.bool else tf.add(left, right)


ARITHMETIC: dict[str, Binary] = {
    "add": _added, "sub": tf.subtract, "mul": _multiplied, "div": tf.divide, "pow": tf.pow, "minimum": tf.minimum,
    "maximum": tf.maximum, "remainder": tf.math.floormod, "fmod": tf.math.mod, "floor_divide": tf.math.floordiv,
    "atan2": tf.math.atan2,
    "bitwise_and": _on_bits(tf.logical_and, tf.bitwise.bitwise_and),
    "bitwise_or": _on_bits(tf.logical_or, tf.bitwise.bitwise_or),
    "bitwise_xor": _on_bits(tf.math.logical_xor, tf.bitwise.bitwise_xor),
    "bitwise_left_shift": tf.bitwise.left_shift, "bitwise_right_shift": tf.bitwise.right_shift,
    "logical_and": tf.logical_and, "logical_or": tf.logical_or, "logical_xor": tf.math.logical_xor,
    "__lshift__": tf.bitwise.left_shift, "__rshift__": tf.bitwise.right_shift,
}  # fmt: skip
COMPARISONS: dict[str, Binary] = {
    "ge": tf.greater_equal, "gt": tf.greater, "le": tf.less_equal, "lt": tf.less, "eq": tf.equal, "ne": tf.not_equal,
}  # fmt: skip
LOGICAL = ("logical_and", "logical_or", "logical_xor")
FUNCTIONS: dict[str, Unary] = {
    "acos": tf.acos, "acosh": tf.acosh, "asin": tf.asin, "asinh": tf.asinh, "atan": tf.atan, "atanh": tf.atanh, "cos": tf.cos,
    "cosh": tf.cosh, "erf": tf.math.erf, "exp": tf.exp, "expm1": tf.math.expm1, "log": tf.math.log, "log1p": tf.math.log1p,
    "reciprocal": tf.math.reciprocal, "rsqrt": tf.math.rsqrt, "sigmoid": tf.sigmoid, "silu": tf.nn.silu, "sin": tf.sin,
    "sinh": tf.sinh, "sqrt": tf.sqrt, "square": tf.square, "tan": tf.tan, "tanh": tf.tanh,
    "exp2": lambda x: tf.pow(tf.constant(2, x.dtype), x),
    "log2": lambda x: tf.math.log(x) / tf.constant(math.log(2), x.dtype),
    "log10": lambda x: tf.math.log(x) / tf.constant(math.log(10), x.dtype),
}  # fmt: skip
EXACT: dict[str, Unary] = {
    "abs": tf.abs, "ceil": tf.math.ceil, "floor": tf.floor, "neg": tf.negative, "relu": tf.nn.relu, "round": tf.round,
    "sign": tf.sign, "trunc": lambda x: tf.where(x < 0, tf.math.ceil(x), tf.floor(x)),
    "bitwise_not": lambda x: tf.logical_not(x) if x.dtype == tf.bool else tf.bitwise.invert(x),
    "clone": tf.identity, "alias": tf.identity, "detach": tf.stop_gradient, "lift_fresh_copy": tf.identity,
    "_to_copy": tf.identity,
}  # fmt: skip


def _unary(compute: Unary) -> Callable[..., tf.Tensor]:
    return lambda node, value, **_: compute(tf.cast(value, result_dtype(node)))


def _rounded(compute: Unary) -> Unary:
    return lambda value: tf.cast(compute(as_wide(value)), value.dtype)


for _name, _compute in ARITHMETIC.items():
    for _overload in ("Tensor", "Scalar", "default", "Tensor_Scalar", "Tensor_Tensor", "Scalar_Tensor"):
        LOWERINGS[f"aten.{_name}.{_overload}"] = _arithmetic(_compute)
LOWERINGS["aten.pow.Scalar"] = _arithmetic(tf.pow)
for _name, _compute in COMPARISONS.items():
    for _overload in ("Tensor", "Scalar"):
        LOWERINGS[f"aten.{_name}.{_overload}"] = _compared(_compute)
for _name, _one in (EXACT | {name: _rounded(one) for name, one in FUNCTIONS.items()}).items():
    LOWERINGS[f"aten.{_name}.default"] = _unary(_one)


@lowers("aten.rsub.Scalar", "aten.rsub.Tensor")
def _rsub(node: Node, left: Any, right: Any, alpha: float = 1) -> tf.Tensor:
    dtype = result_dtype(node)
    computed = tf.float32 if is_half(dtype) else dtype
    return tf.cast(as_dtype(right, computed) - as_dtype(left, computed) * tf.constant(alpha, computed), dtype)


@lowers("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _rounded_div(node: Node, left: Any, right: Any, *, rounding_mode: str | None = None) -> tf.Tensor:
    dtype = result_dtype(node)
    left = as_dtype(left, dtype)
    right = as_dtype(right, dtype)
    if rounding_mode is None:
        return tf.divide(left, right)
    if rounding_mode == "floor":
        return tf.math.floordiv(left, right)
    return tf.truncatediv(left, right) if dtype.is_integer else EXACT["trunc"](left / right)


@lowers("aten.isnan.default")
def _isnan(node: Node, value: tf.Tensor) -> tf.Tensor:
    return tf.math.is_nan(value) if value.dtype.is_floating else tf.zeros(value.shape, tf.bool)


@lowers("aten.isinf.default")
def _isinf(node: Node, value: tf.Tensor) -> tf.Tensor:
    return tf.math.is_inf(value) if value.dtype.is_floating else tf.zeros(value.shape, tf.bool)


LOWERINGS["aten.logical_not.default"] = lambda node, value: tf.logical_not(tf.cast(value, tf.bool))
for _name in LOGICAL:
    LOWERINGS[f"aten.{_name}.default"] = lambda node, left, right, compute=ARITHMETIC[_name]: compute(
        tf.cast(left, tf.bool), tf.cast(right, tf.bool)
    )


@lowers("aten.gelu.default")
def _gelu(node: Node, value: tf.Tensor, *, approximate: str = "none") -> tf.Tensor:
    return tf.cast(tf.nn.gelu(as_wide(value), approximate=approximate == "tanh"), value.dtype)


@lowers("aten.elu.default")
def _elu(node: Node, value: tf.Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> tf.Tensor:
    wide = as_wide(value)
    negative = tf.math.expm1(tf.minimum(wide, tf.zeros_like(wide)) * input_scale) * alpha
    return tf.cast(tf.where(wide > 0, wide, negative) * tf.constant(scale, wide.dtype), value.dtype)


@lowers("aten.leaky_relu.default")
def _leaky_relu(node: Node, value: tf.Tensor, negative_slope: float = 0.01) -> tf.Tensor:
    return tf.cast(tf.nn.leaky_relu(as_wide(value), negative_slope), value.dtype)


@lowers("aten.hardtanh.default")
def _hardtanh(node: Node, value: tf.Tensor, least: float = -1.0, most: float = 1.0) -> tf.Tensor:
    return _clamp(node, value, least, most)


@lowers("aten.clamp.default", "aten.clamp.Tensor")
def _clamp(node: Node, value: tf.Tensor, least: Any = None, most: Any = None) -> tf.Tensor:
    dtype = result_dtype(node)
    value = tf.cast(value, dtype)
    if least is not None:
        value = tf.maximum(value, as_dtype(least, dtype))
    return value if most is None else tf.minimum(value, as_dtype(most, dtype))


@lowers("aten.where.self")
def _where(node: Node, condition: tf.Tensor, left: Any, right: Any) -> tf.Tensor:
    dtype = result_dtype(node)
    return tf.where(condition, as_dtype(left, dtype), as_dtype(right, dtype))


@lowers("aten.copy.default")
def _copy(node: Node, value: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    return tf.broadcast_to(tf.cast(source, value.dtype), value.shape)


@lowers("aten.view_as_complex.default")
def _view_as_complex(node: Node, value: tf.Tensor) -> tf.Tensor:
    return tf.complex(value[..., 0], value[..., 1])


@lowers("aten.view_as_real.default")
def _view_as_real(node: Node, value: tf.Tensor) -> tf.Tensor:
    return tf.stack([tf.math.real(value), tf.math.imag(value)], axis=-1)


@lowers("aten.polar.default")
def _polar(node: Node, length: tf.Tensor, angle: tf.Tensor) -> tf.Tensor:
    return tf.complex(length * tf.cos(angle), length * tf.sin(angle))
