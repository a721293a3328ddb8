"""Reads groups of stored tensors into memory that is used again, ahead of the one who asks, in the order of the last time.

A group is what one module needs. It is read in pieces of whole tensors, so that a part of the next group is on its way where
there is no room for all of it. Files are read with pread into memory of our own: mapped pages would count as ours until the
system takes them back, and are read in smaller steps.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from upshift.errors import JobFailed
from upshift.loading.header import StoredTensor
from upshift.units import MIB

PIECE_BYTES = 16 * MIB  # at least, where a group has as much and the buffers hold many
PIECES_HELD = 16
ALIGNMENT = 64  # of a tensor in a piece: as torch's own allocator, so that kernels are the same ones
MAX_VIEWS = 1024  # of one preadv: IOV_MAX of Linux and macOS


@dataclass(frozen=True)
class Piece:
    tensors: tuple[StoredTensor, ...]  # of one file, by offset
    starts: tuple[int, ...]
    nbytes: int


@dataclass(eq=False)
class Group:
    number: int
    pieces: tuple[Piece, ...]
    loaded: list[_Slot] = field(default_factory=list)  # of the first pieces
    users: int = 0

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def whole(self) -> bool:
        return len(self.loaded) == len(self.pieces)


class _Slot:
    """Memory for a piece. As long as anybody holds a view of it, its buffer is referred to from there."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.content: Tensor | None = None

    def fill(self, piece: Piece, files: dict[Path, int], *, keep: bool) -> None:
        self.content = torch.frombuffer(self.memory, dtype=torch.uint8)
        view = memoryview(self.memory)
        for run in _runs(piece):
            stored = piece.tensors[run.start]
            views = [view[piece.starts[i] : piece.starts[i] + piece.tensors[i].nbytes] for i in run]
            _read(files[stored.file], views, stored)
            if not keep:
                last = piece.tensors[run.stop - 1]
                os.posix_fadvise(
                    files[stored.file], stored.offset, last.offset + last.nbytes - stored.offset, os.POSIX_FADV_DONTNEED
                )

    def is_free(self) -> bool:
        """Once it was given back: nobody saved a view of it."""
        self.content = None
        return sys.getrefcount(self.memory) <= 2  # this object's own, and the argument's


def make_groups(wanted: Sequence[Sequence[StoredTensor]], budget: int) -> list[Group]:
    least = min(PIECE_BYTES, budget // PIECES_HELD)
    return [Group(number, tuple(_pieces(tensors, least))) for number, tensors in enumerate(wanted)]


def _pieces(tensors: Sequence[StoredTensor], least: int) -> Iterator[Piece]:
    held: list[StoredTensor] = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        if held and (held[-1].file != tensor.file or sum(other.nbytes for other in held) >= least):
            yield _piece(held)
            held = []
        held.append(tensor)
    yield _piece(held)


def _piece(tensors: Sequence[StoredTensor]) -> Piece:
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return Piece(tuple(tensors), tuple(starts), max(end, ALIGNMENT))


def _runs(piece: Piece) -> Iterator[range]:
    """Tensors that lie behind each other in the file."""
    first = 0
    for number, tensor in enumerate(piece.tensors):
        last = number + 1 == len(piece.tensors)
        if last or piece.tensors[number + 1].offset != tensor.offset + tensor.nbytes or number + 1 - first == MAX_VIEWS:
            yield range(first, number + 1)
            first = number + 1


def _read(descriptor: int, views: list[memoryview], stored: StoredTensor) -> None:
    offset = stored.offset
    views = [view for view in views if view]
    while views:
        try:
            count = os.preadv(descriptor, views, offset)
        except OSError as error:
            raise JobFailed(f"cannot read the weights of {stored.file}: {error.strerror}; check the disk") from None
        if count == 0:
            raise JobFailed(f"{stored.file} is shorter than it was; its weights cannot be read any more")
        offset += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


class Reader:
    """``budget``: bytes of all buffers together; more are taken only where modules that run at once need more."""

    def __init__(self, groups: Sequence[Group], *, budget: int, keep_cached: bool) -> None:
        self.groups, self.budget, self._keep = groups, max(budget, max(group.nbytes for group in groups)), keep_cached
        self._files = {file: os.open(file, os.O_RDONLY) for file in {p.tensors[0].file for g in groups for p in g.pieces}}
        self._changed = threading.Condition()
        self._free: list[_Slot] = []
        self._held = 0
        self._last: tuple[int, int] = (-1, -1)  # the group before the one asked for last, and that one
        self._after: dict[tuple[int, int], int] = {}
        self._waited: list[Group] = []  # groups that somebody waits for
        self._error: BaseException | None = None
        self._closed = False
        self.bytes_read = 0
        self.most_held = 0
        self.thread = threading.Thread(target=self._run, name="upshift-reader", daemon=True)
        self.thread.start()

    def acquire(self, number: int) -> list[Tensor]:
        """The pieces of a group, as bytes, from now until it is released as often."""
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
            return [slot.content for slot in group.loaded if slot.content is not None]

    def release(self, number: int) -> None:
        with self._changed:
            self.groups[number].users -= 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._read_ahead()
        except BaseException as error:  # it belongs to who waits for a group
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            for descriptor in self._files.values():
                os.close(descriptor)

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (found := self._next()) is not None and self._take(*found))
                if self._closed:
                    return
                group, piece, slot = self._taken
            slot.fill(piece, self._files, keep=self._keep)
            with self._changed:
                group.loaded.append(slot)
                self.bytes_read += piece.nbytes
                self._changed.notify_all()

    def _next(self) -> tuple[Group, Piece] | None:
        """What is to be read now: of the group that is waited for, else of those that come next."""
        for group in self._upcoming():
            if not group.whole:
                return group, group.pieces[len(group.loaded)]
        return None

    def _upcoming(self) -> list[Group]:
        """What is waited for, then what followed the last time, as far as the buffers reach; at first in their order."""
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

    def _take(self, group: Group, piece: Piece) -> bool:
        """Whether there is room for it now."""
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

    def _give_back(self, group: Group) -> None:
        for slot in group.loaded:
            if slot.is_free():
                self._free.append(slot)
            else:
                self._held -= slot.capacity  # it lives as long as who holds a view of it
        group.loaded = []

    def _slot(self, nbytes: int) -> _Slot | None:
        fitting = [slot for slot in self._free if nbytes <= slot.capacity]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.capacity)
            if slot.capacity <= 2 * nbytes or self._held + nbytes > self.budget:
                self._free.remove(slot)
                return slot
        while self._free and self._held + nbytes > self.budget:
            self._held -= self._free.pop().capacity
        return self._new(nbytes) if self._held + nbytes <= self.budget else None

    def _new(self, nbytes: int) -> _Slot:
        self._held += nbytes
        self.most_held = max(self.most_held, self._held)
        return _Slot(nbytes)
