"""An HTML page taken apart, for tests to look at."""

from __future__ import annotations

from html.parser import HTMLParser


class Elements(HTMLParser):
    """Every element with its attributes, the text of scripts, and the text outside of them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words = ""
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.words += data

    def ids(self) -> set[str]:
        return {attributes["id"] or "" for _, attributes in self.elements if "id" in attributes}
