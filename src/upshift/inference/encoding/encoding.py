"""Run token ids through an engine: batched by length, pooled, and put back into the order of the input."""

from __future__ import annotations

import numpy as np

from upshift.inference.encoding.batches import Batch, by_length, padded
from upshift.inference.encoding.engines.engine import Build, Engine
from upshift.inference.encoding.pool import pool
from upshift.inference.encoding.recipe import Recipe
from upshift.inference.encoding.token_scores import score_tokens, token_counts
from upshift.inference.engines import build_engine
from upshift.inference.setup import EngineSetup
from upshift.inference.weights import engine_folder
from upshift.models.source import ModelSource

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
