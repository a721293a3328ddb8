"""Weights that every rank of tensor parallelism has whole, while its gradient is of its own heads or its own tokens alone.

A module names them in ``partial_parameters``. They are summed once a step: a sum after every micro-batch would add up what was
summed before.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from upshift.training.parallel.place import Place

NAMES = "partial_parameters"


def mark_partial(module: nn.Module, names: Iterable[str] | None = None) -> None:
    """All parameters of its own, or those of these names. By name, as fully_shard makes other parameters of them."""
    own = tuple(name for name, _ in module.named_parameters(recurse=False)) if names is None else tuple(names)
    setattr(module, NAMES, (*getattr(module, NAMES, ()), *own))


def sum_partial(gradients: list[torch.Tensor], place: Place) -> None:
    """In place, what this rank has of the gradients of ``partial_parameters``: once a step, before they are clipped."""
    if place.mesh is None or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    dist.all_reduce(flat, group=place.mesh.get_group("tensor"))
    for gradient, summed in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    named = [(module, name) for module in model.modules() for name in getattr(module, NAMES, ())]
    found = [module._parameters[name] for module, name in named]
    return [parameter for parameter in found if parameter is not None and parameter.requires_grad]
