"""Lay out ranked plans in columns: a line for the choices that all plans share, a column for each other kind of choice, and as
many columns of numbers as the screen has room for. Where few would fit, the widest columns of text go to a second line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.text import Text

from upshift.cli import tables
from upshift.planning.plan import SEPARATOR

MARGIN = " "
GAP = "  "  # between two columns
RANK_WIDTH = 4  # of the first column, at most
LEAST_NUMBERS = 3  # columns, for which text goes to a second line


@dataclass(frozen=True)
class Row:
    """A plan to print. ``choices``: by kind. ``numbers``: the cells by column. ``num_alike``: other plans with these numbers."""

    rank: str
    choices: dict[str, str]
    numbers: dict[str, str]
    num_alike: int = 0


def choices_by_kind(choices: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return one text for each kind of choice."""
    texts: dict[str, list[str]] = {}
    for kind, text in choices:
        texts.setdefault(kind, []).append(text)
    return {kind: SEPARATOR.join(parts) for kind, parts in texts.items()}


def print_rows(rows: Sequence[Row], kinds: Sequence[str], *, priority: Sequence[str]) -> set[str]:
    """Print the line of the shared choices, then the table. Return the names of the columns of numbers that had room.

    Args:
        rows: the plans, best first.
        kinds: the kinds of choices, in the order of the columns.
        priority: the columns of numbers, the most important one first. The last ones are left out of a narrow table. So are those
            that are empty in every row.
    """
    differing = [kind for kind in kinds if len({row.choices.get(kind) for row in rows}) > 1]
    shared = [text for kind in kinds if kind not in differing and (text := rows[0].choices.get(kind))]
    if shared:
        name = "All of these plans" if len(rows) > 1 else "Plan 1"
        tables.out.print(Text.assemble((f"{name}: ", "bold"), SEPARATOR.join(shared)))
    texts = {kind: [_cell(kind, row.choices.get(kind)) for row in rows] for kind in differing}
    if any(row.num_alike for row in rows):
        texts["alike"] = [f"+{row.num_alike}" if row.num_alike else "" for row in rows]
    numbers = {name: cells for name in priority if any(cells := [row.numbers[name] for row in rows])}
    above, below, shown = _arrange(texts, numbers, room=tables.out.width - len(MARGIN))
    numbers = {name: numbers[name] for name in rows[0].numbers if name in shown}
    ranks = [row.rank for row in rows]
    columns = [_aligned("#", ranks), *(_aligned(name, texts[name]) for name in above)]
    columns += [_aligned(name, cells, to_right=True) for name, cells in numbers.items()]
    lines = [GAP.join(cells).rstrip() for cells in zip(*columns, strict=True)]
    under = [""] * len(lines)
    if below:
        indent = MARGIN + " " * max(map(len, ranks)) + GAP
        under = [indent + SEPARATOR.join(cells) for cells in zip(*([name, *texts[name]] for name in below), strict=True)]
    _print_lines(lines, under)
    return set(numbers)


def _print_lines(lines: list[str], under: list[str]) -> None:
    """Print each line with the one under it. The first is the heading."""
    width = max(map(len, lines))
    for index, (line, second) in enumerate(zip(lines, under, strict=True)):
        style = "bold" if index == 0 else ""
        tables.out.print(Text(f"{MARGIN}{line}", style))
        if second:
            tables.out.print(Text(second, style))
        if index == 0:
            tables.out.print(Text(MARGIN + "─" * width))
    tables.out.print()


def _cell(kind: str, text: str | None) -> str:
    if text is None:
        return "data parallel" if kind == "layout" else "-"
    return text.removeprefix(f"{kind} ").removesuffix(f" {kind}")


def _aligned(name: str, cells: list[str], *, to_right: bool = False) -> list[str]:
    """Return the heading and the cells of a column, all of one width."""
    width = _width(name, cells)
    return [text.rjust(width) if to_right else text.ljust(width) for text in (name, *cells)]


def _width(name: str, cells: list[str]) -> int:
    return max(map(len, (name, *cells)))


def _arrange(texts: dict[str, list[str]], numbers: dict[str, list[str]], *, room: int) -> tuple[list[str], list[str], set[str]]:
    """Return the columns of text in the first line of a row, those in its second line, and the columns of numbers.

    ``numbers``: the most important column first. The widest columns of text are in the second line if few numbers would fit.
    """
    above, below = list(texts), list[str]()

    def fitting() -> list[str]:
        left = room - RANK_WIDTH - sum(len(GAP) + _width(name, texts[name]) for name in above)
        totals = accumulate(len(GAP) + _width(name, cells) for name, cells in numbers.items())
        return [name for name, total in zip(numbers, totals, strict=True) if total <= left]

    while above and len(fitting()) < min(LEAST_NUMBERS, len(numbers)):
        widest = max(above, key=lambda name: _width(name, texts[name]))
        above.remove(widest)
        below.append(widest)
    return above, [name for name in texts if name in below], set(fitting() or numbers)
