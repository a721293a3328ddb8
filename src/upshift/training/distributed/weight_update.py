"""Find the parts of the model's weights that this rank updates, and take gradients from the last backward pass to clipping."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from upshift.internals.torch_names import SCALER_STATES
from upshift.training.distributed.gradients import (
    ShardedDimensions,
    clip_gradients,
    local_shard,
    sharded_dimensions,
    sum_gradients,
    sum_tied_gradients,
    tied_copies,
    total_norm,
)
from upshift.training.distributed.mesh import Mesh
from upshift.training.distributed.partial_gradients import sum_partial_gradients
from upshift.training.distributed.zero1 import ShardedUpdate
from upshift.training.optimizers.sharded import ShardedOptimizer, UpdateSharding


class ShardedWeights:
    """A Division (optimizers/on_parts.py) of weights that are DTensors, or whole on every rank: each rank updates what it has."""

    def part(self, parameter: Tensor) -> Tensor:
        return local_shard(parameter.detach())

    def rows(self, parameter: Tensor) -> None:
        return None

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return None if parameter.grad is None else local_shard(parameter.grad)

    def along(self, parameter: Tensor) -> ShardedDimensions:
        return sharded_dimensions(parameter)

    def publish(self, parts: dict[Tensor, Tensor]) -> None:
        pass  # it is the same memory

    def forget(self) -> None:
        pass


def make_update_sharding(model: nn.Module, place: Mesh) -> UpdateSharding | None:
    """Return the division of the update, or None if each rank updates all that it has, as one process does."""
    if place.plan.layout.fully_shard == "optimizer":
        return ShardedUpdate(model, place)
    return ShardedWeights() if any(isinstance(parameter, DTensor) for parameter in model.parameters()) else None


def sum_gradients_over_job(optimizer: torch.optim.Optimizer, model: nn.Module, place: Mesh, *, summed: bool) -> None:
    """Give the optimizer's parameters the gradients of the whole job.

    ``summed`` says that they are summed already over the ranks with the same weights.
    """
    division = optimizer.division if isinstance(optimizer, ShardedOptimizer) else None

    def gradient_of(parameter: Tensor) -> Tensor | None:
        return parameter.grad if division is None else division.gradient(parameter)

    if isinstance(division, ShardedUpdate):
        sum_partial_gradients(model, place, division.whole_gradient)
        division.reduce()
    else:
        if not summed and place.mesh is not None:
            sum_gradients(model, place)
        sum_partial_gradients(model, place)
    sum_tied_gradients(model, gradient_of)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.take_gradients()


def clip_all_gradients(optimizer: torch.optim.Optimizer, model: nn.Module, place: Mesh, max_norm: float) -> float:
    """Clip the gradients. Return the norm before clipping."""
    if not isinstance(optimizer, ShardedOptimizer) and place.plan.layout.pipeline_parallel == 1:
        return float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    copies = tied_copies(model)
    known = list(_gradients(optimizer, model))
    own = [(gradient, along) for gradient, along, parameter in known if parameter not in copies]
    return clip_gradients([gradient for gradient, _, _ in known], total_norm(own, place), max_norm)


def _gradients(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[Tensor, ShardedDimensions, Tensor]]:
    """Yield this rank's part of each gradient, the ranks that divide it, and its parameter."""
    if isinstance(optimizer, ShardedOptimizer):
        for part, parameter in optimizer.parts.items():
            if part.grad is not None:
                yield part.grad, optimizer.division.along(parameter), parameter
    else:
        for parameter in model.parameters():
            if parameter.grad is not None:
                yield parameter.grad, (), parameter


def agree_on_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, place: Mesh) -> None:
    """Skip the update on all ranks if one rank's part overflowed, after ``unscale_`` (as torch's ShardedGradScaler does)."""
    if place.mesh is not None and scaler.is_enabled():
        for found in SCALER_STATES.of(scaler)[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
