"""What every optimizer of torch does with the closure that its step may be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Closure = Callable[[], Any]


def evaluate_closure(closure: Closure | None) -> Any:
    """The closure's loss, computed with gradients although the step runs without; None where there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
