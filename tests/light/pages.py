"""The pages of the documentation, cut into what tests look at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HISTORY = ("log.md", "log_archive.md")  # what was typed then need not work now, and the site has neither
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name not in HISTORY)]

CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)( \"[^\"]*\")?\)")  # and its title: what rows a number is from
COMMENT = re.compile(r"<!--.*?-->", flags=re.DOTALL)


class Block(NamedTuple):
    """What stands between empty lines: a heading, a paragraph, a table, or a fence with all that is in it."""

    kind: str  # "#", "##" ..., "text", "table", "fence"
    line: int
    lines: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def language(self) -> str:
        return self.lines[0].removeprefix("```").strip() if self.kind == "fence" else ""


def blocks(path: Path) -> list[Block]:
    """Of a page without its HTML comments, and without <div> and <span>, which only turn the direction of a script."""
    text = COMMENT.sub(lambda match: "\n" * match.group().count("\n"), path.read_text(encoding="utf-8"))
    found: list[Block] = []
    waiting: list[str] = []
    first, fenced = 0, False

    def end() -> None:
        if waiting:
            found.append(Block(kind_of(waiting[0]), first, [*waiting]))
            waiting.clear()

    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw if fenced else re.sub(r"</?(?:div|span)\b[^>]*>", "", raw)
        opens = line.startswith("```")
        if not fenced and (opens or not line.strip() or line.startswith("#")):
            end()
        if not line.strip() and not fenced:
            continue
        first = first if waiting else number
        waiting.append(line)
        if opens:
            fenced = not fenced
        if (opens and not fenced) or (not fenced and line.startswith("#")):
            end()
    end()
    return found


def kind_of(line: str) -> str:
    if line.startswith("```"):
        return "fence"
    if line.startswith("#"):
        return line.split(" ")[0]
    return "table" if line.startswith("|") else "text"


def place(path: Path, line: int, root: Path = ROOT) -> str:
    return f"{path.relative_to(root)}:{line}"
