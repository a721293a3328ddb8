"""Sum partial gradients: those of weights that every tensor-parallel rank has, but computes from its own heads or tokens.

A module names such weights in ``partial_parameters``. Their gradients are summed once a step: a sum after every micro-batch
would add again what was summed before.

``trim_storage`` frees the rest of a weight of which a rank keeps a part.
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
    """Mark the gradients of all parameters of a module, or of those with these names, as partial.

    Parameters are marked by name, because fully_shard replaces them.
    """
    if names is None:
        names = [name for name, _ in module.named_parameters(recurse=False)]
    setattr(module, PARTIAL_ATTRIBUTE, (*getattr(module, PARTIAL_ATTRIBUTE, ()), *names))


def sum_partial_gradients(
    model: nn.Module, mesh: Mesh, gradient_of: Callable[[nn.Parameter], torch.Tensor] | None = None
) -> None:
    """Sum the partial gradients after the last backward pass of a step, before gradients are clipped. Every rank calls it.

    A rank whose tokens did not reach a weight has no gradient of it, and counts as zero. ``gradient_of`` returns the gradient
    of a parameter if it is not in ``grad``.
    """
    if mesh.device_mesh is None or mesh.plan.layout.tensor_parallel == 1:
        return
    gradient_of = gradient_of or _local_gradient
    gradients = [gradient_of(parameter) for parameter in partial_parameters(model)]
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    dist.all_reduce(flat, group=mesh.device_mesh.get_group("tensor"))
    for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters that are marked."""
    parameters = []
    for module in model.modules():
        for name in getattr(module, PARTIAL_ATTRIBUTE, ()):
            parameter = PARAMETERS.of(module)[name]
            if parameter is not None and parameter.requires_grad:
                parameters.append(parameter)
    return parameters


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


def trim_storage(parameter: nn.Parameter | None) -> nn.Parameter:
    """Return ``parameter``, or a copy of it if its local part is a view that would keep the memory of the whole weight."""
    assert parameter is not None
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter.to_local().detach()
    if local.untyped_storage().nbytes() <= local.nbytes:
        return parameter
    copy = DTensor.from_local(
        local.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(copy, requires_grad=parameter.requires_grad)
