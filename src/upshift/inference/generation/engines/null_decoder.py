"""Compute nothing, to measure the time of padding, choosing tokens and keeping rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from upshift.inference.generation.engines.base import DecoderBuild, NoExtension, Padding, Prefix
from upshift.inference.generation.prefix import remaining_tokens


class NullDecoder(NoExtension):
    """A decoder whose logits are zeros."""

    joins = True
    weight_bytes = 0

    def __init__(self, build: DecoderBuild) -> None:
        config: Any = build.source.hf_config
        self.vocabulary: int = config.get_text_config(decoder=True).vocab_size
        self.padding = Padding()

    def compute(self, tokens: Sequence[int]) -> Prefix:
        return Prefix(len(tokens), None)

    def prefix_of_row(self, row: int) -> Prefix:
        return Prefix(int(self.padding.mask[row].sum()), None)

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        self.padding.admit(remaining_tokens(prompts, prefix.length if prefix else 0).mask)
        return self._logits(len(prompts))

    def step(self, tokens: np.ndarray) -> np.ndarray:
        self.padding.step()
        return self._logits(len(tokens))

    def keep(self, rows: list[int]) -> None:
        self.padding.keep(rows)

    def _logits(self, rows: int) -> np.ndarray:
        return np.zeros((rows, self.vocabulary), dtype=np.float32)
