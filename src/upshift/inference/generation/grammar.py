"""Keep texts to a grammar: before each token, exclude the tokens that would break it.

llguidance knows for every state of a grammar which tokens may follow (Moskal, Musuvathi and others,
github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from upshift.errors import RequestError

# Between the parts of a JSON value. Without a limit, small models write spaces without end.
WHITESPACE = r"[ \n]{0,16}"
CACHED_GRAMMARS = 16  # a schema of 140 KB takes 0.5 s to read and 4 MB to keep; the largest of a short one takes 9 MB


class Form(NamedTuple):
    """A grammar as an engine takes it that holds whole requests to it: its kind, and its text."""

    kind: Literal["json", "regex", "grammar"]
    text: str


class TokenGuide(Protocol):
    """Decide which tokens may come next. ``form``: the same as a grammar of the whole text, or None if it is none."""

    form: Form | None

    def mask(self, logits: np.ndarray) -> np.ndarray:
        """Return logits [V] in which the tokens that must not come next are -inf."""
        ...

    def accept(self, token: int) -> bool:
        """Append an allowed token. Return whether no token can follow it."""
        ...


class Grammars:
    """The grammars over one model's tokens. ``vocabulary`` is the number of its logits. ``eos_ids`` are the tokens that
    end its texts."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos_ids = list(eos_ids)
        self._read_grammar = lru_cache(CACHED_GRAMMARS)(self._read)  # a client sends its schemas and tools again

    def from_json_schema(self, schema: str) -> Grammar:
        """Return the grammar of the values that a JSON schema allows. {"type": "object"} allows all objects.

        Raise RequestError for a schema that is invalid or not supported."""
        import llguidance

        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": WHITESPACE})
        except ValueError as error:
            raise RequestError(f"the JSON schema is not possible ({error}); give one that is") from None
        return Grammar(self._make_matcher(grammar), self._eos_ids, Form("json", schema))

    def from_regex(self, regex: str) -> Grammar:
        """Return the grammar of the texts that a regular expression matches as a whole. Raise RequestError if it is not
        possible."""
        import llguidance

        matcher = self._make_matcher(llguidance.LLMatcher.grammar_from_regex(regex), "the regular expression")
        return Grammar(matcher, self._eos_ids, Form("regex", regex))

    def from_choices(self, choices: Sequence[str]) -> Grammar:
        """Return the grammar of some texts. None of them is empty."""
        return self.from_regex("|".join(f"({re.escape(choice)})" for choice in choices))

    def from_lark(self, grammar: str, subject: str = "the JSON schema") -> Grammar:
        """Return a grammar in llguidance's variant of Lark. Raise RequestError, naming ``subject``, if it is not possible."""
        return Grammar(self._make_matcher(grammar, subject), self._eos_ids, Form("grammar", grammar))

    def check(self) -> None:
        """Raise RequestError if llguidance does not support the model's tokenizer."""
        _ = self.llg_tokenizer

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, possibly a part of a character.

        A model may have more logits than its tokenizer has tokens. The extra ones have no bytes."""
        if token >= len(self._tokenizer):
            return b""
        decoded: bytes = self.llg_tokenizer.decode_bytes([token])
        return decoded

    @cached_property
    def llg_tokenizer(self) -> Any:
        """Return llguidance's tokenizer. Building it takes a second for 100,000 tokens."""
        import llguidance.hf
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            kind = type(self._tokenizer).__name__
            raise RequestError(f"forms and log-probabilities want a tokenizer.json; this model has a {kind}: ask without them")
        return llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._eos_ids or None)

    def _make_matcher(self, grammar: str, subject: str = "the JSON schema") -> Any:
        """Return a matcher at the beginning of a text. Raise RequestError, naming ``subject``, if there is none."""
        return self._read_grammar(grammar, subject).deep_copy()

    def _read(self, grammar: str, subject: str) -> Any:
        import llguidance

        matcher = llguidance.LLMatcher(self.llg_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{subject} is not possible ({_first_line(matcher)}); leave that out of it")
        return matcher


class Grammar:
    """The state of one text in its grammar. ``eos_ids`` are the tokens that end the text. In some models they are words
    too."""

    def __init__(self, matcher: Any, eos_ids: Sequence[int], form: Form | None = None) -> None:
        self.form = form
        self._matcher = matcher
        self._eos_ids = list(eos_ids)

    def mask(self, logits: np.ndarray) -> np.ndarray:
        """Return logits [V] in which the tokens that would break the grammar are -inf. Raise RequestError if all would."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        is_allowed = np.zeros(len(logits), dtype=bool)
        is_allowed[: len(bits)] = bits[: len(logits)]
        is_allowed[self._eos_ids] &= self._matcher.is_accepting()
        if not is_allowed.any():
            raise RequestError("the form cannot go on with any of the model's tokens; ask for another one")
        masked: np.ndarray = np.where(is_allowed, logits, -np.inf).astype(logits.dtype)
        return masked

    def accept(self, token: int) -> bool:
        """Append an allowed token. Return whether no token can follow it. Raise RequestError if the grammar is too large."""
        if not self._matcher.consume_token(token):
            raise RequestError(f"the form is too large to be held to ({_first_line(self._matcher)}); ask for a simpler one")
        return bool(self._matcher.is_stopped())


def _first_line(matcher: Any) -> str:
    """Return the first line of the matcher's error. A dump of the matcher's states follows it."""
    message: str = matcher.get_error()
    return message.partition("\n")[0]
