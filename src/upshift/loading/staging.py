"""Send stored tensors to a GPU through two buffers of pinned memory: one is filled while the other is sent."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from upshift.loading.header import StoredTensor
from upshift.loading.tensors import PIECE_BYTES, OpenFile, dtype_of


class Staging:
    """The buffers of one load. Each thread that reads has buffers of its own."""

    def __init__(self) -> None:
        self._own = threading.local()

    def read_into(self, stored: StoredTensor, destination: Tensor) -> None:
        """Read a tensor into ``destination``, which is contiguous and on a GPU, and convert it there.

        Copies that are still on their way arrive before any later work of the destination's stream."""
        dtype, flat = dtype_of(stored), destination.detach().view(-1)
        count = PIECE_BYTES // dtype.itemsize
        with torch.cuda.device(destination.device), OpenFile(stored) as file:
            for number, start in enumerate(range(0, flat.numel(), count)):
                buffer, sent = self._buffers()[number % 2]
                sent.synchronize()
                size = min(count, flat.numel() - start)
                content = buffer[: size * dtype.itemsize]
                file.fill(content, stored.offset + start * dtype.itemsize)
                flat[start : start + size].copy_(content.view(dtype).to(destination.device, non_blocking=True))
                sent.record()

    def _buffers(self) -> list[tuple[Tensor, torch.cuda.Event]]:
        if not hasattr(self._own, "buffers"):
            self._own.buffers = [
                (torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
            ]
        buffers: list[tuple[Tensor, torch.cuda.Event]] = self._own.buffers
        return buffers
