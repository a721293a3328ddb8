"""Read groups of stored tensors into memory that is used again, ahead of the request, in the order of the last time.

A group is the tensors that one module needs. It is read in pieces of whole tensors, so that a part of the next group is on its
way if there is no room for all of it. Slots decide which memory holds a piece, and how the piece gets there.
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

CHUNK_BYTES = 16 * MIB  # at least, where a group has as much and the buffers hold many
MIN_CHUNKS = 16
ALIGNMENT = 64  # of a tensor in a piece: as torch's own allocator, so that kernels are the same ones


@dataclass(eq=False)
class ReadGroup:
    number: int
    chunks: tuple[Chunk, ...]
    loaded: list[Buffer] = field(default_factory=list)  # of the first pieces
    users: int = 0

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def is_loaded(self) -> bool:
        return len(self.loaded) == len(self.chunks)


def make_groups(units: Sequence[Sequence[StoredTensor]], budget: int, *, in_place: bool = False) -> list[ReadGroup]:
    """Divide the tensors of each unit into pieces.

    ``in_place``: pieces are used where they lie in the file, so a piece has no gap."""
    min_bytes = min(CHUNK_BYTES, budget // MIN_CHUNKS)
    groups = []
    for number, tensors in enumerate(units):
        chunks = enumerate(_split_into_chunks(tensors, min_bytes, in_place=in_place))
        groups.append(
            ReadGroup(number, tuple(_to_chunk(tensors_, number, position, in_place=in_place) for position, tensors_ in chunks))
        )
    return groups


def _split_into_chunks(tensors: Sequence[StoredTensor], min_bytes: int, *, in_place: bool) -> Iterator[list[StoredTensor]]:
    pending: list[StoredTensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        is_separate = pending and (
            pending[-1].file != tensor.file or (in_place and pending[-1].offset + pending[-1].nbytes != tensor.offset)
        )
        if pending and (is_separate or size >= min_bytes):
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

    ``budget``: bytes of all slots together. More are taken only if modules that run at once need more."""

    def __init__(self, groups: Sequence[ReadGroup], pool: BufferPool, *, budget: int) -> None:
        self.groups = groups
        self.budget = max(budget, max(group.nbytes for group in groups))
        self._pool = pool
        self._changed = threading.Condition()
        self._free: list[Buffer] = []
        self._allocated_bytes = 0
        self._last_requests: tuple[int, int] = (-1, -1)  # the group before the one asked for last, and that one
        self._successors: dict[tuple[int, int], int] = {}
        self._waiting: list[ReadGroup] = []  # groups that somebody waits for
        self._error: BaseException | None = None
        self._closed = False
        self.bytes_read = 0
        self.peak_bytes = 0
        self.thread = threading.Thread(target=self._run, name="upshift-reader", daemon=True)
        self.thread.start()

    def acquire(self, number: int) -> list[Tensor]:
        """Return the pieces of a group, as bytes. They are valid until ``release`` was called as often."""
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
        """Return the group and piece to read now: of a group that is waited for, else of a group that comes next."""
        for group in self._upcoming_groups():
            if not group.is_loaded:
                return group, group.chunks[len(group.loaded)]
        return None

    def _upcoming_groups(self) -> list[ReadGroup]:
        """Return the groups that are waited for, then those that followed the last time, as far as the buffers reach.

        Before anything was learned, groups follow in their own order."""
        groups = list(self._waiting)
        previous, number = self._last_requests
        num_bytes = sum(group.nbytes for group in self.groups if group.users)
        numbers = {group.number for group in groups}
        while num_bytes < self.budget and len(numbers) < len(self.groups):
            previous, number = number, self._successors.get((previous, number), (number + 1) % len(self.groups))
            if number in numbers:
                break
            numbers.add(number)
            groups.append(self.groups[number])
            num_bytes += self.groups[number].nbytes if not self.groups[number].users else 0
        return groups

    def _reserve_buffer(self, group: ReadGroup, chunk: Chunk) -> bool:
        """Take a slot for a piece and return whether there is room for it now."""
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
                self._allocated_bytes -= buffer.capacity  # it lives as long as somebody holds a view of it
        group.loaded = []

    def _find_buffer(self, nbytes: int) -> Buffer | None:
        """Return a free slot of exactly this size, or a new one within the budget.

        Layers are alike, so sizes repeat. In a larger slot a small piece would take the room of another."""
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
