"""Compute the SHA-256 of a checkpoint's files, so that bytes which changed at the same length are noticed. Needs no torch."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

SETTLED_SECONDS = 2.0  # a file that was written more recently may change again without another time of change
SEAL = re.compile(rb',\n "checksum": "([0-9a-f]{64})"\n\}\Z')  # the end of a sealed JSON document
END = b"\n}"


def checksums_of(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each file by name. Raise OSError if a file cannot be read."""
    return {name: checksum_of(directory / name) for name in names}


def checksum_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes. Raise OSError if it cannot be read.

    A process reads a file that stays as it is only once.
    """
    stat = path.stat()
    if time.time() - max(stat.st_mtime, stat.st_ctime) < SETTLED_SECONDS:
        return _read(path)
    return _kept(path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=4096)
def _kept(path: Path, *identity: int) -> str:
    return _read(path)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(document: str) -> str:
    """Return a JSON object, printed with an indent of 1, with the checksum of its text as its last key."""
    text = document.encode()
    if not text.endswith(END):
        raise ValueError("only a JSON object that is printed with an indent can be sealed")
    digest = hashlib.sha256(text).hexdigest()
    return document[: -len(END)] + f',\n "checksum": "{digest}"\n}}'


def unsealed(content: bytes) -> bytes | None:
    """Return the document that was sealed, or None if a byte of it has changed."""
    seal = SEAL.search(content)
    if seal is None:
        return None
    document = content[: seal.start()] + END
    return document if hashlib.sha256(document).hexdigest().encode() == seal[1] else None
