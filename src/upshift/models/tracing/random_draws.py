# needs torch
"""Fix the random numbers that a model draws one at a time, such as those of LayerDrop (Fan et al. 2020, arXiv:1909.11556).

A model with LayerDrop draws one number for each layer in training, and skips the layer if the number is below a probability.
The number comes from torch, Python or numpy. A fake tensor has no value to compare, and a real draw would make a trace random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

KEEPS_LAYERS = 1.0  # a draw that is below no probability
SKIPS_LAYERS = 0.0  # a draw that is below every probability
GENERATORS: tuple[tuple[Any, str], ...] = (
    (random, "random"),
    (random, "uniform"),
    (np.random, "random"),
    (np.random, "rand"),
    (np.random, "uniform"),
)


class _TorchDraws(TorchFunctionMode):
    """Replace the results of ``torch.rand`` that have no dimension. Their new values can be read under a fake mode, too."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.rand and result.ndim == 0:
            return torch.tensor(self._value, device="cpu")
        return result


@contextmanager
def lone_draws(value: float) -> Iterator[None]:
    """Give every number that is drawn alone this value, while the context is open. Arrays are drawn as usual."""
    with ExitStack() as patches:
        for module, name in GENERATORS:
            draw = getattr(module, name)

            def fixed(*args: Any, _draw: Any = draw, **kwargs: Any) -> Any:
                drawn = _draw(*args, **kwargs)
                return value if isinstance(drawn, float) else drawn

            patches.enter_context(mock.patch.object(module, name, fixed))
        patches.enter_context(_TorchDraws(value))
        yield
