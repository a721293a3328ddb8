"""Read texts: each file is one document. A long one is read in pieces, and is never in memory as a whole.

Half of a surrogate pair, which JSON can hold, is no text.
"""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from upshift.errors import RequestError
from upshift.text import find_lone_surrogate
from upshift.training.data.data_files import COMPRESSED, open_data
from upshift.training.data.file_content import FIRST_BYTES, describe_no_compression, describe_no_text, refuse_json_records

PIECE_CHARACTERS = 2**18  # characters of a long text file that are in memory at once
DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError)  # from readers of compressed files, beside OSError


@dataclass(frozen=True)
class TextFile:
    """A document that is too long to be held in memory."""

    path: Path

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces."""
        with _open_text(self.path) as text:
            while piece := text.read(PIECE_CHARACTERS):
                yield piece


@contextmanager
def checking_compression(file: Path) -> Iterator[None]:
    """Raise RequestError for a file that is not compressed as its suffix says, or not complete."""
    try:
        yield
    except DECOMPRESSION_ERRORS as error:
        raise RequestError(describe_no_compression(file, error)) from None
    except OSError as error:
        if error.errno is None and file.suffix.lower() in COMPRESSED:  # errors of the disk have a number
            raise RequestError(describe_no_compression(file, error)) from None
        raise


def read_texts(files: tuple[Path, ...], binary: list[str], *, is_alone: bool) -> Iterator[tuple[str, str | TextFile | None]]:
    """Yield each file as a document, or None for an empty one.

    The names of files that are not UTF-8 text are added to ``binary``. Raise RequestError for the only file.
    """
    for file in files:
        try:
            with checking_compression(file):
                document = _read_text(file, is_alone=is_alone)
        except UnicodeDecodeError:
            if is_alone:
                with open_data(file) as handle:
                    raise RequestError(describe_no_text(str(file), handle.read(FIRST_BYTES))) from None
            binary.append(file.name)
            continue
        yield str(file), document


def _read_text(file: Path, *, is_alone: bool) -> str | TextFile | None:
    """Return the text, or a TextFile if it is long, or None if it is empty. Raise UnicodeDecodeError for other bytes."""
    with _open_text(file) as text:
        first_piece = text.read(PIECE_CHARACTERS)
        piece = first_piece
        num_pieces = 0
        is_empty = True
        while piece:
            if "\0" in piece:
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "a text has no zero bytes")
            num_pieces += 1
            is_empty = is_empty and piece.isspace()
            piece = text.read(PIECE_CHARACTERS)
    if is_empty:
        return None
    refuse_json_records(file, first_piece, is_whole=is_alone and num_pieces == 1)
    return first_piece if num_pieces == 1 else TextFile(file)


def _open_text(file: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_data(file), encoding="utf-8-sig", newline="")


def check_text(text: str, place: str) -> None:
    """Raise RequestError, with the place of the text, if it holds a lone surrogate."""
    surrogate = find_lone_surrogate(text)
    if surrogate is not None:
        raise RequestError(f"{place} holds {surrogate}, half of a surrogate pair, which is no text; write the file again")
