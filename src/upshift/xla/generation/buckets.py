"""Choose which prompts are generated together, and how wide. Shapes are few, as each compiles a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

NARROWEST = 32
MANY = 8  # prompts at once


class Group(NamedTuple):
    places: tuple[int, ...]  # of its prompts, among all
    width: int


def width_of(length: int, *, multiple: int | None) -> int:
    """Return a power of two from 32 on, so that any lengths need few programs, or the next multiple."""
    if multiple is not None:
        return -(-length // multiple) * multiple
    return max(NARROWEST, 1 << (length - 1).bit_length())


def groups(lengths: Sequence[int], *, rows: int, multiple: int | None = None) -> Iterator[Group]:
    """Return groups of at most ``rows`` prompts of one width. A width of few prompts joins the next one that there
    is, so that no program is compiled for less than a group."""
    by_width: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        by_width.setdefault(width_of(length, multiple=multiple), []).append(place)
    waiting: list[int] = []
    widths = sorted(by_width)
    for width in widths:
        waiting += by_width[width]
        whole = len(waiting) // rows * rows if width != widths[-1] else len(waiting)
        for start in range(0, whole, rows):
            yield Group(tuple(waiting[start : min(start + rows, whole)]), width)
        waiting = waiting[whole:]
