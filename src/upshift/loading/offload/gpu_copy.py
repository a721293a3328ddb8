"""Copy weights from the host to a GPU on a stream of its own, while another stream computes.

A copy begins when the computation that used its memory before has ended. A computation that uses the memory waits for the copy.
Both waits are on the GPU alone (events), so the processor goes on. Host memory is pinned: only then does a copy not stop the
processor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from upshift.errors import JobFailed
from upshift.internals.torch_names import STORAGE, STORAGE_HOLDERS
from upshift.loading.offload.buffers import Buffer, Chunk
from upshift.loading.offload.prefetch import PrefetchReader
from upshift.units import format_bytes


class CopyStream(Protocol):
    """A stream that copies, beside the caller's stream that computes. Events order the two."""

    device: torch.device

    def pin(self, nbytes: int) -> Tensor: ...

    def empty(self, nbytes: int) -> Tensor: ...

    def copy(self, content: Tensor, memory: Tensor, after: Any) -> Any:
        """Copy after the event ``after``, if there is one, and return the event of the copy's end."""

    def wait(self, event: Any, memory: Tensor) -> None:
        """Make the computations that are started from now on, which use the memory, wait for the event."""

    def mark(self) -> Any:
        """Return the event of the end of all computations started so far."""

    def finish(self, event: Any) -> None:
        """Block the processor until the event."""


class CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def pin(self, nbytes: int) -> Tensor:
        """Return pinned memory of exactly this size: torch's own pinned memory is rounded up to a power of two."""
        content = torch.empty(nbytes, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            error = runtime.cudaHostRegister(content.data_ptr(), nbytes, 0)
        if int(error):
            raise JobFailed(f"{format_bytes(nbytes)} of memory could not be pinned ({error}); leave more to the GPU or the disk")
        weakref.finalize(content, runtime.cudaHostUnregister, content.data_ptr())
        return content

    def empty(self, nbytes: int) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, content: Tensor, memory: Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            memory.copy_(content, non_blocking=True)
            return self._recorded(self._stream)

    def wait(self, event: torch.cuda.Event, memory: Tensor) -> None:
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(event)
        memory.record_stream(computing)  # if the memory is freed early, it is not used again before this stream is done

    def mark(self) -> torch.cuda.Event:
        return self._recorded(torch.cuda.current_stream(self.device))

    def finish(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def _recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event


class DeviceBufferPool:
    """The pieces of memory on the GPU that weights are copied to.

    ``held``: groups in pinned memory, packed as their pieces are. ``disk``: reads the others, by their ``numbers`` in it."""

    def __init__(
        self, lanes: CopyStream, held: Mapping[int, Tensor], disk: PrefetchReader | None, numbers: Mapping[int, int]
    ) -> None:
        self._lanes = lanes
        self._held = held
        self._disk = disk
        self._numbers = numbers
        self._read: tuple[int, list[Tensor]] | None = None  # the group that is being taken from the disk's buffers

    def new(self, capacity: int) -> Buffer:
        return _DeviceBuffer(capacity, self._lanes, self._send)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _send(self, piece: Chunk, memory: Tensor, after: Any) -> Any:
        if piece.group in self._held:
            start = piece.tensors[0].offset
            return self._lanes.copy(self._held[piece.group][start : start + piece.nbytes], memory, after)
        pieces = self._from_disk(piece.group)
        sent = self._lanes.copy(pieces[piece.number][: piece.nbytes], memory, after)
        self._lanes.finish(sent)  # before the buffer is read into again
        if piece.number + 1 == len(pieces):
            self._let_go()
        return sent

    def _from_disk(self, group: int) -> list[Tensor]:
        """Return the buffers of a group. The group is kept from its first piece to its last, or until another group is needed."""
        assert self._disk is not None
        if self._read is None or self._read[0] != group:
            self._let_go()
            self._read = group, self._disk.acquire(self._numbers[group])
        return self._read[1]

    def _let_go(self) -> None:
        if self._disk is not None and self._read is not None:
            self._disk.release(self._numbers[self._read[0]])
        self._read = None


class _DeviceBuffer:
    def __init__(self, capacity: int, lanes: CopyStream, send: Callable[[Chunk, Tensor, Any], Any]) -> None:
        self.capacity = capacity
        self._lanes = lanes
        self._send = send
        self._memory = lanes.empty(capacity)
        self._storage = self._memory.untyped_storage()
        self._alone = self._users()
        self._last_use: Any = None

    def fill(self, piece: Chunk) -> None:
        self._ready = self._send(piece, self._memory[: piece.nbytes], self._last_use)

    def use(self) -> Tensor:
        self._lanes.wait(self._ready, self._memory)
        return self._memory

    def used(self) -> None:
        self._last_use = self._lanes.mark()

    def is_free(self) -> bool:
        return self._users() <= self._alone

    def _users(self) -> int:
        """Return how many objects hold the memory: tensors, and what autograd saved."""
        return int(STORAGE_HOLDERS.get()(STORAGE.of(self._storage)))
