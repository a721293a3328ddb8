"""Turn logits of tokens into scores of their labels, without the special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from upshift.inference.encoding.recipe import Recipe

Array = np.ndarray


class TokenScores(NamedTuple):
    """The scores of the T tokens of one text. ``offsets`` [T, 2] holds the characters of the text, from and up to."""

    tokens: list[str]
    offsets: Array
    scores: Array  # [T, L] fp32: of each label, together 1


def token_counts(lengths: Sequence[int], recipe: Recipe) -> Array:
    """Return how many tokens of each text get scores."""
    counts: Array = np.maximum(np.asarray(lengths, dtype=int) - sum(recipe.special), 0)
    return counts


def score_tokens(logits: Array, mask: Array, recipe: Recipe) -> Array:
    """Return [T, L] fp32 scores, text by text, from logits [B, S, L] and mask [B, S] of 0 and 1. Texts are padded on
    the right."""
    before, behind = recipe.special
    places, lengths = np.arange(mask.shape[1]), mask.sum(1, keepdims=True)
    own = logits[(places >= before) & (places < lengths - behind)].astype(np.float32, copy=False)
    raised = np.exp(own - own.max(axis=1, keepdims=True))
    scores: Array = raised / raised.sum(axis=1, keepdims=True)
    return scores
