"""Texts to token ids, by the model's own tokenizer, all cores at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upshift.errors import RequestError
from upshift.inference.recipe import Recipe
from upshift.models.build import read_config
from upshift.models.describe import max_positions
from upshift.models.source import ModelSource

UNSET_LENGTH = 10**9  # transformers' "very large integer" of a tokenizer that does not know is above it


class Tokens:
    """``longest``: tokens that are kept of a text; None: all."""

    def __init__(self, source: ModelSource, recipe: Recipe) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(source.directory)
        except (OSError, ValueError) as error:
            raise RequestError(f"{source.reference!r} has no tokenizer that loads ({error}); save one beside the model") from None
        if not tokenizer.is_fast:
            raise RequestError(f"{source.reference!r} has no tokenizer.json; save its tokenizer with save_pretrained")
        self.pad = tokenizer.pad_token_id or 0
        self.longest = _longest(tokenizer, source, recipe)
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_padding()
        if self.longest is not None:
            self._backend.enable_truncation(self.longest)

    def of(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts))]


def _longest(tokenizer: Any, source: ModelSource, recipe: Recipe) -> int | None:
    limits = (recipe.max_length, tokenizer.model_max_length, _positions(source))
    known = [limit for limit in limits if limit is not None and limit < UNSET_LENGTH]
    return min(known, default=None)


def _positions(source: ModelSource) -> int | None:
    import torch
    from transformers import AutoModel

    with torch.device("meta"):
        return max_positions(AutoModel.from_config(read_config(source)))
