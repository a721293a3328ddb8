"""Read the header of a safetensors file, which gives the position of each tensor. Every field is checked strictly.

The format is at https://huggingface.co/docs/safetensors. The first eight bytes are the length of a JSON object, little-endian.
The object maps each name to dtype, shape and data_offsets. The tensors follow without a gap, to the last byte. The safetensors
library accepts every header that is accepted here. It also accepts some that are rejected here, because no writer produces them
on purpose (docs/loading.md).
"""

from __future__ import annotations

import json
import os
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from os.path import isfile
from pathlib import Path
from typing import Any, Never

from upshift.errors import RequestError

LENGTH_BYTES = 8
MAX_BYTES = 100_000_000  # the longest JSON object; safetensors has the same limit
MAX_SIZE = 2**63 - 1  # torch counts in signed 64-bit numbers
MAX_DIMENSIONS = 64  # the limit of torch and numpy
BITS = {  # the bits of one element, by safetensors' name of the dtype
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64,
    "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
KEYS = {"dtype", "shape", "data_offsets"}
METADATA = "__metadata__"
SHORT_REPR = reprlib.Repr()
SHORT_REPR.maxstring = SHORT_REPR.maxother = 100  # characters of a name in a message


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The position of one tensor in a file."""

    name: str
    dtype: str  # a key of BITS
    shape: tuple[int, ...]
    file: Path
    offset: int  # position of its first byte in the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file."""

    tensors: tuple[StoredTensor, ...]  # in the order of their bytes
    metadata: Mapping[str, str]
    bytes: int  # including the length before it; the first tensor begins here

    def by_name(self) -> dict[str, StoredTensor]:
        return {tensor.name: tensor for tensor in self.tensors}


class _InvalidHeader(ValueError):
    """Raised with a description of a header's problem, without the file's name."""


def read_header(file: Path) -> Header:
    """Read only a file's header. Raise RequestError if the file is not a complete safetensors file."""
    try:
        if not isfile(file):  # opening a pipe would block
            raise RequestError(f"there is no file {str(file)!r}; copy it, or save the model again")
        with file.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            content = handle.read(LENGTH_BYTES)
            content += handle.read(_header_length(content, size))
    except _InvalidHeader as wrong:
        raise _header_error(file, str(wrong)) from None
    except OSError as error:
        raise RequestError(f"cannot read {str(file)!r}: {error.strerror}") from None
    return parse_header(content, file=file, file_bytes=size)


def parse_header(content: bytes, *, file: Path, file_bytes: int) -> Header:
    """Parse a header from ``content``, which begins with the whole header. ``file`` is used in messages.

    Raise RequestError for a header that is not valid."""
    try:
        end = LENGTH_BYTES + _header_length(content, file_bytes)
        if len(content) < end:
            raise _InvalidHeader(f"of a header of {end} bytes, {len(content)} are there")
        return _check_layout(_parse_json(content[LENGTH_BYTES:end]), file, end, file_bytes)
    except _InvalidHeader as wrong:
        raise _header_error(file, str(wrong)) from None


def _header_error(file: Path, problem: str) -> RequestError:
    return RequestError(f"{file} is no whole safetensors file: {problem}; copy or save the file again")


def quote(text: object) -> str:
    """Return the text's repr, cut to about 100 characters, for a message on one line."""
    return SHORT_REPR.repr(text)


def _header_length(content: bytes, file_bytes: int) -> int:
    if min(len(content), file_bytes) < LENGTH_BYTES:
        raise _InvalidHeader(f"it has {file_bytes} bytes, and the length of its header alone takes {LENGTH_BYTES}")
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    if length > MAX_BYTES:
        raise _InvalidHeader(f"its header would have {length} bytes, and {MAX_BYTES} is the most that the format allows")
    if LENGTH_BYTES + length > file_bytes:
        raise _InvalidHeader(f"it is truncated: {file_bytes} bytes, and its header alone ends at {LENGTH_BYTES + length}")
    return length


def _parse_json(text: bytes) -> dict[str, Any]:
    try:
        if not text.startswith(b"{"):
            raise _InvalidHeader(f"its header begins with {text[:1]!r} instead of a brace")
        document: dict[str, Any] = json.loads(
            text.decode(),
            object_pairs_hook=_reject_duplicate_keys,
            parse_int=_parse_integer,
            parse_float=_reject_number,
            parse_constant=_reject_number,
        )
        if b"\\u" in text:  # only an escape can be half of a surrogate pair
            json.dumps(document, ensure_ascii=False).encode()
    except _InvalidHeader:
        raise
    except UnicodeError:
        raise _InvalidHeader("its header is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _InvalidHeader(f"its header is not JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise _InvalidHeader("its header is nested too deeply") from None
    return document


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _InvalidHeader(f"its header has the key {quote(duplicate)} twice")
    return document


def _parse_integer(text: str) -> int:
    if text[0] == "-" or len(text) > 20:  # rejects -0, too; 2**64 has 20 digits
        _reject_number(text)
    return int(text)


def _reject_number(text: str) -> Never:
    raise _InvalidHeader(f"its header has the number {quote(text)}; sizes are whole, from 0 to 2**63 - 1")


def _check_layout(document: dict[str, Any], file: Path, start: int, file_bytes: int) -> Header:
    metadata = document.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _InvalidHeader(f"{METADATA} must map text to text; it is {quote(metadata)}")
    tensors = [_parse_tensor(name, entry, file, start) for name, entry in document.items()]
    tensors.sort(key=attrgetter("offset", "nbytes"))
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            problem = "overlaps another tensor" if tensor.offset < end else "leaves a hole before it"
            raise _InvalidHeader(f"tensor {quote(tensor.name)} begins at byte {tensor.offset - start} of the data and {problem}")
        end += tensor.nbytes
    if end != file_bytes:
        problem = "it is truncated" if end > file_bytes else "it has bytes that belong to no tensor"
        raise _InvalidHeader(f"{problem}: {file_bytes} bytes where its header says {end}")
    return Header(tuple(tensors), metadata, start)


def _parse_tensor(name: str, entry: Any, file: Path, start: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != KEYS:
        raise _InvalidHeader(f"tensor {quote(name)} has {quote(entry)} where dtype, shape and data_offsets belong")
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _InvalidHeader(f"tensor {quote(name)} has the unknown dtype {quote(dtype)}; the dtypes are {', '.join(BITS)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not set(map(type, shape)) <= {int}:
        raise _InvalidHeader(
            f"tensor {quote(name)} has the shape {quote(shape)}; it must be up to {MAX_DIMENSIONS} whole numbers"
        )
    if not isinstance(offsets, list) or list(map(type, offsets)) != [int, int] or offsets[0] > offsets[1]:
        raise _InvalidHeader(
            f"tensor {quote(name)} has the data_offsets {quote(offsets)}; they must be its first byte and its end"
        )
    start_offset, end = offsets
    if bits * prod(shape) != 8 * (end - start_offset):
        raise _InvalidHeader(
            f"tensor {quote(name)} of {dtype} {quote(shape)} has {end - start_offset} bytes, which do not fit its shape"
        )
    if start_offset == end and bits * prod(size or 1 for size in shape) > MAX_SIZE:
        raise _InvalidHeader(f"tensor {quote(name)} has the shape {quote(shape)}, whose sizes are beyond 2**63")
    return StoredTensor(name, dtype, tuple(shape), file, start + start_offset, end - start_offset)
