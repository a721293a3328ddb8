"""Pick the user's own texts that a race runs on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return ``count`` of the items, evenly from first to last."""
    return spread_over(items, len(items), count)


def spread_over(items: Iterable[T], total: int, count: int) -> list[T]:
    """Return the same as ``spread`` for items that are read once, one after the other, as those of a file are."""
    places = {place * total // count for place in range(count)} if count < total else range(total)
    return [item for place, item in enumerate(items) if place in places]
