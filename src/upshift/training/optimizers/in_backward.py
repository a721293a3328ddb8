"""Update each parameter in the backward pass as soon as its gradient is whole, and free the gradient at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


def update_in_backward(optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
    """Make ``backward()`` update every parameter of ``optimizer``, from now on and until the returned handles are removed.

    Groups and state stay those of one optimizer. A parameter must get its whole gradient in one backward pass.
    """
    return [
        parameter.register_post_accumulate_grad_hook(_updater(optimizer, number))
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]


def _updater(optimizer: torch.optim.Optimizer, number: int) -> Callable[[Tensor], None]:
    def update(parameter: Tensor) -> None:
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[number], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    return update
