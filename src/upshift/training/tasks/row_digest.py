"""Make a checksum of the rows of a task's data and of the files that they name, to find out if a resumed run still has them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from upshift.loading.media_files import modality_of
from upshift.training.data.chat_rows import decode_json
from upshift.training.tasks.rows import TaskRow

FIRST_BYTES = 4096  # of a file, which are compared beside its size: a sound of equal length has an equal size


def digest_of(rows: Sequence[TaskRow], labels: object) -> str:
    """Return the number of rows, and a checksum of their columns, of the files that they name, and of ``labels``.

    The folder of the data does not count."""
    checksum = zlib.crc32(repr(labels).encode())
    for row in rows:
        checksum = _add(row.fields, row.folder, checksum)
    return f"{len(rows)} rows {checksum:08x}"


def _add(value: Any, folder: Path, checksum: int) -> int:
    """Return the checksum with a value of a row added. Values of other types and lists of other lengths differ."""
    value = decode_json(value)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        checksum = zlib.crc32(b"{%d" % len(value), checksum)
        for name, member in value.items():
            checksum = _add(member, folder, zlib.crc32(repr(name).encode(), checksum))
        return checksum
    if isinstance(value, list | tuple):
        checksum = zlib.crc32(b"[%d" % len(value), checksum)
        for member in value:
            checksum = _add(member, folder, checksum)
        return checksum
    if isinstance(value, bytes):
        return zlib.crc32(value, zlib.crc32(b"b%d" % len(value), checksum))
    checksum = zlib.crc32(repr(value).encode(), checksum)
    return _add_file(folder / value.removeprefix("file://"), checksum) if _names_media(value) else checksum


def _names_media(value: Any) -> bool:
    return isinstance(value, str) and modality_of(Path(value)) in ("image", "audio")


def _add_file(path: Path, checksum: int) -> int:
    """Return the checksum with a file added. One that cannot be read adds nothing: who reads it for training says why."""
    try:
        with path.open("rb") as file:
            return zlib.crc32(file.read(FIRST_BYTES), zlib.crc32(b"%d" % path.stat().st_size, checksum))
    except (OSError, ValueError):
        return checksum
