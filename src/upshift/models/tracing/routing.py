# needs torch
"""Trace mixtures of experts whose code looks at the routing, which a trace without numbers does not have.

Most mixtures multiply all experts at once, and the sizes of their tensors do not depend on the routing. Others ask which experts
have tokens (``hits.nonzero()``), and which tokens an expert has (``torch.where(mask)``), or read how many tokens each expert has
(``counts.tolist()`` after ``topk``). A trace then sends all tokens to the first expert, and none to the others, which run all
the same. The sums over the experts are exact: products, saved activations, and a gradient for each weight. Memory that is free
again after each expert is that of the most uneven batch.

Some routers also convert their own weights to fp32 while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any
from unittest import mock

import torch
from torch import nn

from upshift.internals.torch_names import FAKE_TENSOR, PARAMETERS, is_fake

TO = nn.Module.to
WHERE = torch.where


class _Routing:
    """Answer the questions of one mixture's loop after the other, for fake tensors. Real tensors have their own answers."""

    def __init__(self, fake_tensor_class: Any) -> None:
        self._topk = fake_tensor_class.topk
        self._nonzero = fake_tensor_class.nonzero
        self._tolist = fake_tensor_class.tolist
        self._num_routed = 0  # pairs of a token and an expert, as the last topk chose them
        self._num_scored = 0  # experts from which it chose
        self._num_experts = 0  # of the loop that runs
        self._num_waiting = 0  # those that have not asked for their tokens yet

    def topk(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self._topk(tensor, *args, **kwargs)
        self._num_routed = result[1].numel()
        self._num_scored = tensor.shape[-1]
        return result

    def nonzero(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return all experts, as rows of numbers: no fake tensor has a number to name an expert by."""
        if args or kwargs or tensor.ndim != 1 or tensor.dtype != torch.bool:
            return self._nonzero(tensor, *args, **kwargs)
        self._num_experts = len(tensor)
        self._num_waiting = len(tensor)
        return [[expert] for expert in range(len(tensor))]

    def where(self, condition: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the indices of all elements of the mask for the first expert, and no indices for the others.

        A mask that no expert asks about stays unknown, and the model cannot be traced."""
        if args or kwargs or not self._num_waiting or not is_fake(condition):
            return WHERE(condition, *args, **kwargs)
        num_tokens = condition.numel() if self._num_waiting == self._num_experts else 0
        self._num_waiting -= 1
        return tuple(condition.new_empty(num_tokens, dtype=torch.int64) for _ in range(condition.ndim))

    def tolist(self, tensor: torch.Tensor) -> Any:
        """Return the number of tokens of each expert.

        Other numbers than one for each expert of the last topk stay unknown, and the model cannot be traced."""
        if tensor.shape != (self._num_scored,) or tensor.is_floating_point() or not self._num_routed:
            return self._plain_list(tensor)
        return [self._num_routed, *[0] * (len(tensor) - 1)]

    def _plain_list(self, tensor: torch.Tensor) -> Any:
        """Return what torch answers. It asks for each row of a tensor, and a row may be as long as there are experts."""
        return [self._plain_list(row) for row in tensor] if tensor.ndim > 1 else self._tolist(tensor)


@contextmanager
def all_tokens_to_one_expert() -> Iterator[None]:
    """Answer what mixtures ask about the routing of fake tensors, while the context is open."""
    fake_tensor_class = FAKE_TENSOR.get()
    routing = _Routing(fake_tensor_class)
    with ExitStack() as patches:
        for name in ("topk", "nonzero", "tolist"):
            answer = getattr(routing, name)
            patches.enter_context(mock.patch.object(fake_tensor_class, name, partialmethod(_ask, answer)))
        patches.enter_context(mock.patch.object(torch, "where", routing.where))
        patches.enter_context(mock.patch.object(nn.Module, "to", _convert))
        yield


def _ask(tensor: torch.Tensor, answer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return answer(tensor, *args, **kwargs)


def _convert(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Convert a module as ``module.to`` does. PyTorch cannot convert fake weights that a graph or a hook holds."""
    is_dtype_alone = len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs
    if not is_dtype_alone or not all(is_fake(weight) for weight in module.parameters()):
        return TO(module, *args, **kwargs)
    for part in module.modules():
        weights = PARAMETERS.of(part)
        for name, weight in weights.items():
            if weight is not None and weight.is_floating_point() and weight.dtype != args[0]:
                weights[name] = nn.Parameter(torch.empty_like(weight, dtype=args[0]), requires_grad=weight.requires_grad)
    return module
