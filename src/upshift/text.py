"""Find what no tokenizer accepts: lone surrogates in a text, and parts of a chat message that are not text.

JSON and a command line can hold one half of a UTF-16 surrogate pair, which no tokenizer accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
