"""Turn texts, and pairs of texts, into token ids with the model's own tokenizer, on all cores at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import normalizers

from upshift.errors import RequestError
from upshift.inference.encoding.engines.base import SEGMENT, gives_states, model_class
from upshift.inference.encoding.model_config import EncodingConfig
from upshift.inference.encoding.text_pair import Item, Pair
from upshift.inference.tokenizer import load_tokenizer
from upshift.models.config import padding_of
from upshift.models.profile_cache import isolation_of, positions_of
from upshift.models.source import ModelSource

UNSET_LENGTH = 10**9  # transformers' "very large integer" for an unknown maximum length is larger


class TextTokenizer:
    """The model's own tokenizer, on all cores at once.

    ``longest`` is the maximum number of tokens of a text, or of both texts of a pair together, or None. ``alone`` says that a
    text must be a batch of its own, and ``has_segments`` that the model is told of which text of a pair a token is."""

    def __init__(self, source: ModelSource, config: EncodingConfig) -> None:
        tokenizer = load_tokenizer(source)
        self.pad: int = tokenizer.pad_token_id or 0
        self.alone = False
        if config.output == "class scores":  # a decoder scores its last token that is not the config's own padding
            config_pad = padding_of(source.hf_config.get_text_config())
            if config_pad is None:
                self.alone = True
            else:
                self.pad = config_pad
        self.alone = self.alone or must_be_alone(source, config)
        self.shortest = isolation_of(source, states=gives_states(config)).shortest
        self._reference = source.reference
        self.longest = _max_length(tokenizer, source, config)
        self.has_segments = config.pairs and _takes_segments(tokenizer, source, config)
        self._prompt = config.prompt
        self._config = config
        self._expansion = _expansion_id(tokenizer, source, config) if config.expand_to else 0
        self.skipped = tuple(_known_ids(tokenizer, config.skipped_words))
        self._backend = tokenizer.backend_tokenizer
        if config.lower_case:
            own_normalizers = [] if self._backend.normalizer is None else [self._backend.normalizer]
            self._backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own_normalizers])
        self._backend.no_padding()
        if self.longest is not None:
            self._backend.enable_truncation(self.longest, direction=tokenizer.truncation_side)

    def tokenize(self, texts: Sequence[Item], *, first: int = 0) -> list[list[int]]:
        """Return the token ids of the texts, with the model's prompt before each text, or before the first of two.

        With ``has_segments``, a token is its id plus SEGMENT times its segment. ``first`` is the index of the first text among
        all, for the message about a text that is too short."""
        inputs = [self._with_prompt(text) for text in texts]
        encoded_texts = self._backend.encode_batch_fast(inputs)
        if self.has_segments:
            ids = [_pack_segments(encoded) for encoded in encoded_texts]
        else:
            ids = [self._expand(encoded.ids) for encoded in encoded_texts]
        self._check_shortest(texts, ids, first)
        return ids

    def _expand(self, ids: list[int]) -> list[int]:
        """Return the ids of a query with those of the token that fills it up."""
        token = self._expansion if self._config.attend_expansion else -1 - self._expansion
        return ids + [token] * (self._config.expand_to - len(ids))

    def _with_prompt(self, text: Item) -> str | tuple[str, str]:
        if isinstance(text, Pair):
            return self._prompt + text.text, text.text_pair
        return self._prompt + text

    def tokenize_with_offsets(self, texts: Sequence[str]) -> list[Any]:
        """Return encodings with ``ids``, ``tokens``, and ``offsets``: the characters of the text that each token covers."""
        encoded_texts: list[Any] = self._backend.encode_batch(list(texts))
        self._check_shortest(texts, [encoded.ids for encoded in encoded_texts], 0)
        return encoded_texts

    def _check_shortest(self, texts: Sequence[Item], ids: list[list[int]], first: int) -> None:
        """Raise RequestError for a text that is too short for the model's layers, such as those that pool tokens."""
        if self.shortest == 1:
            return
        for number, (text, row) in enumerate(zip(texts, ids, strict=True), start=first + 1):
            if len(row) < self.shortest:
                raise RequestError(
                    f"text {number}, {text!r:.60}, has {len(row)} tokens, and {self._reference!r} computes texts of "
                    f"{self.shortest} or more; make it longer, or leave it out"
                )

    def special(self) -> tuple[int, int]:
        """Return how many special tokens come before the tokens of a text, and how many come after them."""
        mask = self._backend.encode("a").special_tokens_mask
        text_positions = [position for position, is_special in enumerate(mask) if not is_special] or [len(mask)]
        return text_positions[0], max(len(mask) - 1 - text_positions[-1], 0)


def _expansion_id(tokenizer: Any, source: ModelSource, config: EncodingConfig) -> int:
    """Return the id of the token that fills queries up: the files', the mask, or the end of a text."""
    token = config.expansion_token or tokenizer.mask_token or tokenizer.eos_token
    ids = list(_known_ids(tokenizer, (token,))) if token is not None else []
    if not ids:
        raise RequestError(f"the tokenizer of {source.reference!r} has no token {token!r}, which fills its queries up")
    return ids[0]


def _known_ids(tokenizer: Any, words: Sequence[str]) -> Iterator[int]:
    """Yield the ids of the words that are tokens."""
    for word in words:
        token = tokenizer.convert_tokens_to_ids(word)
        if token is not None and (token != tokenizer.unk_token_id or word == tokenizer.unk_token):
            yield token


def _pack_segments(encoded: Any) -> list[int]:
    return [token + SEGMENT * segment for token, segment in zip(encoded.ids, encoded.type_ids, strict=True)]


def _takes_segments(tokenizer: Any, source: ModelSource, config: EncodingConfig) -> bool:
    """Return whether the tokenizer gives token_type_ids, and the model takes them."""
    parameters = inspect.signature(model_class(source, config).forward).parameters
    return "token_type_ids" in tokenizer.model_input_names and "token_type_ids" in parameters


def must_be_alone(source: ModelSource, config: EncodingConfig) -> bool:
    """Return whether a text must be a batch of its own: padding changes its vector, or it is not proven that it does not."""
    isolation = isolation_of(source, states=gives_states(config))
    return not isolation.proven or isolation.padding == "none"


def _max_length(tokenizer: Any, source: ModelSource, config: EncodingConfig) -> int | None:
    """Return the maximum number of tokens of a text, or None if nothing limits it."""
    limits = (config.max_length or tokenizer.model_max_length, positions_of(source))
    known_limits = [limit for limit in limits if limit is not None and limit < UNSET_LENGTH]
    return min(known_limits, default=None)
