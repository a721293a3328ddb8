"""Modules that need only a part of their weights: embeddings, of which rows are read, and experts, of which some are chosen."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

CHOICE = "top_k_index"  # of the interface of transformers.integrations.moe


def is_looked_up(module: nn.Module) -> bool:
    """Whether only rows of its weight are read. Where ``max_norm`` is set, its forward writes to them."""
    return isinstance(module, nn.Embedding) and module.max_norm is None


def is_routed(module: nn.Module) -> bool:
    """Whether its weights are experts behind each other, and it is called with the choice of them."""
    number = getattr(module, "num_experts", None)
    own = list(module.parameters())
    if not isinstance(number, int) or not own or any(weight.shape[:1] != (number,) for weight in own):
        return False
    return CHOICE in inspect.signature(type(module).forward).parameters


def experts_in(module: nn.Module) -> Iterator[nn.Module]:
    for inner in module.modules():
        if is_routed(inner):
            yield inner
