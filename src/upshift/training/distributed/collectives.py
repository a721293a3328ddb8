"""Exchange an activation among the ranks of a group in the forward pass, and its gradient in the backward pass.

Ranks of tensor parallelism exchange before and after the matrices of a layer that they share (Shoeybi et al. 2019, section 3).
With sequence parallelism they gather the tokens before, and reduce and scatter them after (Korthikanti et al. 2022, section
4.2). No tensor is overwritten, because recomputation needs the products as they were.

Instead of a gathered tensor, a rank can keep its own tokens until the backward pass and gather them again there: once, however
many matrices read the tensor (Korthikanti et al. 2022, section 4.2.2).
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
_ops = COLLECTIVES.get()  # a namespace of torch.ops, which is never missing; parallelize.py checks its operators


class Exchange(torch.autograd.Function):
    """Call ``forward_op`` on the tensor in the forward pass, and ``backward_op`` on its gradient in the backward pass."""

    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, group: dist.ProcessGroup, forward_op: Collective, backward_op: Collective
    ) -> torch.Tensor:
        context.group = group
        context.backward_op = backward_op
        return forward_op(tensor, group)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return context.backward_op(gradients[0], context.group), None, None, None


def identity(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the same values as a new tensor, as autograd needs it."""
    return tensor.view_as(tensor)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over ranks."""
    result: torch.Tensor = _ops.wait_tensor(_ops.all_reduce(tensor.contiguous(), "sum", group.group_name))
    return result


def all_gather_tokens(tensor: torch.Tensor, group: dist.ProcessGroup, dimension: int = TOKENS) -> torch.Tensor:
    """Return the parts of all ranks along a dimension, in the order of ranks."""
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(tensor.contiguous(), group.size(), group.group_name))
    return torch.cat(parts.chunk(group.size()), dimension)


def reduce_scatter_tokens(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's tokens of the sum over ranks."""
    parts = torch.cat(tensor.chunk(group.size(), TOKENS))
    result: torch.Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(parts, "sum", group.size(), group.group_name))
    return result


def local_tokens(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's tokens of a tensor that all ranks have."""
    return tensor.chunk(group.size(), TOKENS)[group.rank()].contiguous()


def all_gather_features(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the parts of all ranks along the last dimension."""
    return all_gather_tokens(tensor, group, -1)


def local_features(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of the last dimension."""
    return tensor.chunk(group.size(), -1)[group.rank()].contiguous()


@dataclass(frozen=True)
class GatheredPlaceholder:
    """A placeholder for the gathered tensor, or for a view of all its elements."""

    shape: torch.Size


class RegatherInBackward:
    """The hooks ``pack`` and ``unpack`` for torch's saved_tensors_hooks, around a function that reads the tensor ``gathered``."""

    def __init__(self, local: torch.Tensor, gathered: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._local = local.detach()
        self._group = group
        self._storage = STORAGE.of(gathered.untyped_storage())
        self._num_elements = gathered.numel()
        self._num_readers = 0
        self._regathered: torch.Tensor | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | GatheredPlaceholder:
        has_all_elements = tensor.numel() == self._num_elements and tensor.is_contiguous()
        if not has_all_elements or STORAGE.of(tensor.untyped_storage()) != self._storage:
            return tensor
        self._num_readers += 1
        return GatheredPlaceholder(tensor.shape)

    def unpack(self, packed: torch.Tensor | GatheredPlaceholder) -> torch.Tensor:
        if not isinstance(packed, GatheredPlaceholder):
            return packed
        gathered = all_gather_tokens(self._local, self._group) if self._regathered is None else self._regathered
        self._num_readers -= 1
        self._regathered = gathered if self._num_readers else None
        return gathered.view(packed.shape)
