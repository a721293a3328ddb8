"""``upshift.Encoder``: texts to vectors or class scores, by the setup that won the race on the user's own texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from upshift.errors import RequestError
from upshift.hardware import detect
from upshift.hardware.spec import Host
from upshift.inference.encode import Encoding
from upshift.inference.engines.registry import check_engine
from upshift.inference.race import SAMPLE_TEXTS, Race, Run, race, read_quality
from upshift.inference.recipe import Recipe, read_recipe
from upshift.inference.tokens import Tokens
from upshift.models.source import ModelSource, fetch_weights, find_model


class Encoder:
    """``model``: a Hugging Face or sentence-transformers directory, or a hub id.

    ``quality``: ``exact`` (fp32, within 1e-4 of transformers), or the lowest cosine to it that a text may have, such as 0.99.
    ``engine``: only this one. Raises RequestError for what is not possible, with what is.
    """

    def __init__(
        self,
        model: str,
        *,
        quality: str | float = "exact",
        engine: str | None = None,
        on_run: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.quality = read_quality(str(quality))
        self._engine = None if engine is None else check_engine(engine)
        self.source = _with_weights(model)
        self.recipe: Recipe = read_recipe(self.source)
        self.host: Host = detect()
        self.tokens = Tokens(self.source, self.recipe)
        self._on_run = on_run
        self._encoding: Encoding | None = None
        self.race: Race | None = None

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """[N, H] fp32 embeddings in the order of the texts, or [N, C] scores of a classifier. The first call runs the race."""
        if isinstance(texts, str):
            raise RequestError("encode() takes a list of texts and was given one text; use encode([text])")
        if not len(texts):
            return np.empty((0, 0), dtype=np.float32)
        return self.prepare(texts).rows(self.tokens.of(texts))

    def prepare(self, texts: Sequence[str]) -> Encoding:
        """The engine that won on ``texts``, or that won before."""
        if self._encoding is None:
            sample = self.tokens.of(spread(texts, SAMPLE_TEXTS))
            pad = self.tokens.pad
            self.race = race(
                self.source, self.recipe, self.host, sample, self.quality, pad=pad, engine=self._engine, on_run=self._on_run
            )
            self._encoding = Encoding(self.source, self.recipe, self.race.chosen, sample, pad=pad)
        return self._encoding


def spread(texts: Sequence[str], count: int) -> list[str]:
    """So many of them, evenly from first to last."""
    step = max(len(texts) / count, 1.0)
    return [texts[int(place * step)] for place in range(min(count, len(texts)))]


def _with_weights(model: str) -> ModelSource:
    source = find_model(model)
    if source.adapter is not None:
        raise RequestError(f"{model!r} has an adapter; merge it into its model (peft: merge_and_unload), then encode with that")
    fetch_weights(source)
    if source.directory is None or not any(source.directory.glob("*.safetensors")):
        raise RequestError(f"{model!r} has no weights (*.safetensors); give a directory written by save_pretrained")
    return source
