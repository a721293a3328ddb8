"""Keep texts to a form: before each token, exclude the tokens that would break it. llguidance knows for every state
of the grammar which tokens may follow (Moskal, Musuvathi and others, github.com/guidance-ai/llguidance)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from upshift.errors import RequestError

# Between the parts of a JSON value. Without an end to it, small models write spaces for ever.
WHITESPACE = r"[ \n]{0,16}"


class Grammars:
    """The grammars over one model's tokens. ``vocabulary`` is the number of its logits. ``ends`` are tokens that end
    its texts."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, list(ends)

    def of_json(self, schema: str) -> Grammar:
        """Return the grammar of values that a JSON schema allows. {"type": "object"} allows all objects. Raise
        RequestError for an invalid schema, or one that is not supported."""
        import llguidance

        try:
            said = llguidance.LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": WHITESPACE})
        except ValueError as error:
            raise RequestError(f"the JSON schema is not possible ({error}); give one that is") from None
        return Grammar(self._matcher(said), self._ends)

    def check(self) -> None:
        """Raise RequestError if the model's tokens cannot be told apart."""
        _ = self.tokens

    def spelled(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, which may be a part of a character. If a model has more
        tokens than words, the rest have none."""
        found: bytes = self.tokens.decode_bytes([token]) if token < len(self._tokenizer) else b""
        return found

    @cached_property
    def tokens(self) -> Any:
        """Return llguidance's tokenizer. Building it takes a second for 100,000 tokens."""
        import llguidance.hf
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            kind = type(self._tokenizer).__name__
            raise RequestError(f"forms and log-probabilities want a tokenizer.json; this model has a {kind}: ask without them")
        return llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends or None)

    def _matcher(self, grammar: str) -> Any:
        import llguidance

        found = llguidance.LLMatcher(self.tokens, grammar, log_level=0)
        if found.is_error():
            raise RequestError(f"the JSON schema is not possible ({_first_line(found)}); leave that out of it")
        return found


class Grammar:
    """The state of a text in its form. ``ends`` are tokens that end the text. Some models have words among them."""

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher, self._ends = matcher, list(ends)

    def allowed(self, logits: np.ndarray) -> np.ndarray:
        """Return logits [V] in which tokens that would break the form are -inf. Raise RequestError if all would."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        may = np.zeros(len(logits), dtype=bool)
        may[: len(bits)] = bits[: len(logits)]
        may[self._ends] &= self._matcher.is_accepting()
        if not may.any():
            raise RequestError("the form cannot go on with any of the model's tokens; ask for another one")
        found: np.ndarray = np.where(may, logits, -np.inf).astype(logits.dtype)
        return found

    def ends_with(self, token: int) -> bool:
        """Take a token that is allowed -> whether nothing can follow it. Raises RequestError where the form is too large."""
        if not self._matcher.consume_token(token):
            raise RequestError(f"the form is too large to be held to ({_first_line(self._matcher)}); ask for a simpler one")
        return bool(self._matcher.is_stopped())


def _first_line(matcher: Any) -> str:
    """Return the first line of the error, because a dump of the matcher's states follows it."""
    said: str = matcher.get_error()
    return said.partition("\n")[0]
