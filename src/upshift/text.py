"""Find lone surrogates in a text.

JSON and a command line can hold one half of a UTF-16 surrogate pair, which no tokenizer accepts."""

from __future__ import annotations

import re

LONE_SURROGATES = re.compile(r"[\ud800-\udfff]")


def find_lone_surrogate(text: str) -> str | None:
    r"""Return the first lone surrogate of a text, as JSON writes it: ``\ud800``. Return None if there is none."""
    match = LONE_SURROGATES.search(text)
    return None if match is None else f"\\u{ord(match.group()):04x}"
