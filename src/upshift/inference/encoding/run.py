"""Run token ids through an engine: batched by length, pooled, and put back into the order of the input.

Batch texts of similar lengths, because padding costs as much as tokens do.

Pool token states into one vector a text.

Turn logits of tokens into scores of their labels, without the special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from upshift.inference.encoding.engines.base import Batch, Build, Engine, by_length, padded
from upshift.inference.encoding.model_config import Recipe
from upshift.inference.registry import EngineSetup, build_engine
from upshift.inference.weights import engine_folder
from upshift.models.source import ModelSource

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


CALIBRATION_BATCHES = 128  # of one text each, spread over the lengths of the sample: of 32 the worst text was at 0.987, not 0.995


class Encoding:
    """One model under one setup. ``sample`` holds token ids of the user's own texts, on which a quantized engine is
    calibrated."""

    def __init__(self, source: ModelSource, recipe: Recipe, setup: EngineSetup, sample: list[list[int]], *, pad: int) -> None:
        self.recipe, self.setup, self.pad = recipe, setup, pad
        build = Build(source, recipe, setup, engine_folder("encode", source, setup.engine), examples(sample, pad))
        self.engine: Engine = build_engine("encode", setup.engine, build)

    def rows(self, ids: list[list[int]]) -> np.ndarray:
        """Return [N, H] fp32 embeddings, [N, C] class scores, or [T, L] scores of the tokens of all texts, text by
        text."""
        found: np.ndarray | None = None
        lengths = [len(row) for row in ids]
        counts = token_counts(lengths, self.recipe) if self.recipe.output == "token scores" else np.ones(len(ids), dtype=int)
        ends = np.cumsum(counts)
        for batch, output in self.engine.outputs(padded(ids, by_length(lengths, self.setup.batch), pad=self.pad)):
            rows = self._answer(batch, output)
            if found is None:
                found = np.empty((ends[-1], rows.shape[1]), dtype=np.float32)
            found[np.concatenate([np.arange(ends[place] - counts[place], ends[place]) for place in batch.places])] = rows
        return np.empty((0, 0), dtype=np.float32) if found is None else found

    def _answer(self, batch: Batch, output: np.ndarray) -> np.ndarray:
        if self.recipe.output == "embeddings":
            return pool(output, batch.mask, self.recipe)
        return output if self.recipe.output == "class scores" else score_tokens(output, batch.mask, self.recipe)


def examples(sample: list[list[int]], pad: int) -> list[Batch]:
    ordered = sorted((row for row in sample if row), key=len) or [[pad, pad]]
    step = max(len(ordered) // CALIBRATION_BATCHES, 1)
    chosen = ordered[::step][:CALIBRATION_BATCHES]
    return list(padded(chosen, [[place] for place in range(len(chosen))], pad=pad))
