"""What of a text is no character: JSON and a command line can hold half of a UTF-16 pair, which no tokenizer takes."""

from __future__ import annotations

import re

HALVES = re.compile(r"[\ud800-\udfff]")


def half_of_pair(text: str) -> str | None:
    r"""The first one, as JSON writes it: ``\ud800``. None: the text has none."""
    found = HALVES.search(text)
    return None if found is None else f"\\u{ord(found.group()):04x}"
