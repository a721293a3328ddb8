"""Run contenders in turn, each time in a fresh process, append their rows to files, and format tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from errno import EACCES
from pathlib import Path
from typing import Any, TypeVar

import psutil

from upshift.errors import JobFailed, RequestError
from upshift.record import Record

LOG_TAIL = 2000
SAMPLE_SECONDS = 0.1
T = TypeVar("T")


def interleave(
    contenders: Mapping[str, Callable[[], T]], *, rounds: int, on_result: Callable[[int, str, T], None] = lambda *_: None
) -> dict[str, list[T]]:
    """Run contenders in the order A B C A B C ..., so that a slow minute of the machine slows all of them.

    Entry i of each list is from round i."""
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, run in contenders.items():
            results[name].append(run())
            on_result(number, name, results[name][-1])
    return results


def run_fresh(
    command: Sequence[str], *, timeout_seconds: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> dict[str, Any]:
    """Run a command and return the JSON object on the last line of its output, with ``tree_resident_bytes`` added.

    These are the highest resident bytes of the process and its descendants together, sampled. Raise JobFailed with the end of
    the command's messages."""
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(env) if env is not None else None,
        cwd=cwd,
        start_new_session=True,
    )
    watcher = TreeWatcher(process.pid)
    watcher.start()
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise JobFailed(f"{_short(command)} took longer than {timeout_seconds:g} s") from None
    finally:
        watcher.stop_event.set()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        raise JobFailed(f"{_short(command)} failed (exit code {process.returncode}): {errors.strip()[-LOG_TAIL:]}")
    try:
        answer = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise JobFailed(f"{_short(command)} ended without a JSON line; it printed {output.strip()[-200:]!r}") from None
    return {**answer, "tree_resident_bytes": watcher.peak_bytes}


def _short(command: Sequence[str]) -> str:
    return " ".join(Path(word).name for word in command[:4])


class TreeWatcher(threading.Thread):
    """A thread that samples the memory of a process and its descendants, and keeps the highest sum in ``peak_bytes``."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak_bytes = 0
        self.stop_event = threading.Event()

    def run(self) -> None:
        while not self.stop_event.wait(SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, _tree_bytes(self.pid))


def _tree_bytes(pid: int) -> int:
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for member in members:
        try:
            total += int(member.memory_info().rss)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return total


def check_results(folder: Path) -> None:
    """Raise RequestError if rows cannot be appended to files in the folder. Call it before measuring anything."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        raise RequestError(f"--results {folder} is no folder that can be written: {error.strerror}; give another") from None


def append_rows(path: Path, records: Iterable[Record]) -> None:
    """Append one JSON line for each record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(record.to_json() + "\n" for record in records)


def read_rows(path: Path) -> list[Record]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Record.from_json(line, origin=f"{path.name} line {number}") for number, line in enumerate(lines, start=1)]


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, markdown: bool = False) -> str:
    """Return columns of text: the first is aligned left, the others right."""
    cells = [list(map(str, header)), *(["" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |" if markdown else "  ".join(padded).rstrip())
    if markdown:
        lines.insert(1, f"| {' | '.join(['---', *['---:'] * (len(header) - 1)])} |")
    return "\n".join(lines)


def percent(share: float | None, *, digits: int = 1) -> str:
    return "unknown" if share is None else f"{100 * share:+.{digits}f} %"
