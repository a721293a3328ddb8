"""Keep only a rank's own tokens of a gathered tensor until the backward pass, and gather it again there.

The tensor is gathered again once, however many matrices read it (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from upshift.internals.torch_names import STORAGE
from upshift.training.parallel.exchanged import gathered


@dataclass(frozen=True)
class Kept:
    """A placeholder for the whole tensor, or for a view of all of it."""

    shape: torch.Size


class Regathered:
    """A pair of hooks, ``pack`` and ``unpack``, for torch's saved_tensors_hooks while a function that reads ``whole`` runs."""

    def __init__(self, own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._own, self._group = own.detach(), group
        self._storage, self._elements = STORAGE.of(whole.untyped_storage()), whole.numel()
        self._readers = 0
        self._again: torch.Tensor | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Kept:
        all_of_it = tensor.numel() == self._elements and tensor.is_contiguous()
        if not all_of_it or STORAGE.of(tensor.untyped_storage()) != self._storage:
            return tensor
        self._readers += 1
        return Kept(tensor.shape)

    def unpack(self, packed: torch.Tensor | Kept) -> torch.Tensor:
        if not isinstance(packed, Kept):
            return packed
        whole = gathered(self._own, self._group) if self._again is None else self._again
        self._readers -= 1
        self._again = whole if self._readers else None
        return whole.view(packed.shape)
