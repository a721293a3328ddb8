# needs torch
"""Read groups of stored tensors ahead into buffers that are reused, in the order of the last pass.

A group is the tensors that one module needs. It is read in chunks of whole tensors, so that a part of the next group can be
read if there is no room for all of it. A buffer pool decides which memory holds a chunk, and how it is filled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from upshift.errors import JobFailed
from upshift.loading.files.safetensors_header import StoredTensor
from upshift.loading.offload.buffers import Buffer, BufferPool, Chunk
from upshift.units import MIB

CHUNK_BYTES = 16 * MIB  # minimum, if the group is as large and the budget holds MIN_CHUNKS of them
MIN_CHUNKS = 16
ALIGNMENT = 64  # a tensor's alignment in a chunk is torch's allocator's, so that the same kernels run


@dataclass(eq=False)
class ReadGroup:
    """The tensors that one module needs, in chunks."""

    number: int
    chunks: tuple[Chunk, ...]
    loaded: list[Buffer] = field(default_factory=list)  # the buffers of the first chunks
    users: int = 0

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def is_loaded(self) -> bool:
        return len(self.loaded) == len(self.chunks)


def make_groups(units: Sequence[Sequence[StoredTensor]], budget: int, *, in_place: bool = False) -> list[ReadGroup]:
    """Divide the tensors of each unit into chunks.

    ``in_place``: chunks are mapped from the file, so a chunk must have no gap."""
    min_bytes = min(CHUNK_BYTES, budget // MIN_CHUNKS)
    groups = []
    for number, tensors in enumerate(units):
        chunks = []
        for position, part in enumerate(_split_into_chunks(tensors, min_bytes, in_place=in_place)):
            chunks.append(_to_chunk(part, number, position, in_place=in_place))
        groups.append(ReadGroup(number, tuple(chunks)))
    return groups


def _split_into_chunks(tensors: Sequence[StoredTensor], min_bytes: int, *, in_place: bool) -> Iterator[list[StoredTensor]]:
    pending: list[StoredTensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        if pending:
            last = pending[-1]
            is_separate = last.file != tensor.file or (in_place and last.offset + last.nbytes != tensor.offset)
            if is_separate or size >= min_bytes:
                yield pending
                pending = []
                size = 0
        pending.append(tensor)
        size += tensor.nbytes
    yield pending


def _to_chunk(tensors: Sequence[StoredTensor], group: int, number: int, *, in_place: bool) -> Chunk:
    if in_place:
        start = tensors[0].offset
        last = tensors[-1]
        offsets = [tensor.offset - start for tensor in tensors]
        end = last.offset + last.nbytes - start
    else:
        offsets = []
        end = 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return Chunk(tuple(tensors), tuple(offsets), max(end, 0 if in_place else ALIGNMENT), group, number)


class PrefetchReader:
    """A thread that reads groups ahead.

    ``budget``: bytes of all buffers. Only modules that run at the same time can make the reader exceed it."""

    def __init__(self, groups: Sequence[ReadGroup], pool: BufferPool, *, budget: int) -> None:
        self.groups = groups
        self.budget = max(budget, max(group.nbytes for group in groups))
        self._pool = pool
        self._changed = threading.Condition()
        self._free: list[Buffer] = []
        self._allocated_bytes = 0
        self._last_requests: tuple[int, int] = (-1, -1)  # the last two groups that were requested
        self._successors: dict[tuple[int, int], int] = {}  # the group that followed two requests
        self._waiting: list[ReadGroup] = []  # groups that a caller waits for
        self._error: BaseException | None = None
        self._closed = False
        self.bytes_read = 0
        self.peak_bytes = 0
        self.thread = threading.Thread(target=self._run, name="upshift-reader", daemon=True)
        self.thread.start()

    def acquire(self, number: int) -> list[Tensor]:
        """Return the chunks of a group as bytes. They are valid until ``release`` was called as often as ``acquire``."""
        group = self.groups[number]
        with self._changed:
            if number != self._last_requests[1]:
                self._successors[self._last_requests] = number
                self._last_requests = (self._last_requests[1], number)
            group.users += 1
            self._waiting.append(group)
            self._changed.notify_all()
            self._changed.wait_for(lambda: group.is_loaded or self._error is not None or self._closed)
            self._waiting.remove(group)
            if not group.is_loaded:
                group.users -= 1
                raise self._error or JobFailed("the weights on the disk are closed already")
            self._changed.notify_all()
            return [buffer.use() for buffer in group.loaded]

    def release(self, number: int) -> None:
        with self._changed:
            group = self.groups[number]
            group.users -= 1
            for buffer in group.loaded:
                buffer.mark_used()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._read_ahead()
        except BaseException as error:  # raised again in the thread that waits for a group
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._pool.close()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (upcoming := self._next_chunk()) is not None and self._reserve_buffer(*upcoming)
                )
                if self._closed:
                    return
                group, chunk, buffer = self._reserved
            buffer.fill(chunk)
            with self._changed:
                group.loaded.append(buffer)
                self.bytes_read += chunk.nbytes
                self._changed.notify_all()

    def _next_chunk(self) -> tuple[ReadGroup, Chunk] | None:
        """Return the group and chunk to read now: of a group that a caller waits for, else of an upcoming group."""
        for group in self._upcoming_groups():
            if not group.is_loaded:
                return group, group.chunks[len(group.loaded)]
        return None

    def _upcoming_groups(self) -> list[ReadGroup]:
        """Return the groups that callers wait for, then those that followed in the last pass, as many as the budget holds.

        In the first pass, groups are expected in the order of their numbers."""
        groups = list(self._waiting)
        previous, number = self._last_requests
        num_bytes = sum(group.nbytes for group in self.groups if group.users)
        numbers = {group.number for group in groups}
        while num_bytes < self.budget and len(numbers) < len(self.groups):
            successor = self._successors.get((previous, number), (number + 1) % len(self.groups))
            previous = number
            number = successor
            if number in numbers:
                break
            numbers.add(number)
            groups.append(self.groups[number])
            num_bytes += self.groups[number].nbytes if not self.groups[number].users else 0
        return groups

    def _reserve_buffer(self, group: ReadGroup, chunk: Chunk) -> bool:
        """Reserve a buffer for a chunk, and return whether there is room for it now."""
        upcoming = {other_group.number for other_group in self._upcoming_groups()}
        idle = [other_group for other_group in self.groups if other_group.loaded and not other_group.users]
        for other_group in idle:
            if other_group.number not in upcoming:
                self._free_buffers(other_group)
        buffer = self._find_buffer(chunk.nbytes)
        if buffer is None and group in self._waiting:
            for other_group in idle:
                if other_group not in self._waiting:
                    self._free_buffers(other_group)
            buffer = self._find_buffer(chunk.nbytes) or self._allocate_buffer(chunk.nbytes)
        if buffer is None:
            return False
        self._reserved = group, chunk, buffer
        return True

    def _free_buffers(self, group: ReadGroup) -> None:
        for buffer in group.loaded:
            if buffer.is_free():
                self._free.append(buffer)
            else:
                self._allocated_bytes -= buffer.capacity  # its memory is freed with the last view of it
        group.loaded = []

    def _find_buffer(self, nbytes: int) -> Buffer | None:
        """Return a free buffer of exactly this size, or a new one within the budget.

        Layers are alike, so sizes repeat. A small chunk in a larger buffer would waste room."""
        buffer = next((buffer for buffer in self._free if buffer.capacity == nbytes), None)
        if buffer is not None:
            self._free.remove(buffer)
            return buffer
        while self._free and self._allocated_bytes + nbytes > self.budget:
            self._allocated_bytes -= self._free.pop().capacity
        return self._allocate_buffer(nbytes) if self._allocated_bytes + nbytes <= self.budget else None

    def _allocate_buffer(self, nbytes: int) -> Buffer:
        self._allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._allocated_bytes)
        return self._pool.allocate(nbytes)
