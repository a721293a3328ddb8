"""Renew numbers in documents from the rows: links to rows, and tables between markers.

A number in a sentence is a link to the rows it is from, whose title names it: [5.7](benchmarks/results/drop_in.jsonl
"drop_in/causal-lm"). It is written with as many decimals as stand there. A table stands between <!-- rows: case/name --> and
<!-- end -->; the case defines its content. A whole document may also be made by a function of a case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from upshift.benchmarking.claims import CaseFile
from upshift.errors import RequestError

HISTORY = ("log.md", "log_archive.md")
LINKED = re.compile(r'\[([^\]\n]+)\]\(([^)\s]*results/\w+\.jsonl) "([\w-]+)/([^"\n]+)"\)')
TABLED = re.compile(r"(<!-- rows: ([\w-]+)/([^\n]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.(\d+))?")


class Stale(NamedTuple):
    """A number or a table that is not what the rows say."""

    place: str  # file:line
    name: str
    written: str
    rows_say: str

    def __str__(self) -> str:
        return f"{self.place}: {self.name} is written {self.written!r}, and the rows say {self.rows_say!r}"


def documents(root: Path) -> list[Path]:
    """Return README and docs, in every language, and the README of the cases, without the log and its archive, which keep old
    numbers."""
    readmes = [*sorted(root.glob("README*.md")), *root.glob("benchmarks/README.md")]
    return [*readmes, *(path for path in sorted(root.glob("docs/**/*.md")) if path.name not in HISTORY)]


def renewed(text: str, cases: Mapping[str, CaseFile]) -> str:
    """Return the text with every number and table as the rows have it now."""
    text = LINKED.sub(lambda match: match[0].replace(f"[{match[1]}]", f"[{_number(match, cases)}]", 1), text)
    return TABLED.sub(lambda match: f"{match[1]}{_table(match[2], match[3], cases)}\n{match[5]}", text)


def stale(root: Path, cases: Mapping[str, CaseFile]) -> Iterator[Stale]:
    for path in documents(root):
        text = path.read_text(encoding="utf-8")
        for pattern in (LINKED, TABLED):
            for match in pattern.finditer(text):
                now = renewed(match[0], cases)
                if now != match[0]:
                    name = "/".join(match.group(3, 4) if pattern is LINKED else match.group(2, 3))
                    line = text.count("\n", 0, match.start()) + 1
                    said = [LINKED.sub(r"\1", one).splitlines() for one in (match[0], now)]
                    pairs = zip_longest(*said, fillvalue="nothing")
                    yield Stale(f"{path.relative_to(root)}:{line}", name, *next(pair for pair in pairs if pair[0] != pair[1]))


def write(root: Path, cases: Mapping[str, CaseFile]) -> list[Path]:
    """Renew every document and return those that changed."""
    changed = []
    for path in documents(root):
        text = path.read_text(encoding="utf-8")
        now = renewed(text, cases)
        if now != text:
            path.write_text(now, encoding="utf-8")
            changed.append(path)
    return changed


def figures_of(text: str) -> list[str]:
    """Return the names of the figures that a document's numbers are linked to, in their order."""
    return [f"{match[3]}/{match[4]}" for match in LINKED.finditer(text)]


def _case(name: str, cases: Mapping[str, CaseFile]) -> CaseFile:
    if name not in cases:
        raise RequestError(f"a document names the case {name!r}; there are {', '.join(cases)}")
    return cases[name]


def _number(match: re.Match[str], cases: Mapping[str, CaseFile]) -> str:
    """Return the text of the link, its first number renewed."""
    text, value = match[1], _case(match[3], cases).latest(match[4])
    written = NUMBER.search(text)
    if written is None:
        raise RequestError(f"{match[0]!r} has no number to renew; write one, or leave the title out")
    grouped = "," if "," in written[0] or not written[1] else ""
    sign = "+" if written[0].startswith("+") else ""
    return text[: written.start()] + f"{value:{sign}{grouped}.{len(written[1] or '')}f}" + text[written.end() :]


def _table(case: str, name: str, cases: Mapping[str, CaseFile]) -> str:
    file = _case(case, cases)
    table = next((one for one in file.tables if one.name == name), None)
    if table is None:
        raise RequestError(
            f"{file.path.name} states no table {name!r}; it states {', '.join(t.name for t in file.tables) or 'none'}"
        )

    def filled(cell: str) -> str:
        return re.sub(r"\{([^{}:]+):([^{}]+)\}", lambda match: format(file.latest(match[1]), match[2]), cell)

    lines = [table.header, ("---", *["---:"] * (len(table.header) - 1)), *([filled(cell) for cell in row] for row in table.rows)]
    if table.each:
        entries = file.entries(table.of, table.each)
        lines += [[key, *(cell.format_map(entry) for cell in table.cells)] for key, entry in entries.items()]
    return "\n".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|" for line in lines)
