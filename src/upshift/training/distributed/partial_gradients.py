"""Sum the gradients of weights that every rank of tensor parallelism has whole, while each gradient covers only own heads or
tokens.

A module names such weights in ``partial_parameters``. They are summed once a step: a sum after every micro-batch would add up
what was summed before.

Keep memory for a rank's part of a weight alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from upshift.internals.torch_names import PARAMETERS
from upshift.training.distributed.mesh import Mesh

PARTIAL_ATTRIBUTE = "partial_parameters"


def mark_partial(module: nn.Module, names: Iterable[str] | None = None) -> None:
    """Mark all parameters of a module, or those of these names. Marks are by name, because fully_shard replaces the
    parameters."""
    own = tuple(name for name, _ in module.named_parameters(recurse=False)) if names is None else tuple(names)
    setattr(module, PARTIAL_ATTRIBUTE, (*getattr(module, PARTIAL_ATTRIBUTE, ()), *own))


def sum_partial_gradients(
    model: nn.Module, place: Mesh, gradient_of: Callable[[nn.Parameter], torch.Tensor] | None = None
) -> None:
    """Sum the partial gradients after the last backward pass of a step, before gradients are clipped. Every rank calls it.

    A rank without a gradient, because no token of its own reached the weight, counts as zero. ``gradient_of`` returns the
    gradients if they are not in ``grad``.
    """
    if place.mesh is None or place.plan.layout.tensor_parallel == 1:
        return
    gradients = [(gradient_of or _gradient)(parameter) for parameter in partial_parameters(model)]
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    dist.all_reduce(flat, group=place.mesh.get_group("tensor"))
    for gradient, summed in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    named = [(module, name) for module in model.modules() for name in getattr(module, PARTIAL_ATTRIBUTE, ())]
    found = [PARAMETERS.of(module)[name] for module, name in named]
    return [parameter for parameter in found if parameter is not None and parameter.requires_grad]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


def trim_storage(parameter: nn.Parameter | None) -> nn.Parameter:
    """Return ``parameter`` itself, or a copy if its part is a view of the whole weight, which the part would keep."""
    assert parameter is not None
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter.to_local().detach()
    if local.untyped_storage().nbytes() <= local.nbytes:
        return parameter
    part = DTensor.from_local(
        local.clone(), parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
