# needs torch
"""Measure how fast this CPU multiplies weights by one token in a given dtype.

In bf16 on a CPU without bf16 instructions, products are slower than memory.
"""

from __future__ import annotations

import statistics
import time

import torch

from upshift.units import MIB

COLUMNS = 2048
WEIGHT_BYTES = 64 * MIB  # more than a cache holds
REPETITIONS = 5  # a tenth of a second in all


def matmul_rate(dtype: torch.dtype) -> float:
    """Return the bytes of weights that the CPU multiplies by one token in a second."""
    weight = torch.zeros(WEIGHT_BYTES // dtype.itemsize // COLUMNS, COLUMNS, dtype=dtype)
    token = torch.zeros(1, COLUMNS, dtype=dtype)
    return WEIGHT_BYTES / statistics.median(_seconds(weight, token) for _ in range(REPETITIONS + 1))


def _seconds(weight: torch.Tensor, token: torch.Tensor) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        torch.nn.functional.linear(token, weight)
    return time.perf_counter() - start
