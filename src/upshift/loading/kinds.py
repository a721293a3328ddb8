"""Recognize modules that need only a part of their weights: embeddings read some rows, and experts are chosen by a router."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

CHOICE = "top_k_index"  # of the interface of transformers.integrations.moe


def is_looked_up(module: nn.Module) -> bool:
    """Return whether a module only reads rows of its weight. With ``max_norm`` set, its forward also writes to them."""
    return isinstance(module, nn.Embedding) and module.max_norm is None


def is_routed(module: nn.Module) -> bool:
    """Return whether a module's weights are experts stacked in the first dimension, and its forward takes their choice."""
    number = getattr(module, "num_experts", None)
    own = list(module.parameters())
    if not isinstance(number, int) or not own or any(weight.shape[:1] != (number,) for weight in own):
        return False
    return CHOICE in inspect.signature(type(module).forward).parameters


def experts_in(module: nn.Module) -> Iterator[nn.Module]:
    for inner in module.modules():
        if is_routed(inner):
            yield inner
