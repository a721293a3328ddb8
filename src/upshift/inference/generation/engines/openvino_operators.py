"""Convert operators of torch that OpenVINO's converter does not know into those that it knows."""

from __future__ import annotations

from typing import Any

import numpy as np


def operators() -> list[Any]:
    from openvino.frontend.pytorch import ConversionExtension

    return [ConversionExtension("aten::histc", _histc)]


def _histc(node: Any) -> Any:
    """Convert aten::histc, with which mixtures of experts count the tokens of each expert."""
    from openvino import opset13

    values = node.get_input(0)
    bins, low, high = (float(node.get_values_from_const_input(place)) for place in (1, 2, 3))
    place = opset13.floor(opset13.multiply(opset13.subtract(values, np.float32(low)), np.float32(bins / (high - low))))
    place = opset13.select(opset13.equal(values, np.float32(high)), np.float32(bins - 1), place)  # its upper end is inside
    there = opset13.one_hot(opset13.convert(place, "i64"), np.int64(bins), np.float32(1.0), np.float32(0.0), -1)
    return opset13.reduce_sum(there, np.array([0]), False).outputs()
