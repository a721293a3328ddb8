"""Compute nothing, to measure the time of batching, padding and pooling alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from upshift.inference.encoding.engines.base import Batch, EncoderBuild, gives_states


class NullEngine:
    """An engine whose outputs are zeros."""

    def __init__(self, build: EncoderBuild) -> None:
        model_config: Any = build.source.hf_config
        output = build.config.output
        self.has_one_row = output in ("class scores", "sparse vectors")
        if output == "sparse vectors":
            self.width: int = model_config.vocab_size
        else:
            self.width = model_config.hidden_size if gives_states(build.config) else model_config.num_labels

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        for batch in batches:
            shape = batch.ids.shape[:1] if self.has_one_row else batch.ids.shape
            yield batch, np.zeros((*shape, self.width), dtype=np.float32)
