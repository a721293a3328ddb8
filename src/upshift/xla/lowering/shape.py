"""Lower changes of shape, order or number: views, slices, concatenation, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import LOWERINGS, as_dtype, lowers, moved, positive, result, result_dtype

LOWERINGS["<built-in function getitem>"] = lambda node, values, index: values[index]


@lowers("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.squeeze.dims", "aten.squeeze.dim",
        "aten.squeeze.default", "aten.unsqueeze.default")  # fmt: skip
def _reshaped(node: Node, value: tf.Tensor, *_: Any) -> tf.Tensor:
    return tf.reshape(value, list(result(node).shape))


@lowers("aten.view.dtype")
def _bitcast(node: Node, value: tf.Tensor, *_: Any) -> tf.Tensor:
    return tf.bitcast(value, result_dtype(node))


@lowers("aten.expand.default")
def _expand(node: Node, value: tf.Tensor, *_: Any, **__: Any) -> tf.Tensor:
    return tf.broadcast_to(value, list(result(node).shape))


@lowers("aten.permute.default")
def _permute(node: Node, value: tf.Tensor, dims: Sequence[int]) -> tf.Tensor:
    return moved(value, [positive(dim, len(dims)) for dim in dims])


@lowers("aten.repeat.default")
def _repeat(node: Node, value: tf.Tensor, repeats: Sequence[int]) -> tf.Tensor:
    rank = len(value.shape)
    return tf.tile(tf.reshape(value, [1] * (len(repeats) - rank) + list(value.shape)), list(repeats))


def slices_at(value: tf.Tensor, dim: int, one: slice | int) -> tuple[slice | int, ...]:
    return (*[slice(None)] * positive(dim, len(value.shape)), one)


def whole_slice(value: tf.Tensor, dim: int, start: int | None, end: int | None, step: int) -> slice:
    """Return a slice as torch cuts it: ends beyond the size mean the size."""
    size = int(value.shape[dim])
    return slice(*slice(start, end, step).indices(size))


@lowers("aten.slice.Tensor")
def _slice(node: Node, value: tf.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return value[slices_at(value, dim, whole_slice(value, dim, start, end, step))]


@lowers("aten.select.int")
def _select(node: Node, value: tf.Tensor, dim: int, index: int) -> tf.Tensor:
    return value[slices_at(value, dim, index)]


@lowers("aten.slice_scatter.default")
def _slice_scatter(
    node: Node, value: tf.Tensor, source: tf.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tf.Tensor:  # fmt: skip
    dim = positive(dim, len(value.shape))
    cut = whole_slice(value, dim, start, end, step)
    order = [dim, *(other for other in range(len(value.shape)) if other != dim)]
    places = tf.range(cut.start, cut.stop, cut.step)[:, None]
    written = tf.tensor_scatter_nd_update(moved(value, order), places, moved(tf.cast(source, value.dtype), order))
    return moved(written, [*range(1, dim + 1), 0, *range(dim + 1, len(order))])


@lowers("aten.select_scatter.default")
def _select_scatter(node: Node, value: tf.Tensor, source: tf.Tensor, dim: int, index: int) -> tf.Tensor:
    dim = positive(dim, len(value.shape))
    index = positive(index, int(value.shape[dim]))
    return _slice_scatter(node, value, tf.expand_dims(source, dim), dim, index, index + 1)


@lowers("aten.cat.default")
def _cat(node: Node, values: Sequence[tf.Tensor], dim: int = 0) -> tf.Tensor:
    rank = result(node).dim()
    kept = [value for value in values if len(value.shape) == rank]  # torch lets an empty vector be anywhere
    return tf.concat([tf.cast(value, result_dtype(node)) for value in kept], axis=positive(dim, rank))


@lowers("aten.stack.default")
def _stack(node: Node, values: Sequence[tf.Tensor], dim: int = 0) -> tf.Tensor:
    return tf.stack([tf.cast(value, result_dtype(node)) for value in values], axis=positive(dim, result(node).dim()))


@lowers("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default")
def _split_with_sizes(node: Node, value: tf.Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    return tf.split(value, list(sizes), axis=dim)


@lowers("aten.split.Tensor")
def _split(node: Node, value: tf.Tensor, size: int, dim: int = 0) -> Any:
    whole = int(value.shape[dim])
    return tf.split(value, [min(size, whole - start) for start in range(0, whole, size)], axis=dim)


@lowers("aten.unbind.int", "aten.unbind_copy.int")
def _unbind(node: Node, value: tf.Tensor, dim: int = 0) -> Any:
    return tf.unstack(value, axis=dim)


@lowers("aten.flip.default")
def _flip(node: Node, value: tf.Tensor, dims: Sequence[int]) -> tf.Tensor:
    return tf.reverse(value, [positive(dim, len(value.shape)) for dim in dims])


@lowers("aten.roll.default")
def _roll(node: Node, value: tf.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> tf.Tensor:
    if not dims:
        return tf.reshape(tf.roll(tf.reshape(value, [-1]), list(shifts), [0]), value.shape)
    return tf.roll(value, list(shifts), [positive(dim, len(value.shape)) for dim in dims])


def paddings(pad: Sequence[int], rank: int) -> list[list[int]]:
    """Return paddings in TensorFlow's order. torch counts pairs from the last dimension."""
    pairs = [[pad[2 * place], pad[2 * place + 1]] for place in range(len(pad) // 2)]
    return [[0, 0]] * (rank - len(pairs)) + pairs[::-1]


@lowers("aten.constant_pad_nd.default")
def _constant_pad(node: Node, value: tf.Tensor, pad: Sequence[int], constant: float = 0) -> tf.Tensor:
    pairs = paddings(pad, len(value.shape))
    cut = tuple(slice(max(0, -left), int(size) - max(0, -right)) for (left, right), size in zip(pairs, value.shape, strict=True))
    padded = [[max(0, left), max(0, right)] for left, right in pairs]
    return tf.pad(value[cut], padded, constant_values=as_dtype(constant, value.dtype))


@lowers("aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.reflection_pad3d.default")
def _reflection_pad(node: Node, value: tf.Tensor, pad: Sequence[int]) -> tf.Tensor:
    return tf.pad(value, paddings(pad, len(value.shape)), mode="REFLECT")


@lowers("aten.replication_pad2d.default", "aten.replication_pad3d.default")
def _replication_pad(node: Node, value: tf.Tensor, pad: Sequence[int]) -> tf.Tensor:
    for dim, (left, right) in enumerate(paddings(pad, len(value.shape))):
        if left or right:
            size = int(value.shape[dim])
            places = tf.clip_by_value(tf.range(-left, size + right), 0, size - 1)
            value = tf.gather(value, places, axis=dim)
    return value


@lowers("aten.unfold.default")
def _unfold(node: Node, value: tf.Tensor, dim: int, size: int, step: int) -> tf.Tensor:
    rank = len(value.shape)
    dim = positive(dim, rank)
    count = (int(value.shape[dim]) - size) // step + 1
    places = tf.range(count)[:, None] * step + tf.range(size)[None]
    windows = tf.gather(value, places, axis=dim)  # [.., count, size, ..]
    return moved(windows, [*range(dim + 1), *range(dim + 2, rank + 1), dim + 1])


@lowers("aten.diagonal.default", "aten.diagonal_copy.default")
def _diagonal(node: Node, value: tf.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> tf.Tensor:
    rank = len(value.shape)
    first = positive(dim1, rank)
    second = positive(dim2, rank)
    order = [dim for dim in range(rank) if dim not in (first, second)] + [first, second]
    return tf.linalg.diag_part(moved(value, order), k=offset)


@lowers("aten.as_strided.default", "aten.as_strided_copy.default")
def _as_strided(node: Node, value: tf.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> tf.Tensor:
    """Lower as_strided of a tensor that is contiguous, as every tensor is here."""
    places = tf.fill(list(size), offset or 0)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[dim] = count
        places += tf.reshape(tf.range(count) * step, shape)
    return tf.gather(tf.reshape(value, [-1]), places)
