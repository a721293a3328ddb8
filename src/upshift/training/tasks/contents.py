"""Find the image or the sound that a value of a row names: a path, the bytes of a file, or a data: URL.

Make a checksum of rows and of the files that they name, so that a resumed run notices others.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from upshift.errors import RequestError
from upshift.loading.media_files import MediaItem, check_media, check_sounds, modality_of, read_image_file
from upshift.training.data.chat_rows import decode_json
from upshift.training.tasks.rows import TaskRow

DATA_URL = "data:"
SHOWN_CHARACTERS = 80
MEDIA_COLUMNS = {"image", "images", "image_url", "pixel_values", "audio", "file_name", "path", "url"}  # also of structs
FIRST_BYTES = 4096  # of a file, which are compared beside its size: a sound of equal length has an equal size


class RowImage(NamedTuple):
    """An image of a row: the path or the bytes of its file. ``place`` is that of its row."""

    content: str | bytes
    place: str

    def read(self, *, header_only: bool = False, as_stored: bool = False) -> Any:
        """Return the image in RGB, or with ``as_stored`` in the channels of its file.

        Return its width and height with ``header_only``. Raise RequestError if it cannot be read."""
        file = self.content if isinstance(self.content, str) else BytesIO(self.content)
        try:
            return read_image_file(file, purpose="training on images", header_only=header_only, as_stored=as_stored)
        except OSError as error:
            shown = repr(self.content) if isinstance(self.content, str) else f"of {len(self.content):,} bytes"
            reason = error.strerror or "it is no image that Pillow knows"
            raise RequestError(
                f"{self.place} has the image {shown}, which cannot be read ({reason}); replace it, or leave the row out"
            ) from None


def names_image(value: Any) -> bool:
    """Return whether a value of a row names an image: the path or the bytes of its file, or a data: URL."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, str):
        return value.startswith(f"{DATA_URL}image/") or modality_of(Path(value)) == "image"
    return isinstance(value, bytes)


def structs_of(value: Any, column: str, place: str) -> list[Mapping[str, Any]]:
    """Return the entries of a column of structs: a list of them, a struct of lists, or JSON text of either.

    Raise RequestError for other values."""
    value = decode_json(value)
    if isinstance(value, Mapping):
        value = _entries_of(value, column, place)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise RequestError(f"{place} has {column} {value!r:.60}; give a list with an object for each")
    return value


def _entries_of(columns: Mapping[str, Any], column: str, place: str) -> list[dict[str, Any]]:
    lists = {name: plain(value) for name, value in columns.items()}
    lists = {name: value for name, value in lists.items() if isinstance(value, list)}
    lengths = {name: len(value) for name, value in lists.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{number} of {name}" for name, number in lengths.items())
        raise RequestError(f"{place} has lists of different lengths in {column} ({counts}); give as many values in each")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def plain(value: Any) -> Any:
    """Return a value of a table, with a list in place of an array, and a number of Python in place of one of NumPy."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def image_of(value: Any, row: TaskRow) -> RowImage:
    """Return the image that a value names. Raise RequestError for other values."""
    content = _content_of(value, row, "image")
    return RowImage(content, row.place)


def sound_of(value: Any, row: TaskRow, extractor: Any) -> MediaItem:
    """Return the sound that a value names.

    Raise RequestError for other values, and for a sound that cannot be read or that is longer than the model reads."""
    content = _content_of(value, row, "audio")
    if isinstance(content, bytes):
        raise RequestError(f"{row.place} holds the bytes of a sound; write the sound to a file, and its path into the row")
    sound = MediaItem("audio", content, row.place)
    check_media([sound])
    longest = getattr(extractor, "chunk_length", None)  # seconds; Whisper's extractor has a window
    check_sounds([sound], rate=extractor.sampling_rate, longest_seconds=longest)
    return sound


def _content_of(value: Any, row: TaskRow, name: str) -> str | bytes:
    if isinstance(value, Mapping):  # as datasets stores a file, or as OpenAI's API takes an image
        value = value.get("bytes") or value.get("path") or value.get("url") or value
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise RequestError(f"{row.place} has {name} {value!r:.{SHOWN_CHARACTERS}}; write the path of a file")
    if value.startswith(DATA_URL):
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(f"{row.place} has a data: URL that is not base64 ({value[:40]!r}); write it again") from None
    if value.partition("://")[0] in ("http", "https"):
        raise RequestError(
            f"{row.place} has {name} {value[:SHOWN_CHARACTERS]!r}, and Upshift reads no files from the network; download it, and "
            "write its path"
        )
    return str(row.folder / value.removeprefix("file://"))


def digest_of(rows: Sequence[TaskRow], class_names: object, on_row: Callable[[], None] = lambda: None) -> str:
    """Return the number of rows, and a checksum of their columns, of the files that they name, and of ``class_names``.

    Neither the folder of the data counts, nor the order of the columns. ``on_row`` is called after each row."""
    checksum = zlib.crc32(repr(class_names).encode())
    for row in rows:
        checksum = _add(row.fields, row.folder, checksum)
        on_row()
    return f"{len(rows)} rows {checksum:08x}"


def _add(value: Any, folder: Path, checksum: int, *, names_file: bool = False) -> int:
    """Return the checksum with a value of a row added.

    Its type and its length come first, so that other values make other bytes. ``names_file``: it is of a column of files, which
    may have any suffix."""
    value = plain(decode_json(value))
    if isinstance(value, Mapping):
        checksum = zlib.crc32(b"{%d;" % len(value), checksum)
        for name in sorted(value, key=str):
            checksum = _add_text(repr(name), checksum)
            checksum = _add(value[name], folder, checksum, names_file=names_file or name in MEDIA_COLUMNS)
        return checksum
    if isinstance(value, list | tuple):
        checksum = zlib.crc32(b"[%d;" % len(value), checksum)
        for member in value:
            checksum = _add(member, folder, checksum, names_file=names_file)
        return checksum
    if isinstance(value, bytes):
        return zlib.crc32(value, zlib.crc32(b"b%d;" % len(value), checksum))
    checksum = _add_text(repr(value), checksum)
    if isinstance(value, str) and (names_file or modality_of(Path(value)) is not None):
        return _add_file(folder / value.removeprefix("file://"), checksum)
    return checksum


def _add_text(text: str, checksum: int) -> int:
    content = text.encode(errors="surrogatepass")
    return zlib.crc32(content, zlib.crc32(b"v%d;" % len(content), checksum))


def _add_file(path: Path, checksum: int) -> int:
    """Return the checksum with a file added. A file that cannot be read adds nothing: the reader of the rows reports it."""
    try:
        with path.open("rb") as file:
            return zlib.crc32(file.read(FIRST_BYTES), zlib.crc32(b"f%d;" % path.stat().st_size, checksum))
    except (OSError, ValueError):
        return checksum
