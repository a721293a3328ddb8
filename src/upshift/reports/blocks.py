"""The parts of a page as plain data, and numbers as text. No text holds markup: the template of each part escapes it.

In every part, a text that is blank reads "unknown", and None leaves its place empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class Block:
    """One part of a section. ``template`` is the file in templates/ that turns it into HTML."""

    template: ClassVar[str]


@dataclass(frozen=True)
class Tile:
    """One large number at the top of a page, with a note beneath it. A tile whose value is None is not shown."""

    name: str
    value: str | None
    note: str | None = None


@dataclass(frozen=True)
class Paragraph(Block):
    template: ClassVar[str] = "paragraph.html"
    words: str
    css: str = "caption"


@dataclass(frozen=True)
class Heading(Block):
    template: ClassVar[str] = "heading.html"
    words: str


@dataclass(frozen=True)
class Facts(Block):
    """Pairs of a label and its text."""

    template: ClassVar[str] = "facts.html"
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Cell:
    """A cell of a table with a smaller line beneath its text. ``whole_words``: a line breaks at spaces only, not at hyphens."""

    text: str
    small: str | None = None
    whole_words: bool = False
    is_code: bool = False


Row = Sequence[str | Cell | None]


@dataclass(frozen=True)
class Table(Block):
    """``heads`` are the columns' words and CSS classes. A row's first cell is its heading. ``marked`` are indices of rows."""

    template: ClassVar[str] = "table.html"
    label: str
    heads: Sequence[tuple[str, str]]
    rows: Sequence[Row]
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plot(Block):
    """The place of the figure with the same name. ``label`` is its text for screen readers. ``height`` is in pixels."""

    template: ClassVar[str] = "plot.html"
    name: str
    label: str
    caption: str | None = None
    height: int | None = None


@dataclass(frozen=True)
class Slider:
    """A control of figures and words that moves through ``values``, from the index ``start``."""

    name: str
    label: str
    values: Sequence[str]
    start: int


@dataclass(frozen=True)
class Selection:
    """A control of figures and words that offers ``values``; the first is selected at the start."""

    name: str
    label: str
    values: Sequence[str]


@dataclass(frozen=True)
class Controls(Block):
    template: ClassVar[str] = "controls.html"
    controls: Sequence[Slider | Selection]
    label: str | None = None


@dataclass(frozen=True)
class SpokenWords(Block):
    """A paragraph that controls change, and that screen readers then read out. ``words`` is its text at the start.

    ``is_only_spoken``: it stands for a figure. Only screen readers find it, and they do not read it out at every change."""

    template: ClassVar[str] = "spoken_words.html"
    name: str
    words: str
    is_only_spoken: bool = False


@dataclass(frozen=True)
class Quote(Block):
    template: ClassVar[str] = "quote.html"
    prompt: str
    text: str


@dataclass(frozen=True)
class Command(Block):
    template: ClassVar[str] = "command.html"
    text: str


def missing(why: str) -> Paragraph:
    """Return a paragraph in place of a section's missing data, with the reason."""
    return Paragraph(why, "empty")


def number(value: float | None, digits: int | None = None) -> str:
    """Return a number with thousands separated; blank, which reads "unknown", for None."""
    if value is None:
        return ""
    size = abs(value)
    if size >= 1e15:
        return f"{value:.3g}"
    if digits is None:
        digits = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2 if size >= 0.1 else 4
    return f"{value:,.{digits}f}"


def number_cell(value: float | None, digits: int | None = None, *, small: str | None = None) -> Cell:
    """Return a number with a small line beneath it, or "unknown" without one."""
    return Cell(number(value, digits), small if value is not None else None)


def percent(share: float | None) -> str:
    return "" if share is None else f"{share * 100:+,.1f} %".replace("-", "\N{MINUS SIGN}")


def difference(value: float | None, base: float | None) -> str | None:
    """Return ``value - base`` with its sign, or None where one of them is unknown."""
    if value is None or base is None:
        return None
    return f"{value - base:+.3f}".replace("-", "\N{MINUS SIGN}")


def times(value: float | None, base: float | None) -> str | None:
    """Return how many times ``base`` is in ``value``, or None where one of them is unknown or ``base`` is 0."""
    if value is None or not base:
        return None
    ratio = value / base
    return f"{ratio:,.1f} \N{MULTIPLICATION SIGN}" if ratio >= 10 else f"{ratio:.2f} \N{MULTIPLICATION SIGN}"
