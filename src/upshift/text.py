"""Find what no tokenizer accepts: lone surrogates, and message parts that are not text. Find the name that a user may have meant.

JSON and a command line can hold one half of a UTF-16 surrogate pair, which no tokenizer accepts.

transformers builds some tokenizers without any file of a vocabulary, and does not say so. Those of T5, mBART and DeBERTa then
have only special tokens and a mark for spaces, and turn every text into unknown tokens. ``has_words`` recognizes them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MIN_LIKENESS = 0.65  # of a suggested name, as difflib measures it
NO_VOCABULARY = "it has no vocabulary and turns every text into unknown tokens"
LONE_SURROGATES = re.compile(r"[\ud800-\udfff]")


def find_lone_surrogate(text: str) -> str | None:
    r"""Return the first lone surrogate of a text, as JSON writes it: ``\ud800``. Return None if there is none."""
    match = LONE_SURROGATES.search(text)
    return None if match is None else f"\\u{ord(match.group()):04x}"


def describe_other_part(parts: Sequence[Any]) -> str | None:
    """Return a description of the first part of a chat message's content that is not text. Return None if all are text.

    A part that is text is written as OpenAI's API takes it: ``{"type": "text", "text": ".."}``."""
    for part in parts:
        is_text_part = isinstance(part, Mapping) and part.get("type") == "text" and set(part) == {"type", "text"}
        if is_text_part and isinstance(part["text"], str) and find_lone_surrogate(part["text"]) is None:
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        return f"of type {kind!r}" if kind not in (None, "text") else f"{part!r:.60}"
    return None


def has_words(tokenizer: Any) -> bool:
    """Return whether a token that is not special has a letter or a digit, as in every vocabulary of words, pieces or bytes."""
    special_tokens = set(map(str, tokenizer.all_special_tokens))
    return any(any(map(str.isalnum, token)) for token in tokenizer.get_vocab() if token not in special_tokens)


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` with the names that look like the text, or an empty text."""
    matches = difflib.get_close_matches(text, list(names), n=2, cutoff=MIN_LIKENESS)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
