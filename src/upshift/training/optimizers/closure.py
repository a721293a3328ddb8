"""Evaluate the closure that may be passed to an optimizer's step, as every optimizer of torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Closure = Callable[[], Any]


def evaluate_closure(closure: Closure | None) -> Any:
    """Return the closure's loss, or None without a closure. Gradients are on, although the step itself runs without them."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
