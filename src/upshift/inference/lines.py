"""Read and write lines of a file that may be larger than memory, block by block, so that a stopped run can continue."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

from upshift.characters import half_of_pair

T = TypeVar("T")


def read_lines(path: Path, read: Callable[[str, str], T]) -> Iterator[T | str]:
    """Yield a .txt's lines as they are. For another file, yield what ``read`` makes of a line and of the words that
    name its place."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:  # the lines that count_lines counts
        for number, line in enumerate(file, start=1):
            yield line.rstrip("\r\n") if path.suffix == ".txt" else read(line, f"{path} line {number}")


def is_empty(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(codecs.BOM_UTF8) + 1) in (b"", codecs.BOM_UTF8)


def is_text(value: object) -> bool:
    """Return whether the value is a text that tokenizers take."""
    return isinstance(value, str) and half_of_pair(value) is None


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def blocks(items: Iterator[T], *, size: int, skip: int = 0) -> Iterator[list[T]]:
    rest = islice(items, skip, None)
    while block := list(islice(rest, size)):
        yield block
