"""Exchange an activation among the ranks of a group, and its gradient on the way back.

Ranks of tensor parallelism meet where they begin to share a layer's matrices, and where they end to (Shoeybi et al. 2019,
section 3). With sequence parallelism they gather the tokens there, and sum and share them again (Korthikanti et al. 2022,
section 4.2). Nothing is written over: recomputation must keep the product as it was.

Keep only a rank's own tokens of a gathered tensor until the backward pass, and gather it again there.

The tensor is gathered again once, however many matrices read it (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from upshift.internals.torch_names import COLLECTIVES, STORAGE

TOKENS = 1  # the dimension of hidden states [batch, tokens, hidden]
Collective = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]
_ops = COLLECTIVES.get()  # a namespace of torch.ops, which is never missing; its operators are checked (refusals.py)


class Exchange(torch.autograd.Function):
    """An exchange that calls ``there`` on the tensor going forward, and ``back`` on its gradient."""

    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, group: dist.ProcessGroup, there: Collective, back: Collective
    ) -> torch.Tensor:
        context.group = group
        context.back = back
        return there(tensor, group)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return context.back(gradients[0], context.group), None, None, None


def identity(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return tensor.view_as(tensor)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    result: torch.Tensor = _ops.wait_tensor(_ops.all_reduce(tensor.contiguous(), "sum", group.group_name))
    return result


def all_gather_tokens(tensor: torch.Tensor, group: dist.ProcessGroup, dimension: int = TOKENS) -> torch.Tensor:
    """Return every rank's part, in the order of ranks."""
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(tensor.contiguous(), group.size(), group.group_name))
    return torch.cat(parts.chunk(group.size()), dimension)


def reduce_scatter_tokens(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's tokens of the sum."""
    parts = torch.cat(tensor.chunk(group.size(), TOKENS))
    result: torch.Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(parts, "sum", group.size(), group.group_name))
    return result


def local_tokens(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's tokens of a tensor that all ranks have."""
    return tensor.chunk(group.size(), TOKENS)[group.rank()].contiguous()


def all_gather_features(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return all_gather_tokens(tensor, group, -1)


def local_features(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return tensor.chunk(group.size(), -1)[group.rank()].contiguous()


@dataclass(frozen=True)
class GatheredPlaceholder:
    """A placeholder for the whole tensor, or for a view of all of it."""

    shape: torch.Size


class RegatherInBackward:
    """A pair of hooks, ``pack`` and ``unpack``, for torch's saved_tensors_hooks while a function that reads ``whole`` runs."""

    def __init__(self, own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._own = own.detach()
        self._group = group
        self._storage = STORAGE.of(whole.untyped_storage())
        self._elements = whole.numel()
        self._readers = 0
        self._again: torch.Tensor | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | GatheredPlaceholder:
        all_of_it = tensor.numel() == self._elements and tensor.is_contiguous()
        if not all_of_it or STORAGE.of(tensor.untyped_storage()) != self._storage:
            return tensor
        self._readers += 1
        return GatheredPlaceholder(tensor.shape)

    def unpack(self, packed: torch.Tensor | GatheredPlaceholder) -> torch.Tensor:
        if not isinstance(packed, GatheredPlaceholder):
            return packed
        whole = all_gather_tokens(self._own, self._group) if self._again is None else self._again
        self._readers -= 1
        self._again = whole if self._readers else None
        return whole.view(packed.shape)
