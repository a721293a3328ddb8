"""Evaluate the closure that an optimizer's step may be given, as every optimizer of torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Closure = Callable[[], Any]


def evaluate_closure(closure: Closure | None) -> Any:
    """Return the closure's loss, computed with gradients although the step runs without. Return None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
