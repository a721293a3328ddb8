"""Lower elementwise operators: arithmetic, comparisons, activations and casts.

Functions of half precision, and arithmetic of half precision with a Python number, are computed in float32 and rounded once, as
in torch's kernels. Otherwise results differ: 0.044715 is another number in bfloat16, and a GELU that rounds after each of its
five steps is another function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import torch
from torch.fx import Node

from upshift.xla.lowering.registry import DTYPES, LOWERINGS, as_dtype, is_half, is_tensor, lowers, result_dtype, widen_half

Unary = Callable[[tf.Tensor], tf.Tensor]
Binary = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def _arithmetic(compute: Binary) -> Callable[..., tf.Tensor]:
    """Return a lowering that computes in the dtype of torch's result.

    Half precision is computed in float32, unless both operands are tensors of the result's dtype: then a single operation
    rounds only once anyway."""

    def lowering(node: Node, left: Any, right: Any, *, alpha: float = 1, **_: Any) -> tf.Tensor:
        dtype = result_dtype(node)
        rounds_by_itself = alpha == 1 and _has_dtype(left, dtype) and _has_dtype(right, dtype)
        computed = dtype if rounds_by_itself or not is_half(dtype) else tf.float32
        scaled = as_dtype(right, computed)
        if alpha != 1:
            scaled = scaled * tf.constant(alpha, computed)
        return tf.cast(compute(as_dtype(left, computed), scaled), dtype)

    return lowering


def _has_dtype(value: Any, dtype: tf.DType) -> bool:
    """Return whether the value is a tensor of this dtype."""
    return is_tensor(value) and value.dtype == dtype


def _comparison(compute: Binary) -> Callable[..., tf.Tensor]:
    """Return a lowering that compares in the dtype of torch's left + right."""

    def lowering(node: Node, left: Any, right: Any) -> tf.Tensor:
        values: list[Any] = [argument.meta["val"] if isinstance(argument, Node) else argument for argument in node.args[:2]]
        dtype = DTYPES[torch.result_type(*values)]
        return compute(as_dtype(left, dtype), as_dtype(right, dtype))

    return lowering


def _by_dtype(of_bool: Binary, of_int: Binary) -> Binary:
    """Return a function that calls ``of_bool`` for booleans and ``of_int`` for integers."""
    return lambda left, right: (of_bool if left.dtype == tf.bool else of_int)(left, right)


