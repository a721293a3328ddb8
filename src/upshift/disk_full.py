"""Recognise a full disk in the errors of libraries, and write cache files without failing if the disk is full.

This module imports no library."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from upshift.atomic_file import write_whole

logger = logging.getLogger(__name__)

DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries in C++ and Rust raise errors without an errno, so their text is searched. The last phrase is SQLite's.
DISK_FULL_PHRASES = (*(os.strerror(code).lower() for code in DISK_FULL_CODES), "database or disk is full")
FREE_SOME = "free some space there, or set UPSHIFT_CACHE or TMPDIR to a folder on another disk"


def disk_full_message(error: BaseException) -> str | None:
    """Return what an error, or one of its causes, says about a full disk, with the file if it is named.

    Return None if no disk is full."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, OSError) and current.errno in DISK_FULL_CODES:
            return f"{current.strerror}: {current.filename}" if current.filename else str(current.strerror)
        if isinstance(current, Exception) and any(phrase in str(current).lower() for phrase in DISK_FULL_PHRASES):
            return " ".join(str(current).split())[-300:]
        pending += [current.__cause__, current.__context__]
    return None


def write_cache_file(subject: str, path: Path, content: str | bytes) -> bool:
    """Write a cache file and return True. On failure log a warning that starts with ``subject`` and return False."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        logger.warning("%s not kept in %s: %s; UPSHIFT_CACHE names another folder", subject, path.parent, error.strerror)
        return False
    return True
