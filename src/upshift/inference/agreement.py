"""Compare an engine's numbers with the reference's."""

from __future__ import annotations

import numpy as np


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of ``one`` with the same row of ``other``, [N]."""
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: np.ndarray = (one * other).sum(1) / np.maximum(norms, 1e-12)
    return found
