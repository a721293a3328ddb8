# needs torch
"""Copy weights from the host to a GPU on a separate stream, while another stream computes.

A copy starts after the computation that used its memory before. A computation that uses the memory waits for the copy. Both
waits are events on the GPU and do not block the processor. The host memory is pinned, because other copies would block it.
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
    """A stream that copies while the caller's stream computes. Events order the two."""

    device: torch.device

    def pin(self, nbytes: int) -> Tensor: ...

    def empty(self, nbytes: int) -> Tensor: ...

    def copy(self, content: Tensor, memory: Tensor, after: Any) -> Any:
        """Copy after the event ``after``, if it is given, and return the event of the copy's end."""

    def wait(self, event: Any, memory: Tensor) -> None:
        """Make computations that start from now on, which use ``memory``, wait for the event."""

    def mark(self) -> Any:
        """Return the event of the end of all computations that started so far."""

    def finish(self, event: Any) -> None:
        """Block the processor until the event."""


def pinned_memory(nbytes: int, device: torch.device, *, advice: str) -> Tensor:
    """Return pinned host memory of exactly this size, for as long as the tensor that is returned lives.

    torch would round the size up to a power of two. Raise JobFailed with ``advice`` if the system does not pin so much.
    """
    content = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes == 0:  # CUDA refuses to pin nothing
        return content
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        error = runtime.cudaHostRegister(content.data_ptr(), nbytes, 0)
    if int(error):
        raise JobFailed(f"{format_bytes(nbytes)} of memory could not be pinned ({error}); {advice}")
    weakref.finalize(content, runtime.cudaHostUnregister, content.data_ptr())
    return content


class CudaCopyStream:
    """A CUDA stream that copies to one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def pin(self, nbytes: int) -> Tensor:
        return pinned_memory(nbytes, self.device, advice="leave more to the GPU or the disk")

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
        memory.record_stream(computing)  # memory that is freed early is not reused before this stream has finished

    def mark(self) -> torch.cuda.Event:
        return self._record_event(torch.cuda.current_stream(self.device))

    def finish(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def _record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event


class DeviceBufferPool:
    """A pool of buffers on the GPU.

    ``pinned_groups``: the groups in pinned memory, laid out as their chunks are. ``disk_reader`` reads the other groups.
    ``disk_numbers``: the number of each of these in that reader."""

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
        self._acquired: tuple[int, list[Tensor]] | None = None  # the group that is being copied from the disk reader's buffers

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
        self._copy_stream.finish(copied)  # before the disk reader fills the buffer again
        if chunk.number + 1 == len(buffers):
            self._release_acquired()
        return copied

    def _acquire_from_disk(self, group: int) -> list[Tensor]:
        """Return the buffers of a group. They stay acquired until its last chunk is copied, or another group is needed."""
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
        """Return how many objects hold the memory: tensors, and views that autograd saved."""
        return int(STORAGE_HOLDERS.get()(STORAGE.of(self._storage)))
