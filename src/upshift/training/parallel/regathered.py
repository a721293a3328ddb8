"""A tensor that ranks gathered, and of which each keeps its own tokens alone until the backward pass, where it is gathered again
(Korthikanti et al. 2022, section 4.2.2): once, however many matrices read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from upshift.internals.torch_names import STORAGE
from upshift.training.parallel.exchanged import gathered


@dataclass(frozen=True)
class Kept:
    """In the place of the whole tensor, or of a view of all of it."""

    shape: torch.Size


class Regathered:
    """``pack`` and ``unpack`` are for torch's saved_tensors_hooks, while what reads ``whole`` runs."""

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
