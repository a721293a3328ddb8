"""Copies of an output folder as a killed process would leave it, taken while one run goes on."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")  # audit events, https://docs.python.org/3/library/audit_events.html
LOCK = ".upshift.lock"  # of the process that runs


@contextmanager
def snapshots(output: Path, copies: Path, points: Mapping[str, str]) -> Iterator[None]:
    """Copy the folder before the first change of a file that matches each point, while open.

    ``points``: by the name of the copy, a regular expression of the event and the path in the folder, such as
    "open checkpoint-2.tmp/config.json".
    """
    left = {name: re.compile(point) for name, point in points.items()}
    is_open = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if not is_open or not (event in WRITES or (event == "open" and _writes(arguments))):
            return
        path = os.fspath(arguments[0]) if isinstance(arguments[0], str | os.PathLike) else ""
        if not str(path).startswith(f"{output}{os.sep}"):
            return
        words = f"{event.removeprefix('os.')} {Path(str(path)).relative_to(output)}"
        for name in [name for name, point in left.items() if point.fullmatch(words)]:
            del left[name]
            shutil.copytree(output, copies / name, ignore=shutil.ignore_patterns(LOCK))

    sys.addaudithook(watch)
    try:
        yield
    finally:
        is_open = False
    assert not left, f"the run changed no such file: {[*left]}"


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, _, flags = arguments
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
