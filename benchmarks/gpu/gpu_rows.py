"""Define the row of a part of the GPU check, and write, read and show rows."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from upshift.record import Environment
from upshift.value import Value

Status = Literal["works", "slower", "failed", "skipped"]
DONE: tuple[Status, ...] = ("works", "slower")  # a part with such a row has its result, and is not run again
ROWS = "rows.jsonl"
WIDTH = 80  # columns of the table
SLOWER = 1.15  # a part that takes more than this times its predicted time is slower; our goal for times is 15 %


class Answer(Value):
    """Hold what the process of a part found.

    predicted, measured: a speed in ``unit``; None where the part measures none. slower: it is slower than it should be.
    skipped: the part cannot run on this machine, and ``reason`` says why.
    """

    reason: str
    unit: str | None = None
    predicted: float | None = None
    measured: float | None = None
    slower: bool = False
    skipped: bool = False
    failed: bool = False
    details: dict[str, Any] = {}

    @property
    def status(self) -> Status:
        if self.failed:
            return "failed"
        if self.skipped:
            return "skipped"
        return "slower" if self.slower else "works"


class PartRow(Value):
    """Hold the result of one part: one line of rows.jsonl. ``seconds`` is the time of its whole process."""

    part: str
    status: Status
    seconds: float
    unit: str | None = None
    predicted: float | None = None
    measured: float | None = None
    reason: str
    quick: bool
    free_bytes: int = 0  # of the GPU that had least when the check began; it decides the sizes of all parts
    environment: Environment
    details: dict[str, Any] = {}


def compare_speed(measured: float, predicted: float | None, unit: str) -> tuple[bool, str]:
    """Return whether a speed is slower than predicted, and both in words."""
    shown = f"{measured:,.0f} {unit}"
    if predicted is None:
        return False, f"{shown}, nothing predicted"
    ratio = predicted / measured if measured > 0 else math.inf
    if ratio > SLOWER:
        return True, f"{shown}, predicted {predicted:,.0f}: slower by {ratio:.2f}"
    return False, f"{shown}, predicted {predicted:,.0f}"


def read_part_rows(folder: Path) -> dict[str, PartRow]:
    """Return the newest row of each part. Raise RequestError if a line is no row."""
    path = folder / ROWS
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [PartRow.from_json(line, origin=f"{path} line {number}") for number, line in enumerate(lines, start=1)]
    return {row.part: row for row in rows}


def append_part_row(folder: Path, row: PartRow) -> None:
    """Write the row behind the others at once, so that an interruption loses no finished part."""
    with (folder / ROWS).open("a", encoding="utf-8") as file:
        file.write(row.to_json() + "\n")


def verdict_table(rows: Sequence[PartRow]) -> str:
    """Return a table of at most 80 columns: the part, its status, its seconds, and what it found, over several lines."""
    header = f"{'part':<15} {'status':<8} {'s':>4}  "
    room = WIDTH - len(header)
    lines = [header + "result"]
    for row in rows:
        result = textwrap.wrap(row.reason, room) or [""]
        lines.append(f"{row.part:<15} {row.status:<8} {row.seconds:>4.0f}  {result[0]}")
        lines += [" " * len(header) + line for line in result[1:]]
    return "\n".join(lines)


def summary_line(rows: Sequence[PartRow]) -> str:
    """Return the number of rows of each status, such as "9 work, 2 slower, 1 failed, 4 skipped"."""
    words = {"works": "work", "slower": "slower", "failed": "failed", "skipped": "skipped"}
    counts = {status: sum(row.status == status for row in rows) for status in words}
    return ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)


def start_progress(part: str, limit_seconds: float) -> str:
    """Return the line that says that a part begins, no wider than the terminal."""
    columns = shutil.get_terminal_size((WIDTH, 24)).columns
    return f"{part}: at most {limit_seconds:.0f} s"[:columns]
