"""Measure how fast the disk that holds a file is read: a short read of the file itself, after the cache dropped its pages.

Ignored: a cache below the system (of a virtual machine's host), and pages that another process has mapped, which stay.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from upshift.units import MIB

# 120 MiB: a tenth of a second of a fast disk, one of a slow one
PIECE = 24 * MIB
PIECES = 5
CHUNK = 4 * MIB  # of one system call
MIN_BYTES = 4 * MIB  # a smaller file does not show a disk's rate


def disk_rate(files: Sequence[Path]) -> float | None:
    """Return the bytes per second, measured once in a process for each file.

    None: the files are too small, or the system has no way to drop their pages.
    """
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    return None if largest is None or largest.stat().st_size < MIN_BYTES else _measured(largest.resolve())


@cache
def _measured(file: Path) -> float | None:
    return fresh_disk_rate(file)


def fresh_disk_rate(file: Path) -> float | None:
    """Return the rate of ``disk_rate`` of one file, measured anew. The file must be as large as ``disk_rate`` requires."""
    if not hasattr(os, "posix_fadvise"):
        return None
    size = file.stat().st_size
    piece = min(PIECE, size)
    starts = [int((size - piece) * number / (PIECES - 1)) for number in range(PIECES)] if size > PIECE * PIECES else [0]
    content = memoryview(bytearray(min(CHUNK, piece)))
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for start in starts:  # no more than is read here: the rest of a cached file stays cached
            os.posix_fadvise(descriptor, start, piece, os.POSIX_FADV_DONTNEED)
        return statistics.median(_rate(descriptor, content, start, start + piece) for start in starts)
    finally:
        os.close(descriptor)


def _rate(descriptor: int, content: memoryview, start: int, end: int) -> float:
    began = time.perf_counter()
    offset = start
    while offset < end:
        offset += os.preadv(descriptor, [content[: end - offset]], offset) or end
    return (end - start) / (time.perf_counter() - began)
