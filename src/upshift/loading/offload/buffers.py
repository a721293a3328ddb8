# needs torch
"""Hold a chunk of the weights while a module needs it, in a buffer or in the file's own pages.

Pages are used if the system can populate them ahead. Nothing is copied then, and cached content is available at once. Buffers
hold tensors that are not aligned in the file. Pinned buffers hold tensors that are copied to a GPU.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from upshift.errors import JobFailed
from upshift.loading.files.mapped_file import MappedFiles, can_populate, drop_pages, populate, truncated_error
from upshift.loading.files.safetensors_header import StoredTensor
from upshift.loading.files.tensors import dtype_of

MAX_VIEWS = 1024  # in one preadv: IOV_MAX of Linux and macOS


@dataclass(frozen=True)
class Chunk:
    """Tensors of one group that are read together into one buffer."""

    tensors: tuple[StoredTensor, ...]  # the tensors of one file, by offset
    offsets: tuple[int, ...]
    nbytes: int
    group: int = 0
    number: int = 0  # within its group


class Buffer(Protocol):
    """Memory for a chunk.

    It may be filled again after ``is_free`` returned True. False means that a view of it is still held elsewhere."""

    capacity: int

    def fill(self, chunk: Chunk) -> None: ...

    def use(self) -> Tensor:
        """Return the bytes, for computations that start from now on."""

    def mark_used(self) -> None:
        """Record that all computations that use the bytes were submitted to their device."""

    def is_free(self) -> bool: ...


class BufferPool(Protocol):
    """A source of buffers."""

    def allocate(self, capacity: int) -> Buffer: ...

    def close(self) -> None: ...


def can_map_in_place(tensors: Sequence[StoredTensor]) -> bool:
    """Return whether torch can use all of the tensors as pages of their files."""
    return can_populate() and all(tensor.nbytes and tensor.offset % dtype_of(tensor).itemsize == 0 for tensor in tensors)


class PagePool:
    """A pool of buffers that are pages of files. ``keep``: leave pages in the page cache after their use."""

    def __init__(self, files: Sequence[Path], *, keep: bool) -> None:
        self._mapped = MappedFiles()
        self._files = None if keep else _open_files(files)
        for file in files:
            self._mapped.open(file)

    def allocate(self, capacity: int) -> Buffer:
        return _PageBuffer(capacity, self._mapped, self._files)

    def close(self) -> None:
        _close_files(self._files or {})


class _PageBuffer:
    def __init__(self, capacity: int, mapped: MappedFiles, files: dict[Path, int] | None) -> None:
        self.capacity = capacity
        self._mapped = mapped
        self._files = files
        self._content: Tensor | None = None

    def fill(self, chunk: Chunk) -> None:
        self._file = chunk.tensors[0].file
        self._offset = chunk.tensors[0].offset
        content = self._mapped.content(self._file, self._offset, chunk.nbytes)
        populate(content, self._file)
        self._content = content

    def use(self) -> Tensor:
        assert self._content is not None
        return self._content

    def mark_used(self) -> None:
        pass

    def is_free(self) -> bool:
        """Drop the pages and return True. A view that is still held reads the file's pages again."""
        if self._content is not None:
            drop_pages(self._content)
            if self._files is not None:
                os.posix_fadvise(self._files[self._file], self._offset, self._content.nbytes, os.POSIX_FADV_DONTNEED)
        self._content = None
        return True


class HostBufferPool:
    """A pool of buffers in the host's memory. ``pin``: allocates memory that a GPU can read directly."""

    def __init__(self, files: Sequence[Path], *, keep: bool, pin: Callable[[int], Tensor] | None = None) -> None:
        self._files = _open_files(files)
        self._keep = keep
        self._pin = pin

    def allocate(self, capacity: int) -> Buffer:
        return _HostBuffer(capacity, self._files, keep=self._keep, pin=self._pin)

    def close(self) -> None:
        _close_files(self._files)


class _HostBuffer:
    """One buffer. A view of it keeps its memory alive. Pinned memory is only copied from, so nothing holds a view of it."""

    def __init__(self, capacity: int, files: dict[Path, int], *, keep: bool, pin: Callable[[int], Tensor] | None) -> None:
        self.capacity = capacity
        self._files = files
        self._keep = keep
        self._pinned_memory = None if pin is None else pin(capacity)
        self._pages = None if pin is not None else mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._content: Tensor | None = None

    def fill(self, chunk: Chunk) -> None:
        self._content = torch.frombuffer(self._pages, dtype=torch.uint8) if self._pinned_memory is None else self._pinned_memory
        view = self._content.numpy().data
        for run in _contiguous_ranges(chunk):
            stored = chunk.tensors[run.start]
            last = chunk.tensors[run.stop - 1]
            views = [view[chunk.offsets[i] : chunk.offsets[i] + chunk.tensors[i].nbytes] for i in run]
            _read_views(self._files[stored.file], views, stored)
            if not self._keep:
                length = last.offset + last.nbytes - stored.offset
                os.posix_fadvise(self._files[stored.file], stored.offset, length, os.POSIX_FADV_DONTNEED)

    def use(self) -> Tensor:
        assert self._content is not None
        return self._content

    def mark_used(self) -> None:
        pass

    def is_free(self) -> bool:
        self._content = None
        only_own_references = 2  # the attribute, and the argument of getrefcount
        return self._pinned_memory is not None or sys.getrefcount(self._pages) <= only_own_references


def _open_files(files: Sequence[Path]) -> dict[Path, int]:
    return {file: os.open(file, os.O_RDONLY) for file in dict.fromkeys(files)}


def _close_files(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def _contiguous_ranges(chunk: Chunk) -> Iterator[range]:
    """Yield the ranges of the chunk's tensors that are contiguous in the file, of at most MAX_VIEWS tensors."""
    first = 0
    for number, tensor in enumerate(chunk.tensors):
        is_last = number + 1 == len(chunk.tensors)
        if is_last or chunk.tensors[number + 1].offset != tensor.offset + tensor.nbytes or number + 1 - first == MAX_VIEWS:
            yield range(first, number + 1)
            first = number + 1


def _read_views(descriptor: int, views: list[memoryview], stored: StoredTensor) -> None:
    offset = stored.offset
    views = [view for view in views if view]
    while views:
        try:
            count = os.preadv(descriptor, views, offset)
        except OSError as error:
            raise JobFailed(f"cannot read the weights of {stored.file}: {error.strerror}; check the disk") from None
        if count == 0:
            raise truncated_error(stored.file)
        offset += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
