# needs torch
"""Map stored tensors as torch tensors without a copy, read them into existing memory, or copy them to a GPU.

Copies to a GPU use two buffers of pinned memory: one is filled while the other is copied.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from upshift.errors import RequestError
from upshift.loading.files.safetensors_header import StoredTensor, quote
from upshift.units import MIB

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16, "I32": torch.int32,
    "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")  # dtypes that models compute in, by torch's names
CHUNK_BYTES = 16 * MIB
NUM_MAPPINGS = 64  # of a large checkpoint, about


def dtype_of(stored: StoredTensor) -> torch.dtype:
    if stored.dtype not in DTYPES:
        raise RequestError(f"{stored.file}: torch has no dtype for {stored.dtype}, which tensor {quote(stored.name)} has")
    return DTYPES[stored.dtype]


def shape_of(stored: StoredTensor) -> tuple[int, ...]:
    """Return the shape in torch's elements. An element of torch's F4 is a byte with two numbers."""
    if stored.dtype != "F4":
        return stored.shape
    if not stored.shape or stored.shape[-1] % 2:
        raise RequestError(f"{stored.file}: tensor {quote(stored.name)} of F4 {stored.shape} has half a byte in a row")
    return (*stored.shape[:-1], stored.shape[-1] // 2)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes, without a copy if it is contiguous."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_tensor(stored: StoredTensor) -> Tensor:
    """Return a tensor as a private mapping: its pages are read on access, shared with the page cache, and copied on writing."""
    return SharedMappings([stored]).tensor(stored)


class SharedMappings:
    """Stored tensors in private mappings, which contiguous tensors share.

    Linux allows a process 65,530 mappings (vm.max_map_count), and a model may have more tensors. A mapping lasts as long as any
    of its tensors. It covers only a small part of a large checkpoint, so that code that drops weights one by one also frees
    their pages."""

    def __init__(self, tensors: Iterable[StoredTensor]) -> None:
        tensors = list(tensors)
        max_mapping_bytes = max(sum(stored.nbytes for stored in tensors) // NUM_MAPPINGS, MIB)
        self._lock = threading.Lock()
        self._pages: dict[int, mmap.mmap] = {}  # by the number of the mapping
        self._bounds: list[tuple[Path, int, int]] = []
        self._mapping_of: dict[str, int] = {}
        for stored in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
            previous = self._bounds[-1] if self._bounds else None
            if (
                previous is not None
                and (previous[0], previous[2]) == (stored.file, stored.offset)
                and previous[2] - previous[1] < max_mapping_bytes
            ):
                self._bounds[-1] = previous[0], previous[1], stored.offset + stored.nbytes
            else:
                self._bounds.append((stored.file, stored.offset, stored.offset + stored.nbytes))
            self._mapping_of[stored.name] = len(self._bounds) - 1

    def __contains__(self, stored: StoredTensor) -> bool:
        return stored.name in self._mapping_of

    def tensor(self, stored: StoredTensor) -> Tensor:
        dtype = dtype_of(stored)
        shape = shape_of(stored)
        if stored.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        number = self._mapping_of[stored.name]
        first_byte = self._bounds[number][1]
        offset_in_mapping = stored.offset - (first_byte - first_byte % mmap.ALLOCATIONGRANULARITY)
        content = torch.frombuffer(
            self._open_mapping(number, stored), dtype=torch.uint8, count=stored.nbytes, offset=offset_in_mapping
        )
        if stored.offset % dtype.itemsize:
            content = content.clone()
        return content.view(dtype).view(shape)

    def _open_mapping(self, number: int, stored: StoredTensor) -> mmap.mmap:
        file, first_byte, end = self._bounds[number]
        with self._lock:
            if number not in self._pages:
                start = first_byte - first_byte % mmap.ALLOCATIONGRANULARITY
                try:
                    with file.open("rb") as handle:
                        pages = mmap.mmap(handle.fileno(), end - start, access=mmap.ACCESS_COPY, offset=start)
                except (OSError, ValueError) as error:  # ValueError: the file has become shorter
                    raise _unreadable(stored, error) from None
                self._pages[number] = pages
            return self._pages[number]


def read_into(stored: StoredTensor, destination: Tensor) -> None:
    """Read into a tensor of the same shape, on any device, and convert to its dtype. This takes one chunk of extra memory."""
    dtype = dtype_of(stored)
    shape = shape_of(stored)
    if tuple(destination.shape) != shape:
        raise RequestError(
            f"{stored.file}: tensor {quote(stored.name)} has the shape {shape} where the model has {tuple(destination.shape)}"
        )
    destination = destination.detach()
    if not destination.is_contiguous():
        destination.copy_(read_tensor(stored))
        return
    if stored.nbytes == 0:
        return
    flat = destination.view(-1)
    if destination.dtype == dtype:
        stored = replace(stored, dtype="U8", shape=(stored.nbytes,))
        dtype = torch.uint8
        flat = flat.view(torch.uint8)
    with OpenFile(stored) as source:
        if flat.dtype == dtype and flat.device.type == "cpu":
            source.fill(flat, stored.offset)
            return
        count = CHUNK_BYTES // dtype.itemsize
        for start in range(0, flat.numel(), count):
            size = min(count, flat.numel() - start)
            offset = stored.offset + start * dtype.itemsize
            source.announce(offset, 2 * CHUNK_BYTES)
            piece = replace(stored, shape=(size,), offset=offset, nbytes=size * dtype.itemsize)
            flat[start : start + size].copy_(read_tensor(piece))  # a mapping converts faster than a copy of the bytes


class OpenFile:
    """A file of weights that is open while the context is."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

    def __enter__(self) -> OpenFile:
        try:
            self._descriptor = os.open(self._stored.file, os.O_RDONLY)
        except OSError as error:
            raise _unreadable(self._stored, error) from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def announce(self, offset: int, nbytes: int) -> None:
        """Tell the system which bytes are read next, so that it reads them while others are converted."""
        if hasattr(os, "posix_fadvise"):  # Linux
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def fill(self, content: Tensor, offset: int) -> None:
        """Fill ``content``, bytes in memory, from the file, starting at ``offset``. The system may need several reads."""
        view = content.numpy().data
        while view:
            try:
                count = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise _unreadable(self._stored, error) from None
            if count == 0:
                raise _unreadable(self._stored, "the file is shorter than its header says")
            view = view[count:]
            offset = offset + count


