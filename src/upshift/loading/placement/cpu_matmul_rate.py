"""Measure how fast this CPU multiplies weights with one token in their dtype.

In bf16 without instructions for it, products are slower than memory."""

from __future__ import annotations

import statistics
import time

import torch

from upshift.units import MIB

COLUMNS = 2048  # more than a cache; a tenth of a second
WEIGHT_BYTES = 64 * MIB
REPETITIONS = 5


def matmul_rate(dtype: torch.dtype) -> float:
    """Return the bytes of weights that the CPU multiplies in a second."""
    weight = torch.zeros(WEIGHT_BYTES // dtype.itemsize // COLUMNS, COLUMNS, dtype=dtype)
    token = torch.zeros(1, COLUMNS, dtype=dtype)
    return WEIGHT_BYTES / statistics.median(_seconds(weight, token) for _ in range(REPETITIONS + 1))


def _seconds(weight: torch.Tensor, token: torch.Tensor) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        torch.nn.functional.linear(token, weight)
    return time.perf_counter() - start
