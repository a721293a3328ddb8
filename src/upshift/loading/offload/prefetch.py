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
    pieces: tuple[Chunk, ...]
    loaded: list[Buffer] = field(default_factory=list)  # of the first pieces
    users: int = 0

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def whole(self) -> bool:
        return len(self.loaded) == len(self.pieces)


def make_groups(wanted: Sequence[Sequence[StoredTensor]], budget: int, *, in_place: bool = False) -> list[ReadGroup]:
    """Divide the tensors of each unit into pieces.

    ``in_place``: pieces are used where they lie in the file, so a piece has no gap."""
    least = min(CHUNK_BYTES, budget // MIN_CHUNKS)
    groups = []
    for number, tensors in enumerate(wanted):
        parts = enumerate(_parts(tensors, least, in_place=in_place))
        groups.append(ReadGroup(number, tuple(_piece(part, number, place, in_place=in_place) for place, part in parts)))
    return groups


def _parts(tensors: Sequence[StoredTensor], least: int, *, in_place: bool) -> Iterator[list[StoredTensor]]:
    held: list[StoredTensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        apart = held and (held[-1].file != tensor.file or (in_place and held[-1].offset + held[-1].nbytes != tensor.offset))
        if held and (apart or size >= least):
            yield held
            held = []
            size = 0
        held.append(tensor)
        size += tensor.nbytes
    yield held


def _piece(tensors: Sequence[StoredTensor], group: int, number: int, *, in_place: bool) -> Chunk:
    if in_place:
        start = tensors[0].offset
        last = tensors[-1]
        starts = [tensor.offset - start for tensor in tensors]
        end = last.offset + last.nbytes - start
    else:
        starts = []
        end = 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return Chunk(tuple(tensors), tuple(starts), max(end, 0 if in_place else ALIGNMENT), group, number)


class PrefetchReader:
    """A thread that reads groups ahead.

    ``budget``: bytes of all slots together. More are taken only if modules that run at once need more."""

    def __init__(self, groups: Sequence[ReadGroup], slots: BufferPool, *, budget: int) -> None:
        self.groups = groups
        self.budget = max(budget, max(group.nbytes for group in groups))
        self._slots = slots
        self._changed = threading.Condition()
        self._free: list[Buffer] = []
        self._held = 0
        self._last: tuple[int, int] = (-1, -1)  # the group before the one asked for last, and that one
        self._after: dict[tuple[int, int], int] = {}
        self._waited: list[ReadGroup] = []  # groups that somebody waits for
        self._error: BaseException | None = None
        self._closed = False
        self.bytes_read = 0
        self.most_held = 0
        self.thread = threading.Thread(target=self._run, name="upshift-reader", daemon=True)
        self.thread.start()

    def acquire(self, number: int) -> list[Tensor]:
        """Return the pieces of a group, as bytes. They are valid until ``release`` was called as often."""
        group = self.groups[number]
        with self._changed:
            if number != self._last[1]:
                self._after[self._last] = number
                self._last = (self._last[1], number)
            group.users += 1
            self._waited.append(group)
            self._changed.notify_all()
            self._changed.wait_for(lambda: group.whole or self._error is not None or self._closed)
            self._waited.remove(group)
            if not group.whole:
                group.users -= 1
                raise self._error or JobFailed("the weights on the disk are closed already")
            self._changed.notify_all()
            return [slot.use() for slot in group.loaded]

    def release(self, number: int) -> None:
        with self._changed:
            group = self.groups[number]
            group.users -= 1
            for slot in group.loaded:
                slot.used()
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
            self._slots.close()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (found := self._next()) is not None and self._take(*found))
                if self._closed:
                    return
                group, piece, slot = self._taken
            slot.fill(piece)
            with self._changed:
                group.loaded.append(slot)
                self.bytes_read += piece.nbytes
                self._changed.notify_all()

    def _next(self) -> tuple[ReadGroup, Chunk] | None:
        """Return the group and piece to read now: of a group that is waited for, else of a group that comes next."""
        for group in self._upcoming():
            if not group.whole:
                return group, group.pieces[len(group.loaded)]
        return None

    def _upcoming(self) -> list[ReadGroup]:
        """Return the groups that are waited for, then those that followed the last time, as far as the buffers reach.

        Before anything was learned, groups follow in their own order."""
        found = list(self._waited)
        before, number = self._last
        held = sum(group.nbytes for group in self.groups if group.users)
        seen = {group.number for group in found}
        while held < self.budget and len(seen) < len(self.groups):
            before, number = number, self._after.get((before, number), (number + 1) % len(self.groups))
            if number in seen:
                break
            seen.add(number)
            found.append(self.groups[number])
            held += self.groups[number].nbytes if not self.groups[number].users else 0
        return found

    def _take(self, group: ReadGroup, piece: Chunk) -> bool:
        """Take a slot for a piece and return whether there is room for it now."""
        coming = {other.number for other in self._upcoming()}
        idle = [other for other in self.groups if other.loaded and not other.users]
        for other in idle:
            if other.number not in coming:
                self._give_back(other)
        slot = self._slot(piece.nbytes)
        if slot is None and group in self._waited:
            for other in idle:
                if other not in self._waited:
                    self._give_back(other)
            slot = self._slot(piece.nbytes) or self._new(piece.nbytes)
        if slot is None:
            return False
        self._taken = group, piece, slot
        return True

    def _give_back(self, group: ReadGroup) -> None:
        for slot in group.loaded:
            if slot.is_free():
                self._free.append(slot)
            else:
                self._held -= slot.capacity  # it lives as long as somebody holds a view of it
        group.loaded = []

    def _slot(self, nbytes: int) -> Buffer | None:
        """Return a free slot of exactly this size, or a new one within the budget.

        Layers are alike, so sizes repeat. In a larger slot a small piece would take the room of another."""
        slot = next((slot for slot in self._free if slot.capacity == nbytes), None)
        if slot is not None:
            self._free.remove(slot)
            return slot
        while self._free and self._held + nbytes > self.budget:
            self._held -= self._free.pop().capacity
        return self._new(nbytes) if self._held + nbytes <= self.budget else None

    def _new(self, nbytes: int) -> Buffer:
        self._held += nbytes
        self.most_held = max(self.most_held, self._held)
        return self._slots.new(nbytes)