def _unreadable(stored: StoredTensor, error: object) -> RequestError:
    reason = getattr(error, "strerror", None) or error
    return RequestError(f"cannot read tensor {quote(stored.name)} of {stored.file}: {reason}; copy or save the file again")


class Staging:
    """The pinned buffers of one load. Each reading thread has its own."""

    def __init__(self) -> None:
        self._thread_local = threading.local()

    def read_into(self, stored: StoredTensor, destination: Tensor) -> None:
        """Read a tensor into ``destination``, which is contiguous and on a GPU, and convert it there.

        Copies may still run when this returns, but finish before any later work on the destination's stream."""
        dtype = dtype_of(stored)
        flat = destination.detach().view(-1)
        count = CHUNK_BYTES // dtype.itemsize
        with torch.cuda.device(destination.device), OpenFile(stored) as file:
            for number, start in enumerate(range(0, flat.numel(), count)):
                buffer, copied = self._buffers()[number % 2]
                copied.synchronize()
                size = min(count, flat.numel() - start)
                content = buffer[: size * dtype.itemsize]
                file.fill(content, stored.offset + start * dtype.itemsize)
                flat[start : start + size].copy_(content.view(dtype).to(destination.device, non_blocking=True))
                copied.record()

    def _buffers(self) -> list[tuple[Tensor, torch.cuda.Event]]:
        if not hasattr(self._thread_local, "buffers"):
            self._thread_local.buffers = [
                (torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
            ]
        buffers: list[tuple[Tensor, torch.cuda.Event]] = self._thread_local.buffers
        return buffers
