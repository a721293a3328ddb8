"""Small pieces of HTML for the report page. Everything that is not markup of ours goes through ``text``."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

UNKNOWN = '<span class="unknown">unknown</span>'


def text(raw: str) -> str:
    """Any text, made harmless; text that is empty or blank is unknown."""
    return html.escape(raw) if raw.strip() else UNKNOWN


def number(value: float | None, *, digits: int | None = None, small: str = "") -> str:
    """A number with thousands separated, or "unknown". ``small`` is ready markup to stand beneath it."""
    if value is None:
        return UNKNOWN
    if digits is None:
        size = abs(value)
        digits = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2 if size >= 0.1 else 4
    shown = f"{value:.3g}" if abs(value) >= 1e15 else f"{value:,.{digits}f}"
    return shown + (f"<small>{small}</small>" if small else "")


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share * 100:+,.1f} %".replace("-", "\N{MINUS SIGN}")


def times(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:,.1f} \N{MULTIPLICATION SIGN}" if ratio >= 10 else f"{ratio:.2f} \N{MULTIPLICATION SIGN}"


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def paragraph(words: str, *, css: str = "caption") -> str:
    return f'<p class="{css}">{words}</p>'


def empty(why: str) -> str:
    """In place of what a section has no data for."""
    return paragraph(why, css="empty")


def tile_list(found: Iterable[tuple[str, str, str]]) -> str:
    """A few large numbers, those that are known: (name, ready markup of the number, of what stands beneath it)."""
    shown = [f"<div><dt>{name}</dt><dd>{big}<small>{small}</small></dd></div>" for name, big, small in found if big]
    return f'<dl class="tiles">{"".join(shown)}</dl>' if shown else ""


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{text(label)}</dt><dd>{text(words)}</dd>" for label, words in pairs)
    return f'<dl class="facts">{rows}</dl>'


def table(
    heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], *, label: str, marked: frozenset[int] = frozenset()
) -> str:
    """``heads`` are (words, css class) of the columns; cells are ready markup, a row's first is its heading."""
    top = "".join(f'<th scope="col" class="{css}">{html.escape(words)}</th>' for words, css in heads)
    body = []
    for index, cells in enumerate(rows):
        first = f'<th scope="row" class="{heads[0][1]}">{cells[0]}</th>'
        rest = "".join(f'<td class="{css}">{cell}</td>' for cell, (_, css) in zip(cells[1:], heads[1:], strict=True))
        body.append(f"<tr{' class=chosen' if index in marked else ''}>{first}{rest}</tr>")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(label)}"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def plot(place: str, *, label: str, caption: str, height: int | None = None) -> str:
    """The place of one plot. The script draws the figure of the same name into it. ``height`` in pixels, where it is low."""
    low = f' style="min-height:{height}px"' if height else ""
    return (
        f'<figure><div class="plot" id="{place}"{low} role="img" aria-label="{html.escape(label)}"></div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def section(place: str, *, title: str, parts: Iterable[str]) -> str:
    return (
        f'<section id="{place}" aria-labelledby="{place}-title"><h2 id="{place}-title">{html.escape(title)}</h2>'
        + "".join(parts)
        + "</section>"
    )


def slider(place: str, *, label: str, values: Sequence[str], at: int) -> str:
    """A control of the page's figures and words; the chosen one of ``values`` stands beside it."""
    return (
        f'<div class="control"><label for="{place}">{html.escape(label)}</label>'
        f'<input type="range" id="{place}" data-control min="0" max="{len(values) - 1}" step="1" value="{at}" '
        f'autocomplete="off" aria-valuetext="{html.escape(values[at])}">'
        f'<output id="{place}-value" for="{place}">{html.escape(values[at])}</output></div>'
    )


def selection(place: str, *, label: str, values: Sequence[str]) -> str:
    """Likewise, one of a few; the first stands chosen."""
    options = "".join(f'<option value="{index}">{html.escape(value)}</option>' for index, value in enumerate(values))
    return (
        f'<div class="control"><label for="{place}">{html.escape(label)}</label>'
        f'<select id="{place}" data-control autocomplete="off">{options}</select></div>'
    )


def spoken(place: str, words: str) -> str:
    """A paragraph that controls change, and that is read out when they do; ``words`` before they have."""
    return f'<p id="{place}" class="caption" aria-live="polite">{html.escape(words)}</p>'
