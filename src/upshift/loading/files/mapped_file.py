# needs torch
"""Map files into memory, populate their pages ahead in large reads without a copy, and drop them again.

The pages of a mapped file belong to the page cache. Populating reads the pages that are missing. Dropping removes the pages from
this process; they stay in the page cache. Populating needs Linux 5.14 or newer. Elsewhere files are read into buffers.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from upshift.errors import JobFailed
from upshift.loading.files.safetensors_header import StoredTensor
from upshift.loading.files.tensors import dtype_of, shape_of

WILL_NEED = 3  # advice numbers of madvise(2)
DONT_NEED = 4
POPULATE_READ = 22
PAGE = mmap.ALLOCATIONGRANULARITY


class MappedFiles:
    """Read-only mappings of files. Writing to a tensor of a mapping ends the process."""

    def __init__(self) -> None:
        self._files: dict[tuple[Path, bool], mmap.mmap] = {}

    def tensor(self, stored: StoredTensor, *, by_rows: bool = False) -> Tensor:
        """Return a stored tensor as a view of its file.

        ``by_rows``: only single rows are read, so the system does not read ahead. Such tensors have a separate mapping."""
        if stored.nbytes == 0:
            return torch.empty(shape_of(stored), dtype=dtype_of(stored))
        return (
            self.content(stored.file, stored.offset, stored.nbytes, by_rows=by_rows).view(dtype_of(stored)).view(shape_of(stored))
        )

    def content(self, path: Path, offset: int, nbytes: int, *, by_rows: bool = False) -> Tensor:
        """Return a range of a file's bytes. Raise JobFailed if the file is too short."""
        pages = self.open(path, by_rows=by_rows)
        if offset + nbytes > len(pages):
            raise truncated_error(path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is read-only on purpose
            return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=offset)

    def open(self, path: Path, *, by_rows: bool = False) -> mmap.mmap:
        key = path, by_rows
        if key not in self._files:
            with path.open("rb") as file:
                self._files[key] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if by_rows and hasattr(mmap, "MADV_RANDOM"):
                self._files[key].madvise(mmap.MADV_RANDOM)
        return self._files[key]


@cache
def can_populate() -> bool:
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, PAGE) as page:
        return _advise(ctypes.addressof(ctypes.c_char.from_buffer(page)), PAGE, POPULATE_READ) == 0


def prefetch_pages(content: Tensor) -> None:
    """Tell the kernel that the pages are needed soon, so that it starts to read them."""
    _advise(*_page_range(content), WILL_NEED)


def populate(content: Tensor, path: Path) -> None:
    """Read the pages into memory. Raise JobFailed if the file cannot be read any more."""
    start, nbytes = _page_range(content)
    error = _advise(start, nbytes, POPULATE_READ)
    if error:
        if error == errno.EFAULT:
            raise truncated_error(path)
        raise JobFailed(f"cannot read the weights of {path}: {os.strerror(error)}; check the disk")


def truncated_error(path: Path) -> JobFailed:
    return JobFailed(f"{path} is shorter than it was, or its disk fails; its weights cannot be read any more")


def drop_pages(content: Tensor) -> None:
    """Remove the pages from this process. They are read again when they are accessed."""
    _advise(*_page_range(content), DONT_NEED)


def _page_range(content: Tensor) -> tuple[int, int]:
    first = content.data_ptr()
    start = first - first % PAGE
    return start, first + content.nbytes - start


def _advise(start: int, nbytes: int, advice: int) -> int:
    """Call madvise and return the error's number, or 0. Unlike mmap.madvise, this releases the GIL."""
    libc = _libc()
    return 0 if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), advice) == 0 else ctypes.get_errno()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
