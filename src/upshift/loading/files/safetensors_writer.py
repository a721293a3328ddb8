"""Write a safetensors file in chunks, so that no tensor is in memory as a whole. The header is known in advance.

The file equals, to the byte, the file that the safetensors library writes, which needs all tensors in memory. Tensors are
ordered by dtype, the widest first, then by name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path

from upshift.errors import JobFailed
from upshift.loading.files.safetensors_header import BITS, LENGTH_BYTES, METADATA, StoredTensor, quote, read_header
from upshift.units import MIB

CHUNK_BYTES = 16 * MIB
ORDER = {dtype: -place for place, dtype in enumerate(BITS)}  # as in the library; BITS goes from narrow to wide

OnBytes = Callable[[int], None]  # is called with the number of bytes that were written, or read again


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write."""

    name: str
    dtype: str  # a key of BITS
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[memoryview]]  # its bytes in order; the next chunk may overwrite the one before

    @property
    def nbytes(self) -> int:
        return BITS[self.dtype] * prod(self.shape) // 8


def copy_tensor(stored: StoredTensor) -> NewTensor:
    return NewTensor(stored.name, stored.dtype, stored.shape, lambda: read_chunks(stored))


def read_chunks(stored: StoredTensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes, each chunk in the same buffer. Raise JobFailed if the file cannot be read or is too short."""
    remaining = stored.nbytes
    buffer = memoryview(bytearray(min(CHUNK_BYTES, remaining)))
    try:
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            while remaining:
                chunk = buffer[: min(CHUNK_BYTES, remaining)]
                _read_fully(file, chunk)
                yield chunk
                remaining -= len(chunk)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobFailed(f"cannot read tensor {quote(stored.name)} of {stored.file}: {reason}; copy the file again") from error


def _read_fully(file: FileIO, chunk: memoryview) -> None:
    while chunk:
        count = file.readinto(chunk)
        if not count:
            raise EOFError("the file is shorter than its header says")
        chunk = chunk[count:]


def encode_header(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with the tensors in this order, including the length before it."""
    entries: dict[str, object] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for tensor in tensors:
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (end, end + tensor.nbytes)}
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def sort_tensors(tensors: Iterable[NewTensor]) -> list[NewTensor]:
    return sorted(tensors, key=lambda tensor: (ORDER[tensor.dtype], tensor.name))


def write_file(path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str], on_bytes: OnBytes) -> dict[str, str]:
    """Write a file, wait until it is on the disk, and return the SHA-256 of each tensor's bytes by its name."""
    hashes = {}
    with path.open("wb", buffering=0) as file:
        write_all(file.fileno(), memoryview(encode_header(tensors, metadata)))
        for tensor in tensors:
            digest = hashlib.sha256()
            start = file.tell()
            for chunk in tensor.chunks():
                digest.update(chunk)
                write_all(file.fileno(), chunk)
                _drop_from_page_cache(file.fileno())
                on_bytes(len(chunk))
            assert file.tell() - start == tensor.nbytes, f"{tensor.name}: {file.tell() - start} bytes of {tensor.nbytes}"
            hashes[tensor.name] = digest.hexdigest()
        os.fsync(file.fileno())
        _drop_from_page_cache(file.fileno())
    return hashes


def _drop_from_page_cache(descriptor: int) -> None:
    """Make the system write the file's cached pages and drop them, so that a later read comes from the disk."""
    with suppress(AttributeError, OSError):  # some systems and file systems cannot
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def check_file(path: Path, hashes: Mapping[str, str], on_bytes: OnBytes) -> None:
    """Read the whole file again. Raise JobFailed if a tensor differs from what was written."""
    stored = {tensor.name: tensor for tensor in read_header(path).tensors}
    if stored.keys() != hashes.keys():
        raise JobFailed(f"{path} was read again and its header is not the one that was written; check the disk and the memory")
    for tensor in stored.values():
        digest = hashlib.sha256()
        for chunk in read_chunks(tensor):
            digest.update(chunk)
            on_bytes(len(chunk))
        if digest.hexdigest() != hashes[tensor.name]:
            raise JobFailed(
                f"{path} was read again and tensor {quote(tensor.name)} is not what was written; check the disk and the memory"
            )


def write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
