"""Select rows of a split: ``train[:10%]``, ``train[-100:]``, ``train[:10%]+train[90%:]``.

The notation and its rounding are those of ``datasets.ReadInstruction``. A test compares the two. A slice with a share, or with a
place from the end, needs the number of rows, so the rows are counted first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from upshift.errors import RequestError

Item = TypeVar("Item")
PART = re.compile(r"(?P<split>[\w-]+(\.[\w-]+)*)(\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?")


class SlicePart(NamedTuple):
    """A range of rows. A border is a number of rows or a share in percent, from the end if it is negative. None: no border."""

    first: int | None = None
    last: int | None = None
    is_share: bool = False


class RowSlice(NamedTuple):
    """The split to read, and the ranges of its rows, in their order. Without ranges all rows are read."""

    split: str
    parts: tuple[SlicePart, ...] = ()

    @property
    def is_whole(self) -> bool:
        return not self.parts

    def select(self, read: Callable[[], Iterable[Item]]) -> Iterator[Item]:
        """Yield the selected items of what ``read`` returns. It is called again for each further range, and to count."""
        num_items = sum(1 for _ in read()) if self._needs_count() else None
        for first, last in self.ranges(num_items):
            for number, item in enumerate(read()):
                if last is not None and number >= last:
                    break
                if number >= first:
                    yield item

    def ranges(self, num_items: int | None) -> list[tuple[int, int | None]]:
        """Return the first item of each range, and the one behind its last. None: no end."""
        return [_absolute(part, num_items) for part in self.parts or (SlicePart(),)]

    def _needs_count(self) -> bool:
        borders = [border for part in self.parts for border in (part.first, part.last) if border is not None]
        return any(part.is_share for part in self.parts) or any(border < 0 for border in borders)


def read_split(text: str) -> RowSlice:
    """Return the slice that a text names. Raise RequestError for other texts, and for ranges of several splits."""
    matches = [PART.fullmatch(part.strip()) for part in text.split("+")]
    found = [match for match in matches if match is not None]
    if len(found) < len(matches):
        raise _no_split(text)
    splits = dict.fromkeys(match["split"] for match in found)
    if len(splits) > 1:
        raise RequestError(f"--split {text} names the splits {', '.join(splits)}; give parts of one split")
    has_ranges = any(match[3] for match in found)
    parts = tuple(_part_of(match, text) for match in found) if has_ranges else ()
    if len(found) > 1 and not has_ranges:
        raise _no_split(text)
    return RowSlice(next(iter(splits)), parts)


def _part_of(match: re.Match[str], text: str) -> SlicePart:
    borders = [match["first"], match["last"]]
    is_share = any(border is not None and border.endswith("%") for border in borders)
    values = [None if border is None else int(border.removesuffix("%")) for border in borders]
    if is_share and any(value is not None and abs(value) > 100 for value in values):
        raise _no_split(text)
    return SlicePart(values[0], values[1], is_share)


def _absolute(part: SlicePart, num_items: int | None) -> tuple[int, int | None]:
    """Return the two borders of a range as numbers of items, none of them beyond the end."""
    if num_items is None:
        return part.first or 0, part.last
    borders = [
        default if border is None else round(border * num_items / 100) if part.is_share else border
        for border, default in ((part.first, 0), (part.last, num_items))
    ]
    first, last = (max(num_items + border, 0) if border < 0 else min(border, num_items) for border in borders)
    return first, last


def _no_split(text: str) -> RequestError:
    return RequestError(
        f"--split {text} is no split; write its name, such as test, or a range of its rows, such as train[:10%], "
        "train[100:200] or train[:5%]+train[-5%:]"
    )


def pick_split(splits: Sequence[str], wanted: str, origin: Any) -> str:
    """Return the wanted split. Raise RequestError if the data does not have it."""
    if wanted in splits:
        return wanted
    raise RequestError(f"{origin} has no split {wanted!r}; it has {', '.join(splits) or 'none'}; name one of them with --split")
