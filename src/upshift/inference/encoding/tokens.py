"""Texts to token ids, by the model's own tokenizer, all cores at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upshift.inference.encoding.recipe import Recipe
from upshift.inference.tokenizer import load_tokenizer, positions
from upshift.models.source import ModelSource

UNSET_LENGTH = 10**9  # transformers' "very large integer" of a tokenizer that does not know is above it


class Tokens:
    """``longest``: tokens that are kept of a text; None: all."""

    def __init__(self, source: ModelSource, recipe: Recipe) -> None:
        tokenizer = load_tokenizer(source)
        self.pad = tokenizer.pad_token_id or 0
        self.longest = _longest(tokenizer, source, recipe)
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_padding()
        if self.longest is not None:
            self._backend.enable_truncation(self.longest)

    def of(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts))]

    def located(self, texts: Sequence[str]) -> list[Any]:
        """The same with ``tokens`` and ``offsets``, the characters of the text that each token is made of."""
        found: list[Any] = self._backend.encode_batch(list(texts))
        return found

    def special(self) -> tuple[int, int]:
        """How many tokens that are of no text stand before those of a text and behind them."""
        mask = self._backend.encode("a").special_tokens_mask
        own = [place for place, is_special in enumerate(mask) if not is_special] or [len(mask)]
        return own[0], max(len(mask) - 1 - own[-1], 0)


def _longest(tokenizer: Any, source: ModelSource, recipe: Recipe) -> int | None:
    limits = (recipe.max_length, tokenizer.model_max_length, positions(source))
    known = [limit for limit in limits if limit is not None and limit < UNSET_LENGTH]
    return min(known, default=None)
