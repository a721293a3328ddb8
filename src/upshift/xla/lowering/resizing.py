"""Resize images. Sizes are static, so how much of which row goes where is known before the program is compiled: each
direction is a product with a constant matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from torch.fx import Node

from upshift.xla.lowering.registry import as_wide, lowers, moved, result

Numbers = np.ndarray


@lowers("aten.upsample_bilinear2d.vec", "aten.upsample_linear1d.vec", "aten.upsample_trilinear3d.vec")
def _linear(
    node: Node, value: tf.Tensor, size: Sequence[int] | None, align_corners: bool, scales: Sequence[float] | None
) -> tf.Tensor:  # fmt: skip
    """Interpolate between the two nearest, placed as by torch's area_pixel_compute_source_index."""

    def places(count: int, whole: int, scale: float | None) -> Numbers:
        if align_corners:
            return np.arange(count) * ((whole - 1) / (count - 1) if count > 1 else 0.0)
        centres: Numbers = np.maximum((np.arange(count) + 0.5) * (1 / scale if scale else whole / count) - 0.5, 0)
        return centres

    def matrix(count: int, whole: int, scale: float | None) -> Numbers:
        at = places(count, whole, scale)
        low = np.minimum(np.floor(at).astype(int), whole - 1)
        share = at - low
        found = np.zeros((count, whole))
        np.add.at(found, (np.arange(count), low), 1 - share)
        np.add.at(found, (np.arange(count), np.minimum(low + 1, whole - 1)), share)
        return found

    wide = as_wide(value)
    for dim, count in enumerate(result(node).shape[2:], start=2):
        whole = int(value.shape[dim])
        along = tf.constant(matrix(int(count), whole, scales[dim - 2] if scales else None), wide.dtype)
        wide = _last_to(tf.tensordot(wide, along, [[dim], [1]]), dim)
    return tf.cast(wide, value.dtype)


@lowers("aten.upsample_nearest1d.vec", "aten.upsample_nearest2d.vec", "aten.upsample_nearest3d.vec")
def _nearest(node: Node, value: tf.Tensor, size: Sequence[int] | None, scales: Sequence[float] | None) -> tf.Tensor:
    for dim, count in enumerate(result(node).shape[2:], start=2):
        whole = int(value.shape[dim])
        step = np.float32(1 / scales[dim - 2] if scales else whole / int(count))  # torch counts in float32
        places = np.minimum(np.floor(np.arange(int(count), dtype=np.float32) * step).astype(int), whole - 1)
        value = tf.gather(value, places, axis=dim)
    return value


def _last_to(value: tf.Tensor, dim: int) -> tf.Tensor:
    last = len(value.shape) - 1
    return moved(value, [*range(dim), last, *range(dim, last)])
