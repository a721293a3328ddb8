"""Pad rows of token ids of unequal lengths to one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def padded_rows(rows: Sequence[Sequence[int]], *, pad: int = 0, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask of 0 and 1, int64 [N, S], padded on one side. S is the length of the longest row, or 1 if
    all are empty."""
    longest = max(1, *(len(row) for row in rows))
    ids = np.full((len(rows), longest), pad, dtype=np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        places = slice(longest - len(row), longest) if left else slice(len(row))
        ids[number, places] = row
        mask[number, places] = 1
    return ids, mask
