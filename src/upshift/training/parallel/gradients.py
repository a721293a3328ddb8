"""What ranks do with gradients between the last backward pass and the update: their sum, their norm, clipping.

Each rank has its share of the gradient of the global batch's mean loss, so sums need no division. fully_shard has summed its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from upshift.training.parallel.place import Place

BUCKET_ELEMENTS = 2**23  # gradients summed over ranks in flat buckets of this size
SAME_WEIGHTS = ("replicas", "shard")  # dimensions of the mesh: ranks along them have gradients of the same weights
Spread = tuple[tuple[DeviceMesh, int], ...]  # dimensions of meshes along which ranks have different parts of a tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_over(tensor: torch.Tensor, place: Place, names: Iterable[str]) -> None:
    """In place, over dimensions of the mesh."""
    if place.mesh is None:
        return
    for name in names:
        if place.mesh[name].size() > 1:
            dist.all_reduce(tensor, group=place.mesh.get_group(name))


def sum_loss(total: torch.Tensor, place: Place) -> None:
    """Of the whole job, from each rank's share. Tensor-parallel ranks have the same one; stages without a loss have zero."""
    sum_over(total, place, ("pipeline", *SAME_WEIGHTS))


def born(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's part of every gradient, zeros where this rank's micro-batches did not use a weight."""
    found = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append(local(parameter.grad))
    return found


def sum_gradients(model: nn.Module, place: Place) -> None:
    """Over the ranks that have the same weights, in flat buckets."""
    for bucket in buckets(born(model.parameters())):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        sum_over(flat, place, SAME_WEIGHTS)
        for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Of one dtype each."""
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        bucket = open_buckets[tensor.dtype]
        bucket.append(tensor)
        if sum(one.numel() for one in bucket) >= BUCKET_ELEMENTS:
            yield open_buckets.pop(tensor.dtype)
    yield from open_buckets.values()


def clip(parameters: list[nn.Parameter], place: Place, max_norm: float) -> float:
    """Scales the gradients to a norm of at most ``max_norm``; returns what it was, of all ranks' parts together."""
    if place.mesh is None or not (place.plan.layout.gathers or _is_divided(parameters, place)):
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    norm = total_norm(parameters, place)
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # as clip_grad_norm_ does
    return float(norm)


def _is_divided(parameters: list[nn.Parameter], place: Place) -> bool:
    return place.plan.layout.pipeline_parallel > 1 or any(isinstance(parameter, DTensor) for parameter in parameters)


def total_norm(parameters: Iterable[nn.Parameter], place: Place) -> torch.Tensor:
    """Of all gradients of the job: what ranks have in parts is summed over them, what they have whole counts once."""
    parts: dict[Spread, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            parts[spread(parameter.grad)].append(local(parameter.grad))
    total = torch.zeros((), device=place.plan.device)
    for along, gradients in parts.items():
        squares = torch.stack([norm.square() for norm in torch._foreach_norm(gradients)]).float().sum()
        for mesh, dimension in along:
            dist.all_reduce(squares, group=mesh.get_group(dimension))
        total += squares
    sum_over(total, place, ("pipeline",))
    return total.sqrt()


def spread(tensor: torch.Tensor) -> Spread:
    if not isinstance(tensor, DTensor):
        return ()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise RuntimeError(f"a gradient is not summed yet: {tensor.placements}")
    mesh = tensor.device_mesh
    return tuple((mesh, number) for number, one in enumerate(tensor.placements) if not isinstance(one, Replicate))
