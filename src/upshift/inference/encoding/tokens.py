"""Turn texts into token ids with the model's own tokenizer, on all cores at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import normalizers

from upshift.inference.encoding.recipe import Recipe
from upshift.inference.tokenizer import load_tokenizer
from upshift.models.config_sizes import padding_of
from upshift.models.source import ModelSource
from upshift.models.store import isolation_of, positions_of

UNSET_LENGTH = 10**9  # transformers' "very large integer" of a tokenizer that does not know is above it


class Tokens:
    """The model's tokenizer. ``longest``: tokens kept of a text; None: all. ``alone``: a text must be a batch of its own."""

    def __init__(self, source: ModelSource, recipe: Recipe) -> None:
        tokenizer = load_tokenizer(source)
        self.pad, self.alone = tokenizer.pad_token_id or 0, False
        if recipe.output == "class scores":  # a decoder's scores are of the last token that is not the config's own padding
            known = _padding(source)
            self.pad, self.alone = (self.pad, True) if known is None else (known, False)
        self.alone = self.alone or reads_alone(source, recipe)
        self.longest = _longest(tokenizer, source, recipe)
        self._prompt = recipe.prompt
        self._backend = tokenizer.backend_tokenizer
        if recipe.lower_case:
            own = [] if self._backend.normalizer is None else [self._backend.normalizer]
            self._backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        self._backend.no_padding()
        if self.longest is not None:
            self._backend.enable_truncation(self.longest, direction=tokenizer.truncation_side)

    def of(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast([self._prompt + text for text in texts])]

    def located(self, texts: Sequence[str]) -> list[Any]:
        """Return encodings, with ``tokens`` and with ``offsets``: the characters of the text that each token is made of."""
        found: list[Any] = self._backend.encode_batch(list(texts))
        return found

    def special(self) -> tuple[int, int]:
        """Return how many special tokens come before the tokens of a text, and how many come after them."""
        mask = self._backend.encode("a").special_tokens_mask
        own = [place for place, is_special in enumerate(mask) if not is_special] or [len(mask)]
        return own[0], max(len(mask) - 1 - own[-1], 0)


def reads_alone(source: ModelSource, recipe: Recipe) -> bool:
    """Return whether a text must be a batch of its own: padding would change its vector, or nothing proves that it would not."""
    isolation = isolation_of(source, states=recipe.output == "embeddings")
    return not isolation.proven or isolation.padding == "none"


def _padding(source: ModelSource) -> int | None:
    return padding_of(source.hf_config.get_text_config())


def _longest(tokenizer: Any, source: ModelSource, recipe: Recipe) -> int | None:
    limits = (recipe.max_length or tokenizer.model_max_length, positions_of(source))
    known = [limit for limit in limits if limit is not None and limit < UNSET_LENGTH]
    return min(known, default=None)
