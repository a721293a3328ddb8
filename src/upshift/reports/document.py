"""Render a page as one HTML file that works offline, on a phone and in dark mode.

The plotting library's script is written into the file once, and the page forbids the browser to load anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from upshift.errors import RequestError
from upshift.reports.blocks import Block, Tile
from upshift.reports.plots import Figure


@dataclass(frozen=True)
class Section:
    """A section of a page. ``link`` is its short title in the navigation."""

    name: str
    title: str
    link: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """The content of a page. ``figures`` and ``words`` are by the id of the element that they go into. Anywhere in
    these two, ``{"by": control, "choices": [...]}`` is the choice that the control of this id selects."""

    title: str
    summary: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    figures: Mapping[str, Figure]
    words: Mapping[str, Any] = field(default_factory=dict)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("upshift.reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def page_html(page: Page) -> str:
    """Return the whole page. Every text in it is escaped; only our templates and the plotting library are markup."""
    library = ""
    if page.figures:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # heavy

        library = get_plotlyjs()
    tiles = [tile for tile in page.tiles if tile.value is not None]
    return _environment().get_template("page.html").render(page=page, tiles=tiles, plotting_library=library)


def check_page_path(path: Path) -> None:
    """Raise RequestError if the path is a directory. Call it before the work that fills the page."""
    if path.is_dir():
        raise RequestError(f"cannot write {path}: it is a directory; give the path of a file, such as {path / 'page.html'}")


def write_page(path: Path, content: str) -> None:
    """Write the file, and create its folder. Raise RequestError if that is not possible."""
    check_page_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; give a path that can be written") from None
