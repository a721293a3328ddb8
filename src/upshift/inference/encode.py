"""Token ids through an engine: batched by length, pooled, and put back in the order that they came in."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from upshift.inference.batches import Batch, by_length, padded
from upshift.inference.engines.engine import Build
from upshift.inference.engines.registry import build_engine
from upshift.inference.pool import pool
from upshift.inference.recipe import Recipe
from upshift.inference.setup import EngineSetup
from upshift.models.source import ModelSource
from upshift.settings import read_settings

CALIBRATION_BATCHES = 32  # of one text each, spread over the lengths of the sample


class Encoding:
    """One model under one setup. ``sample``: tokens of the user's own texts, which a quantized engine is calibrated on."""

    def __init__(self, source: ModelSource, recipe: Recipe, setup: EngineSetup, sample: list[list[int]], *, pad: int) -> None:
        self.recipe, self.setup, self.pad = recipe, setup, pad
        self.engine = build_engine(Build(source, recipe, setup, engine_folder(source, setup), _examples(sample, pad)))

    def rows(self, ids: list[list[int]]) -> np.ndarray:
        """[N, H] fp32 embeddings, or [N, C] class scores."""
        found: np.ndarray | None = None
        places = by_length([len(row) for row in ids], self.setup.token_budget)
        for batch, output in self.engine.outputs(padded(ids, places, pad=self.pad)):
            rows = self._pooled(batch, output)
            if found is None:
                found = np.empty((len(ids), rows.shape[1]), dtype=np.float32)
            found[batch.places] = rows
        return np.empty((0, 0), dtype=np.float32) if found is None else found

    def _pooled(self, batch: Batch, output: np.ndarray) -> np.ndarray:
        return output if self.recipe.output == "class scores" else pool(output, batch.mask, self.recipe)


def engine_folder(source: ModelSource, setup: EngineSetup) -> Path:
    """Where an engine keeps what it made of these weights."""
    return read_settings().cache_dir / "engines" / f"{source.model_hash}-{weights_identity(source)}" / setup.engine


def weights_identity(source: ModelSource) -> str:
    """Of files as they are now: names, sizes and times of change."""
    assert source.directory is not None
    files = sorted(source.directory.glob("*.safetensors"))
    said = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:12]


def _examples(sample: list[list[int]], pad: int) -> list[Batch]:
    ordered = sorted((row for row in sample if row), key=len) or [[pad, pad]]
    step = max(len(ordered) // CALIBRATION_BATCHES, 1)
    chosen = ordered[::step][:CALIBRATION_BATCHES]
    return list(padded(chosen, [[place] for place in range(len(chosen))], pad=pad))
