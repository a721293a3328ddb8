"""Compute nothing, to measure what batching, padding and pooling alone take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from upshift.inference.encoding.engines.base import Batch, Build


class NothingEngine:
    def __init__(self, build: Build) -> None:
        config: Any = build.source.hf_config
        self.scores_texts = build.recipe.output == "class scores"
        self.width: int = config.hidden_size if build.recipe.output == "embeddings" else config.num_labels

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        for batch in batches:
            rows = batch.ids.shape[:1] if self.scores_texts else batch.ids.shape
            yield batch, np.zeros((*rows, self.width), dtype=np.float32)
