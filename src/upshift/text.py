"""Find what no tokenizer accepts: lone surrogates, and message parts that are not text. Find the name that a user may have meant.
Replace contents of messages that are null by what the chat template accepts. Write the texts of errors on one line.

JSON and a command line can hold one half of a UTF-16 surrogate pair, which no tokenizer accepts.

transformers builds some tokenizers without any file of a vocabulary, and does not say so. Those of T5, mBART and DeBERTa then
have only special tokens and a mark for spaces, and turn every text into unknown tokens. ``has_words`` recognizes them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
PRINTED_NULL = "None"  # as a chat template writes a null

MIN_LIKENESS = 0.65  # of a suggested name, as difflib measures it
NO_VOCABULARY = "it has no vocabulary and turns every text into unknown tokens"
LONE_SURROGATES = re.compile(r"[\ud800-\udfff]")


def one_line(message: object, *, limit: int | None = 300) -> str:
    """Return the text of an error, or another text, on one line, cut to ``limit`` characters. None cuts nothing."""
    return " ".join(str(message).split())[:limit]


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


def join_names(names: Iterable[Any]) -> str:
    """Return names from data with commas between them, in one line: what cannot be printed is escaped. No names: ``none``."""
    texts = map(str, names)
    return ", ".join(text if text.isprintable() else repr(text)[1:-1] for text in texts) or "none"


def fill_null_contents(messages: Messages, write: Callable[[Messages], str | None]) -> list[dict[str, Any]]:
    """Return the messages, with contents that are null or missing in the form that the chat template accepts.

    A message that calls tools without a text has ``content: null`` in OpenAI's form. Some templates test for null. Others join
    the content with a text or search in it, which fails for null. Others print "None".

    A null stays if the template accepts it and does not print it as "None". Otherwise the content becomes an empty text. If the
    template rejects that, the content is left out.

    Args:
        messages: with or without such contents.
        write: the text that the template makes of messages, or None if it rejects them.
    """
    if all(message.get("content") is not None for message in messages):
        return [dict(message) for message in messages]
    null, empty, missing = forms = (_fill(messages, content=None), _fill(messages, content=""), _without_contents(messages))
    texts = [write(form) for form in forms]
    words = [text.count(PRINTED_NULL) for text in texts[1:] if text is not None]
    if texts[0] is not None and texts[0].count(PRINTED_NULL) <= min(words, default=0):
        return null
    if texts[1] is not None:
        return empty
    return missing if texts[2] is not None else null


def _fill(messages: Messages, *, content: str | None) -> list[dict[str, Any]]:
    return [{**message, "content": content} if message.get("content") is None else dict(message) for message in messages]


def _without_contents(messages: Messages) -> list[dict[str, Any]]:
    return [{name: value for name, value in message.items() if name != "content" or value is not None} for message in messages]
