"""Find parts of a text that are no characters.

JSON and a command line can hold half of a UTF-16 pair, which no tokenizer takes."""

from __future__ import annotations

import re

HALVES = re.compile(r"[\ud800-\udfff]")


def half_of_pair(text: str) -> str | None:
    r"""Return the first half of a UTF-16 pair, as JSON writes it: ``\ud800``. Return None if the text has none."""
    found = HALVES.search(text)
    return None if found is None else f"\\u{ord(found.group()):04x}"
