"""A page as one HTML file that works offline, on a phone and in the dark: what every page of ours has around its sections.

The plotting library's script is written into the file once, and the page forbids the browser to load anything.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from upshift.benchmarking.page_html import section, text
from upshift.benchmarking.page_plots import Figure
from upshift.benchmarking.page_style import SCRIPT, STYLE
from upshift.errors import RequestError

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


class PageSection(NamedTuple):
    place: str
    title: str
    link: str
    parts: Sequence[str]


def check_page_path(path: Path) -> None:
    """Before the work that fills the page. Raises RequestError where a directory stands."""
    if path.is_dir():
        raise RequestError(f"cannot write {path}: it is a directory; give the path of a file, such as {path / 'page.html'}")


def write_page(path: Path, content: str) -> None:
    """Raises RequestError when the file cannot be written."""
    check_page_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; give a path that can be written") from None


def page_html(
    *,
    title: str,
    summary: str,
    tiles: str,
    sections: Sequence[PageSection],
    figures: Mapping[str, Figure],
    words: Mapping[str, Any] | None = None,
) -> str:
    """``figures`` and ``words`` (plain text) by the id of the element they go into. Anywhere in them,
    ``{"by": control, "choices": [...]}`` is the one that the control of this id stands at."""
    links = "".join(f'<li><a href="#{one.place}">{one.link}</a></li>' for one in sections)
    body = "".join(section(one.place, title=one.title, parts=one.parts) for one in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>\n<body>'
        f'<header><h1>{text(title)}</h1><p class="summary">{text(summary)}</p>{tiles}'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main>{body}</main>\n'
        "<footer>Written by Upshift. This file is complete: it loads nothing from the network."
        "<noscript> The plots need JavaScript; the tables do not.</noscript></footer>\n"
        f"{_scripts(figures, words or {})}</body></html>\n"
    )


def _scripts(figures: Mapping[str, Figure], words: Mapping[str, Any]) -> str:
    """The plotting library once, and the script that draws."""
    if not figures:
        return ""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # heavy

    data = _embedded("figures", figures) + (_embedded("words", words) if words else "")
    return f"{data}<script>{get_plotlyjs()}</script>\n<script>{SCRIPT}</script>\n"


def _embedded(place: str, content: Mapping[str, Any]) -> str:
    """JSON that no text in it can end early."""
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{place}">{data}</script>\n'
