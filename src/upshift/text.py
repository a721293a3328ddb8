"""Find lone surrogates in a text, and the name that a user may have meant.

JSON and a command line can hold one half of a UTF-16 surrogate pair, which no tokenizer accepts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MIN_LIKENESS = 0.65  # of a suggested name, as difflib measures it
LONE_SURROGATES = re.compile(r"[\ud800-\udfff]")


def find_lone_surrogate(text: str) -> str | None:
    r"""Return the first lone surrogate of a text, as JSON writes it: ``\ud800``. Return None if there is none."""
    match = LONE_SURROGATES.search(text)
    return None if match is None else f"\\u{ord(match.group()):04x}"


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` with the names that look like the text, or an empty text."""
    matches = difflib.get_close_matches(text, list(names), n=2, cutoff=MIN_LIKENESS)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
