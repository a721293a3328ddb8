"""Find full disks in the errors of libraries, and let the work go on without a cache that cannot be written.

Imports no library."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

from upshift.atomic_file import write_whole

logger = logging.getLogger(__name__)

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of libraries in C++ and Rust, whose errors have no errno; the last one is SQLite's.
WORDS = (*(os.strerror(code).lower() for code in CODES), "database or disk is full")
FREE_SOME = "free some space there, or set UPSHIFT_CACHE or TMPDIR to a folder on another disk"


def full_disk(error: BaseException) -> str | None:
    """Return the message of an error, or of one that it came from, about a full disk, with the file if it is named; else None."""
    met: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in met:
            continue
        met.add(id(one))
        if isinstance(one, OSError) and one.errno in CODES:
            return f"{one.strerror}: {one.filename}" if one.filename else str(one.strerror)
        if isinstance(one, Exception) and any(words in str(one).lower() for words in WORDS):
            return " ".join(str(one).split())[-300:]
        waiting += [one.__cause__, one.__context__]
    return None


def kept(what: str, path: Path, write: Callable[[], None]) -> bool:
    """Write into a cache and return True. If the disk or the folder takes nothing, log a warning and return False."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        logger.warning("%s not kept in %s: %s; UPSHIFT_CACHE names another folder", what, path.parent, error.strerror)
        return False
    return True


def keep(what: str, path: Path, content: str | bytes) -> bool:
    """Write a file of a cache whole, as ``kept`` does."""
    return kept(what, path, lambda: write_whole(path, content))
