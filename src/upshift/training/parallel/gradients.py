"""Sum the ranks' gradients between the last backward pass and the update, compute their norm, and clip them.

Each rank has its share of the gradient of the global batch's mean loss, so sums need no division. fully_shard has summed its
own gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from upshift.internals.torch_names import norms
from upshift.training.parallel.experts import expert_modules
from upshift.training.parallel.place import Place

BUCKET_ELEMENTS = 2**23  # gradients summed over ranks in flat buckets of this size
SAME_WEIGHTS = ("replicas", "shard")  # dimensions of the mesh: ranks along them have gradients of the same weights
Key = TypeVar("Key")
Spread = tuple[tuple[DeviceMesh, int], ...]  # dimensions of meshes along which ranks have different parts of a tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_over(tensor: torch.Tensor, place: Place, names: Iterable[str]) -> None:
    """Sum a tensor in place over dimensions of the mesh."""
    if place.mesh is None:
        return
    for name in names:
        if place.mesh[name].size() > 1:
            dist.all_reduce(tensor, group=place.mesh.get_group(name))


def sum_loss(total: torch.Tensor, place: Place) -> None:
    """Sum the loss of the whole job in place from each rank's share.

    Tensor-parallel ranks have the same share. Stages without a loss have zero.
    """
    sum_over(total, place, ("pipeline", *SAME_WEIGHTS))


def born(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's part of every gradient, zeros if this rank's micro-batches did not use a weight."""
    found = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append(local(parameter.grad))
    return found


def sum_gradients(model: nn.Module, place: Place) -> None:
    """Sum gradients over the ranks that have the same weights.

    An expert's gradient comes already from the tokens of all ranks that share experts.
    """
    experts = [parameter for module in expert_modules(model, place) for parameter in module.parameters()]
    apart = set(map(id, experts))
    shared = born(parameter for parameter in model.parameters() if id(parameter) not in apart)
    sum_flat(shared, lambda flat: sum_over(flat, place, SAME_WEIGHTS))
    if place.experts is not None:
        group = place.experts.get_group("replicas")
        sum_flat(born(experts), lambda flat: dist.all_reduce(flat, group=group))


def sum_flat(gradients: list[torch.Tensor], sum_up: Callable[[torch.Tensor], object]) -> None:
    for bucket in buckets((gradient, gradient) for gradient in gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient, _ in bucket])
        sum_up(flat)
        for (gradient, _), summed in zip(bucket, flat.split([g.numel() for g, _ in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def buckets(
    tensors: Iterable[tuple[Key, torch.Tensor]], *, elements: int = BUCKET_ELEMENTS
) -> Iterator[list[tuple[Key, torch.Tensor]]]:
    """Yield buckets of tensors, each of one dtype."""
    opened: dict[torch.dtype, list[tuple[Key, torch.Tensor]]] = defaultdict(list)
    for key, tensor in tensors:
        bucket = opened[tensor.dtype]
        bucket.append((key, tensor))
        if sum(one.numel() for _, one in bucket) >= elements:
            yield opened.pop(tensor.dtype)
    yield from opened.values()


def clip(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> float:
    """Scale this rank's parts of the gradients so that ``norm``, over all ranks' parts, is at most ``max_norm``. Return the
    norm before."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's clip_grad_norm_ does
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return float(norm)


def total_norm(gradients: Iterable[tuple[torch.Tensor, Spread]], place: Place) -> torch.Tensor:
    """Return the norm of all gradients. Parts are summed over the ranks that divide a tensor; a tensor that all ranks have
    counts once."""
    parts: dict[Spread, list[torch.Tensor]] = defaultdict(list)
    for gradient, along in gradients:
        parts[along].append(gradient)
    total = torch.zeros((), device=place.plan.device)
    for along, found in parts.items():
        squares = torch.stack([norm.float().square() for norm in norms(found)]).sum()
        for mesh, dimension in along:
            dist.all_reduce(squares, group=mesh.get_group(dimension))
        total += squares
    sum_over(total, place, ("pipeline",))
    return total.sqrt()


def spread(tensor: torch.Tensor) -> Spread:
    """Return the mesh dimensions along which ranks have different parts of a parameter or a gradient."""
    if not isinstance(tensor, DTensor):
        return ()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"every rank has a summand, none a part: {tensor.placements}")
    mesh = tensor.device_mesh
    return tuple((mesh, number) for number, one in enumerate(tensor.placements) if not isinstance(one, Replicate))
