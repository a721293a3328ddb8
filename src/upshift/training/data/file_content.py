"""Recognize the content of a file by its first bytes, for messages about files that are not what their names say."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

from upshift.errors import RequestError

FIRST_BYTES = 512
SIGNATURES = (  # https://en.wikipedia.org/wiki/List_of_file_signatures; a longer one comes before its own beginning
    (codecs.BOM_UTF32_LE, "UTF-32 text"),
    (codecs.BOM_UTF32_BE, "UTF-32 text"),
    (codecs.BOM_UTF16_LE, "UTF-16 text"),
    (codecs.BOM_UTF16_BE, "UTF-16 text"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file"),
    (b"\x04\x22\x4d\x18", "an LZ4 file"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ", "an xz file"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"FEA1", "a Feather file of the first version"),
    (b"%PDF", "a PDF file"),
)
ADVICE = {
    "UTF-32 text": "convert it with iconv -f UTF-32 -t UTF-8",
    "UTF-16 text": "convert it with iconv -f UTF-16 -t UTF-8",
    "a gzip file": "let its name end in .gz",
    "a Zstandard file": "let its name end in .zst",
    "an LZ4 file": "let its name end in .lz4",
    "a bzip2 file": "let its name end in .bz2",
    "an xz file": "let its name end in .xz",
    "a Parquet file": "let its name end in .parquet",
    "an Arrow file": "let its name end in .arrow",
}


def describe_no_text(place: str, first_bytes: bytes) -> str:
    """Return a message about a file, or a place in it, that is not UTF-8 text. ``first_bytes`` are the file's, decompressed."""
    content = next((name for signature, name in SIGNATURES if first_bytes.startswith(signature)), None)
    if content is not None:
        return f"{place} is {content}, not UTF-8 text; {ADVICE.get(content, 'write it as .jsonl or .parquet')}"
    even = first_bytes[::2]
    odd = first_bytes[1::2]
    for encoding, letters, zeros in (("UTF-16LE", even, odd), ("UTF-16BE", odd, even)):  # without a mark at the beginning
        if 0 not in letters and len(zeros) > 3 and zeros.count(0) > 0.9 * len(zeros):
            return f"{place} is UTF-16 text, not UTF-8 text; convert it with iconv -f {encoding} -t UTF-8"
    if b"\0" in first_bytes:
        return f"{place} holds zero bytes, so it is not UTF-8 text; convert it, or give .jsonl, .csv or .parquet"
    return f"{place} is not UTF-8 text; convert the file, for example with iconv -f CP1252 -t UTF-8"


def describe_no_compression(file: Path, error: Exception) -> str:
    """Return a message about a file that does not hold what the suffix of a compression promises."""
    with file.open("rb") as handle:
        first_bytes = handle.read(FIRST_BYTES)
    content = next((name for signature, name in SIGNATURES if first_bytes.startswith(signature)), None)
    if content is None:
        return f"{file} is not a {file.suffix} file ({error}); copy it again, or remove {file.suffix} from its name"
    return f"{file} is not a complete compressed file ({error}); copy or write it again"


def refuse_json_records(file: Path, text: str, *, is_whole: bool) -> None:
    """Raise RequestError for a text file that holds JSON records, whose syntax would be trained on as text.

    Such a file has JSON objects in its first two lines, an array of objects, or is one JSON object. ``text`` is its beginning,
    and ``is_whole`` says that nothing follows.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    complete = lines if is_whole else lines[:-1]
    if complete and (len(complete) > 1 or is_whole) and all(_is_json_object(line) for line in complete[:2]):
        form = "JSON objects, one in each line"
        suffix = ".jsonl"
    elif _begins_array_of_objects(text):
        form = "a JSON array of objects"
        suffix = ".json"
    elif is_whole and _is_json_object(text):
        form = "a JSON object"
        suffix = ".json"
    else:
        return
    raise RequestError(
        f"{file} holds {form}, and its name says that it is text; let its name end in {suffix}, or, to "
        "train on the JSON itself, put each text into a field 'text' of a .jsonl file"
    )


def _begins_array_of_objects(text: str) -> bool:
    """Return whether the text begins with an array whose first entry is a complete object, and with what may follow it."""
    text = text.lstrip()
    if not text.startswith("["):
        return False
    inside = text[1:].lstrip()
    try:
        entry, end = json.JSONDecoder().raw_decode(inside)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and inside[end:].lstrip().startswith((",", "]"))


def _is_json_object(text: str) -> bool:
    try:
        return text.lstrip().startswith("{") and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