def _multiply(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.logical_and(left, right) if left.dtype == tf.bool else tf.multiply(left, right)


def _add(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.logical_or(left, right) if left.dtype == tf.bool else tf.add(left, right)


ARITHMETIC: dict[str, Binary] = {
    "add": _add,
    "sub": tf.subtract,
    "mul": _multiply,
    "div": tf.divide,
    "pow": tf.pow,
    "minimum": tf.minimum,
    "maximum": tf.maximum,
    "remainder": tf.math.floormod,
    "fmod": tf.math.mod,
    "floor_divide": tf.math.floordiv,
    "atan2": tf.math.atan2,
    "bitwise_and": _by_dtype(tf.logical_and, tf.bitwise.bitwise_and),
    "bitwise_or": _by_dtype(tf.logical_or, tf.bitwise.bitwise_or),
    "bitwise_xor": _by_dtype(tf.math.logical_xor, tf.bitwise.bitwise_xor),
    "bitwise_left_shift": tf.bitwise.left_shift,
    "bitwise_right_shift": tf.bitwise.right_shift,
    "logical_and": tf.logical_and,
    "logical_or": tf.logical_or,
    "logical_xor": tf.math.logical_xor,
    "__lshift__": tf.bitwise.left_shift,
    "__rshift__": tf.bitwise.right_shift,
}
COMPARISONS: dict[str, Binary] = {
    "ge": tf.greater_equal,
    "gt": tf.greater,
    "le": tf.less_equal,
    "lt": tf.less,
    "eq": tf.equal,
    "ne": tf.not_equal,
}
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
    "abs": tf.abs,
    "ceil": tf.math.ceil,
    "floor": tf.floor,
    "neg": tf.negative,
    "relu": tf.nn.relu,
    "round": tf.round,
    "sign": tf.sign,
    "trunc": lambda x: tf.where(x < 0, tf.math.ceil(x), tf.floor(x)),
    "bitwise_not": lambda x: tf.logical_not(x) if x.dtype == tf.bool else tf.bitwise.invert(x),
    "clone": tf.identity,
    "alias": tf.identity,
    "detach": tf.stop_gradient,
    "lift_fresh_copy": tf.identity,
    "_to_copy": tf.identity,
}


def _unary(compute: Unary) -> Callable[..., tf.Tensor]:
    """Return a lowering that computes in the dtype of torch's result."""
    return lambda node, value, **_: compute(tf.cast(value, result_dtype(node)))


def _in_float32(compute: Unary) -> Unary:
    """Return the function computed in float32 for half precision, and rounded once."""
    return lambda value: tf.cast(compute(widen_half(value)), value.dtype)


for _name, _compute in ARITHMETIC.items():
    for _overload in ("Tensor", "Scalar", "default", "Tensor_Scalar", "Tensor_Tensor", "Scalar_Tensor"):
        LOWERINGS[f"aten.{_name}.{_overload}"] = _arithmetic(_compute)
LOWERINGS["aten.pow.Scalar"] = _arithmetic(tf.pow)
for _name, _compute in COMPARISONS.items():
    for _overload in ("Tensor", "Scalar"):
        LOWERINGS[f"aten.{_name}.{_overload}"] = _comparison(_compute)
for _name, _function in EXACT.items():
    LOWERINGS[f"aten.{_name}.default"] = _unary(_function)
for _name, _function in FUNCTIONS.items():
    LOWERINGS[f"aten.{_name}.default"] = _unary(_in_float32(_function))


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
    return tf.cast(tf.nn.gelu(widen_half(value), approximate=approximate == "tanh"), value.dtype)


@lowers("aten.elu.default")
def _elu(node: Node, value: tf.Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> tf.Tensor:
    wide = widen_half(value)
    negative = tf.math.expm1(tf.minimum(wide, tf.zeros_like(wide)) * input_scale) * alpha
    return tf.cast(tf.where(wide > 0, wide, negative) * tf.constant(scale, wide.dtype), value.dtype)


@lowers("aten.leaky_relu.default")
def _leaky_relu(node: Node, value: tf.Tensor, negative_slope: float = 0.01) -> tf.Tensor:
    return tf.cast(tf.nn.leaky_relu(widen_half(value), negative_slope), value.dtype)


@lowers("aten.hardtanh.default")
def _hardtanh(node: Node, value: tf.Tensor, minimum: float = -1.0, maximum: float = 1.0) -> tf.Tensor:
    return _clamp(node, value, minimum, maximum)


@lowers("aten.clamp.default", "aten.clamp.Tensor")
def _clamp(node: Node, value: tf.Tensor, minimum: Any = None, maximum: Any = None) -> tf.Tensor:
    dtype = result_dtype(node)
    value = tf.cast(value, dtype)
    if minimum is not None:
        value = tf.maximum(value, as_dtype(minimum, dtype))
    return value if maximum is None else tf.minimum(value, as_dtype(maximum, dtype))


@lowers("aten.where.self")
def _select(node: Node, condition: tf.Tensor, left: Any, right: Any) -> tf.Tensor:
    dtype = result_dtype(node)
    return tf.where(condition, as_dtype(left, dtype), as_dtype(right, dtype))


@lowers("aten.view_as_complex.default")
def _view_as_complex(node: Node, value: tf.Tensor) -> tf.Tensor:
    return tf.complex(value[..., 0], value[..., 1])


@lowers("aten.view_as_real.default")
def _view_as_real(node: Node, value: tf.Tensor) -> tf.Tensor:
    return tf.stack([tf.math.real(value), tf.math.imag(value)], axis=-1)


@lowers("aten.polar.default")
def _polar(node: Node, length: tf.Tensor, angle: tf.Tensor) -> tf.Tensor:
    return tf.complex(length * tf.cos(angle), length * tf.sin(angle))
