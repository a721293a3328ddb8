"""A hook of mkdocs.yml. Pages link to sources, tests and rows beside docs/, as a reader on GitHub follows them; the site has
no such files, so there the link becomes the words and the file's place in the repository. A link with a title, as a number has
that names the rows it is from, says so when it is pointed at."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^)\s#]+)(#[^)\s]*)?(?: \"([^\"]*)\")?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))
    fences = re.split(r"(^```.*?^```\s*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else outside_links(part, folder) for number, part in enumerate(fences))


def outside_links(text: str, folder: str) -> str:
    def words(match: re.Match[str]) -> str:
        label, target = match.group(1), match.group(2)
        place = posixpath.normpath(posixpath.join(folder, target))
        if "://" in target or target.startswith("mailto:") or place.startswith("docs/"):
            return match.group(0)
        if match.group(4):
            return f'<abbr title="{place}: {match.group(4)}">{label}</abbr>'
        return f"`{place}`" if place.endswith(label.strip("`")) else f"{label} (`{place}`)"

    return LINK.sub(words, text)
