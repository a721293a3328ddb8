"""Pool token states into one vector a text."""

from __future__ import annotations

import numpy as np

from upshift.inference.encoding.recipe import Recipe

Array = np.ndarray


def pool(states: Array, mask: Array, recipe: Recipe) -> Array:
    """Return [B, H] fp32 from states [B, S, H] fp32 and mask [B, S] of 0 and 1, with 0 for a text without tokens.
    Texts are padded on the right."""
    if recipe.pooling == "cls":
        found = states[:, 0]
    elif recipe.pooling == "last":
        found = states[np.arange(len(states)), mask.sum(1) - 1]
    elif recipe.pooling == "max":
        found = np.where(mask[:, :, None] > 0, states, -np.inf).max(1)
    else:
        weights = mask.astype(np.float32)
        found = np.einsum("bsh,bs->bh", states, weights) / np.maximum(weights.sum(1, keepdims=True), 1e-9)
    found = np.where(mask.any(1, keepdims=True), found, 0.0)
    if recipe.normalize:
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return found.astype(np.float32, copy=False)
