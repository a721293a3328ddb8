"""A hook of mkdocs.yml. Pages link to sources, tests and rows beside docs/, and to the log, as a reader on GitHub follows them.
The site has no such files, so there the link becomes the words and the file's place in the repository. A link with a title, as a
number has that names the rows it is from, says so when it is pointed at. Fences of commands get the colours of shell code."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^)\s#]+)(#[^)\s]*)?(?: \"([^\"]*)\")?\)")


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))
    excluded = {posixpath.join("docs", file.src_uri) for file in files if file.inclusion.is_excluded()}
    fences = re.split(r"(^```.*?^```\s*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        as_shell(part) if number % 2 else outside_links(part, folder, excluded) for number, part in enumerate(fences)
    )


def as_shell(fence: str) -> str:
    """Return a fence of commands as one of shell code. As ``console``, lines without a prompt are grey, as output is."""
    return re.sub(r"^```console\b", "```sh", fence)


def outside_links(text: str, folder: str, excluded: set[str]) -> str:
    """Return the text with each link to a file that the site does not have as words. `excluded`: such files of docs/."""

    def words(match: re.Match[str]) -> str:
        label, target = match.group(1), match.group(2)
        place = posixpath.normpath(posixpath.join(folder, target))
        if "://" in target or target.startswith("mailto:"):
            return match.group(0)
        if place.startswith("docs/") and place not in excluded:
            return match.group(0)
        if match.group(4):
            return f'<abbr title="{place}: {match.group(4)}">{label}</abbr>'
        return f"`{place}`" if place.endswith(label.strip("`")) else f"{label} (`{place}`)"

    return LINK.sub(words, text)
