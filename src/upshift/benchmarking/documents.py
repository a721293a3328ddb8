"""Renew the numbers and tables of documents from the result rows.

A number in a sentence is a link to its rows, and the link's title names the figure: [5.7](benchmarks/results/drop_in.jsonl
"drop_in/causal-lm"). A new number gets as many decimals as the old one has. A table stands between <!-- rows: case/name --> and
<!-- end -->, and the case defines its content. A function of a case may also write a whole document.
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


class StalePassage(NamedTuple):
    """A number or a table that differs from the rows."""

    place: str  # file:line
    name: str
    written: str
    rows_say: str

    def __str__(self) -> str:
        return f"{self.place}: {self.name} is written {self.written!r}, and the rows say {self.rows_say!r}"


def document_paths(root: Path) -> list[Path]:
    """Return the READMEs in all languages, the README of the cases, and docs, without the log and its archive.

    The log keeps old numbers."""
    readmes = [*sorted(root.glob("README*.md")), *root.glob("benchmarks/README.md")]
    return [*readmes, *(path for path in sorted(root.glob("docs/**/*.md")) if path.name not in HISTORY)]


def renew_text(text: str, cases: Mapping[str, CaseFile]) -> str:
    """Return the text with all numbers and tables from the newest rows."""
    text = LINKED.sub(lambda match: match[0].replace(f"[{match[1]}]", f"[{_number(match, cases)}]", 1), text)
    return TABLED.sub(lambda match: f"{match[1]}{_table(match[2], match[3], cases)}\n{match[5]}", text)


def find_stale(root: Path, cases: Mapping[str, CaseFile]) -> Iterator[StalePassage]:
    """Yield the first line of each number or table that differs from the rows."""
    for path in document_paths(root):
        text = path.read_text(encoding="utf-8")
        for pattern in (LINKED, TABLED):
            for match in pattern.finditer(text):
                renewed = renew_text(match[0], cases)
                if renewed == match[0]:
                    continue
                name = "/".join(match.group(3, 4) if pattern is LINKED else match.group(2, 3))
                line = text.count("\n", 0, match.start()) + 1
                lines = [LINKED.sub(r"\1", passage).splitlines() for passage in (match[0], renewed)]
                pairs = zip_longest(*lines, fillvalue="nothing")
                written, rows_say = next(pair for pair in pairs if pair[0] != pair[1])
                yield StalePassage(f"{path.relative_to(root)}:{line}", name, written, rows_say)


def renew_documents(root: Path, cases: Mapping[str, CaseFile]) -> list[Path]:
    """Renew all documents. Return the paths of those that changed."""
    changed = []
    for path in document_paths(root):
        text = path.read_text(encoding="utf-8")
        renewed = renew_text(text, cases)
        if renewed != text:
            path.write_text(renewed, encoding="utf-8")
            changed.append(path)
    return changed


def figures_of(text: str) -> list[str]:
    """Return the names of the figures that a document links to, in their order."""
    return [f"{match[3]}/{match[4]}" for match in LINKED.finditer(text)]


def _case(name: str, cases: Mapping[str, CaseFile]) -> CaseFile:
    if name not in cases:
        raise RequestError(f"a document names the case {name!r}; there are {', '.join(cases)}")
    return cases[name]


def _number(match: re.Match[str], cases: Mapping[str, CaseFile]) -> str:
    """Return the text of the link with its first number renewed."""
    text = match[1]
    value = _case(match[3], cases).latest(match[4])
    written = NUMBER.search(text)
    if written is None:
        raise RequestError(f"{match[0]!r} has no number to renew; write one, or leave the title out")
    grouped = "," if "," in written[0] or not written[1] else ""
    sign = "+" if written[0].startswith("+") else ""
    return text[: written.start()] + f"{value:{sign}{grouped}.{len(written[1] or '')}f}" + text[written.end() :]


def _table(case: str, name: str, cases: Mapping[str, CaseFile]) -> str:
    file = _case(case, cases)
    table = next((candidate for candidate in file.tables if candidate.name == name), None)
    if table is None:
        raise RequestError(
            f"{file.path.name} states no table {name!r}; it states {', '.join(t.name for t in file.tables) or 'none'}"
        )

    def fill_cell(cell: str) -> str:
        return re.sub(r"\{([^{}:]+):([^{}]+)\}", lambda match: format(file.latest(match[1]), match[2]), cell)

    lines = [
        table.header,
        ("---", *["---:"] * (len(table.header) - 1)),
        *([fill_cell(cell) for cell in row] for row in table.rows),
    ]
    if table.each:
        entries = file.entries(table.of, table.each)
        lines += [[key, *(cell.format_map(entry) for cell in table.cells)] for key, entry in entries.items()]
    return "\n".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|" for line in lines)
