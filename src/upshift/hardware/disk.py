"""Measure how fast a file is read from its disk, with short reads of the file after its pages were dropped from the cache.

Two effects are ignored: the cache of a virtual machine's host, and pages that stay because another process has mapped them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from upshift.units import MIB

# Together 120 MiB, which a fast disk reads in a tenth of a second and a slow one in a second.
SAMPLE_BYTES = 24 * MIB
NUM_SAMPLES = 5
CHUNK = 4 * MIB  # read by one system call
MIN_BYTES = 4 * MIB  # a smaller file does not show a disk's rate


def disk_rate(files: Sequence[Path]) -> float | None:
    """Return the bytes per second of the largest file. Each file is measured once in a process.

    Return None if the files are too small, or if the system cannot drop their pages.
    """
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    if largest is None or largest.stat().st_size < MIN_BYTES:
        return None
    return _cached_rate(largest.resolve())


@cache
def _cached_rate(file: Path) -> float | None:
    return fresh_disk_rate(file)


def fresh_disk_rate(file: Path) -> float | None:
    """Measure the rate of one file of MIN_BYTES or more. Return None if the system cannot drop its pages."""
    if not hasattr(os, "posix_fadvise"):
        return None
    size = file.stat().st_size
    sample_bytes = min(SAMPLE_BYTES, size)
    starts = [0]
    if size > SAMPLE_BYTES * NUM_SAMPLES:
        starts = [int((size - sample_bytes) * number / (NUM_SAMPLES - 1)) for number in range(NUM_SAMPLES)]
    buffer = memoryview(bytearray(min(CHUNK, sample_bytes)))
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for start in starts:  # only the pages that are read here; the others stay in the cache
            os.posix_fadvise(descriptor, start, sample_bytes, os.POSIX_FADV_DONTNEED)
        return statistics.median(_read_rate(descriptor, buffer, start, start + sample_bytes) for start in starts)
    finally:
        os.close(descriptor)


def _read_rate(descriptor: int, buffer: memoryview, start: int, end: int) -> float:
    started = time.perf_counter()
    offset = start
    while offset < end:
        offset += os.preadv(descriptor, [buffer[: end - offset]], offset) or end
    return (end - start) / (time.perf_counter() - started)
