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
            return self._record_event(self._stream)

    def wait(self, event: torch.cuda.Event, memory: Tensor) -> None:
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(event)
        memory.record_stream(computing)  # if the memory is freed early, it is not used again before this stream is done

    def mark(self) -> torch.cuda.Event:
        return self._record_event(torch.cuda.current_stream(self.device))

    def finish(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def _record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event


class DeviceBufferPool:
    """The pieces of memory on the GPU that weights are copied to.

    ``held``: groups in pinned memory, packed as their pieces are. ``disk``: reads the others, by their ``numbers`` in it."""

    def __init__(
        self,
        copy_stream: CopyStream,
        pinned_groups: Mapping[int, Tensor],
        disk_reader: PrefetchReader | None,
        disk_numbers: Mapping[int, int],
    ) -> None:
        self._copy_stream = copy_stream
        self._pinned_groups = pinned_groups
        self._disk_reader = disk_reader
        self._disk_numbers = disk_numbers
        self._acquired: tuple[int, list[Tensor]] | None = None  # the group that is being taken from the disk's buffers

    def allocate(self, capacity: int) -> Buffer:
        return _DeviceBuffer(capacity, self._copy_stream, self._send)

    def close(self) -> None:
        if self._disk_reader is not None:
            self._disk_reader.close()

    def _send(self, chunk: Chunk, memory: Tensor, after: Any) -> Any:
        if chunk.group in self._pinned_groups:
            start = chunk.tensors[0].offset
            return self._copy_stream.copy(self._pinned_groups[chunk.group][start : start + chunk.nbytes], memory, after)
        buffers = self._acquire_from_disk(chunk.group)
        copied = self._copy_stream.copy(buffers[chunk.number][: chunk.nbytes], memory, after)
        self._copy_stream.finish(copied)  # before the buffer is read into again
        if chunk.number + 1 == len(buffers):
            self._release_acquired()
        return copied

    def _acquire_from_disk(self, group: int) -> list[Tensor]:
        """Return the buffers of a group. The group is kept from its first piece to its last, or until another group is needed."""
        assert self._disk_reader is not None
        if self._acquired is None or self._acquired[0] != group:
            self._release_acquired()
            self._acquired = group, self._disk_reader.acquire(self._disk_numbers[group])
        return self._acquired[1]

    def _release_acquired(self) -> None:
        if self._disk_reader is not None and self._acquired is not None:
            self._disk_reader.release(self._disk_numbers[self._acquired[0]])
        self._acquired = None


class _DeviceBuffer:
    def __init__(self, capacity: int, copy_stream: CopyStream, send: Callable[[Chunk, Tensor, Any], Any]) -> None:
        self.capacity = capacity
        self._copy_stream = copy_stream
        self._send = send
        self._memory = copy_stream.empty(capacity)
        self._storage = self._memory.untyped_storage()
        self._initial_users = self._num_users()
        self._last_use: Any = None

    def fill(self, chunk: Chunk) -> None:
        self._copied = self._send(chunk, self._memory[: chunk.nbytes], self._last_use)

    def use(self) -> Tensor:
        self._copy_stream.wait(self._copied, self._memory)
        return self._memory

    def mark_used(self) -> None:
        self._last_use = self._copy_stream.mark()

    def is_free(self) -> bool:
        return self._num_users() <= self._initial_users

    def _num_users(self) -> int:
        """Return how many objects hold the memory: tensors, and what autograd saved."""
        return int(STORAGE_HOLDERS.get()(STORAGE.of(self._storage)))
