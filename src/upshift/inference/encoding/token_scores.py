"""Logits of tokens to scores of their labels, without the tokens that are of no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from upshift.inference.encoding.recipe import Recipe

Array = np.ndarray


class TokenScores(NamedTuple):
    """Of the tokens of one text, T of them. ``offsets`` [T, 2]: the characters of the text, from and up to."""

    tokens: list[str]
    offsets: Array
    scores: Array  # [T, L] fp32: of each label, together 1


def token_counts(lengths: Sequence[int], recipe: Recipe) -> Array:
    """How many tokens of each text are given scores."""
    counts: Array = np.maximum(np.asarray(lengths, dtype=int) - sum(recipe.special), 0)
    return counts


def score_tokens(logits: Array, mask: Array, recipe: Recipe) -> Array:
    """logits [B, S, L], mask [B, S] of 0 and 1 -> [T, L] fp32, text by text. Texts are padded on the right."""
    before, behind = recipe.special
    places, lengths = np.arange(mask.shape[1]), mask.sum(1, keepdims=True)
    own = logits[(places >= before) & (places < lengths - behind)].astype(np.float32, copy=False)
    raised = np.exp(own - own.max(axis=1, keepdims=True))
    scores: Array = raised / raised.sum(axis=1, keepdims=True)
    return scores
