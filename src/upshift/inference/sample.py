"""Which of the user's own texts a race is run on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(items: Sequence[T], count: int) -> list[T]:
    """So many of them, evenly from first to last."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]
