"""Choose the shards of the weights that this rank updates. Sum and clip gradients between the backward pass and the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from upshift.internals.torch_names import SCALER_STATES
from upshift.planning.layout import Layout
from upshift.training.distributed.fsdp import UsedWeights
from upshift.training.distributed.gradients import (
    REPLICA_DIMENSIONS,
    ShardedDimensions,
    all_reduce_over,
    clip_gradients,
    has_gradient,
    local_shard,
    sharded_dimensions,
    sum_gradients,
    sum_tied_gradients,
    tied_copies,
    total_norm,
    unused_parameters,
)
from upshift.training.distributed.mesh import Mesh
from upshift.training.distributed.partial_gradients import sum_partial_gradients
from upshift.training.distributed.zero1 import ShardedUpdate
from upshift.training.optimizers.sharded import ShardedOptimizer, UpdateSharding

IsUsed = Callable[[nn.Parameter], bool]


class ShardedWeights:
    """The UpdateSharding of weights that are DTensors, or whole on every rank: each rank updates what it has.

    With ``zero_bubble`` every weight counts as used, because its backward pass passes by the hooks that would tell.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._used = UsedWeights(model) if layout.gathers else None
        self._knows_uses = not (layout.gathers and layout.splits_backward)

    def shard(self, parameter: Tensor) -> Tensor:
        return local_shard(parameter.detach())

    def rows(self, parameter: Tensor) -> None:
        return None

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return None if parameter.grad is None else local_shard(parameter.grad)

    def is_used(self, parameter: Tensor) -> bool:
        if not self._knows_uses:
            return True
        return parameter.grad is not None if self._used is None else parameter in self._used

    def drop_gradient(self, parameter: Tensor) -> None:
        parameter.grad = None

    def sharded_along(self, parameter: Tensor) -> ShardedDimensions:
        return sharded_dimensions(parameter)

    def publish(self, shards: dict[Tensor, Tensor]) -> None:
        pass  # shards use the memory of the weights

    def forget(self) -> None:
        if self._used is not None:
            self._used.clear()


def make_update_sharding(model: nn.Module, mesh: Mesh) -> UpdateSharding | None:
    """Return how ranks divide the update, or None if each rank updates whole parameters, as one process does."""
    if mesh.plan.layout.fully_shard == "optimizer":
        return ShardedUpdate(model, mesh)
    has_shards = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return ShardedWeights(model, mesh.plan.layout) if has_shards else None


def sum_gradients_over_job(
    optimizer: torch.optim.Optimizer, model: nn.Module, mesh: Mesh, *, summed: bool, is_used: IsUsed | None = None
) -> None:
    """Set the gradients of the optimizer's parameters to those of the whole job.

    ``summed`` says that they are already summed over the ranks with the same weights. ``is_used`` says whether this rank used a
    parameter in the step, if its gradient does not tell. A weight that no rank used has no gradient afterwards, so that the
    optimizer leaves it alone, as in one process.
    """
    sharding = optimizer.sharding if isinstance(optimizer, ShardedOptimizer) else None

    def gradient_of(parameter: Tensor) -> Tensor | None:
        return parameter.grad if sharding is None else sharding.gradient(parameter)

    unused = find_unused(optimizer, model, mesh, is_used)
    if isinstance(sharding, ShardedUpdate):
        sum_partial_gradients(model, mesh, sharding.whole_gradient)
        sharding.reduce()
    else:
        if not summed and mesh.device_mesh is not None:
            sum_gradients(model, mesh)
        sum_partial_gradients(model, mesh)
    sum_tied_gradients(model, gradient_of)
    drop_gradients(optimizer, unused)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.take_gradients()


def find_unused(
    optimizer: torch.optim.Optimizer, model: nn.Module, mesh: Mesh, is_used: IsUsed | None = None
) -> list[nn.Parameter]:
    """Return the trained parameters that no rank of this pipeline stage used in this step.

    Every rank calls it, before gradients are summed.
    """
    if mesh.device_mesh is None:
        return []
    if is_used is None:
        is_used = optimizer.sharding.is_used if isinstance(optimizer, ShardedOptimizer) else has_gradient
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def largest(flags: Tensor) -> None:
        all_reduce_over(flags, mesh, (*REPLICA_DIMENSIONS, "tensor"), operation=dist.ReduceOp.MAX)

    return unused_parameters(trained, is_used, largest, mesh.plan.device)


def drop_gradients(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Drop the gradients of these parameters, so that the optimizer leaves them alone."""
    for parameter in parameters:
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.sharding.drop_gradient(parameter)
        else:
            parameter.grad = None


def clip_all_gradients(optimizer: torch.optim.Optimizer, model: nn.Module, mesh: Mesh, max_norm: float) -> Tensor:
    """Clip the gradients. Return the norm before clipping, on the plan's device: reading it waits for a GPU."""
    if not isinstance(optimizer, ShardedOptimizer) and mesh.plan.layout.pipeline_parallel == 1:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    copies = tied_copies(model)
    gradients = []
    counted = []  # a tied weight counts once, in the first stage
    for gradient, dimensions, parameter in _local_gradients(optimizer, model):
        gradients.append(gradient)
        if parameter not in copies:
            counted.append((gradient, dimensions))
    norm = total_norm(counted, mesh)
    clip_gradients(gradients, norm, max_norm)
    return norm


def _local_gradients(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[Tensor, ShardedDimensions, Tensor]]:
    """Yield this rank's part of each gradient, the mesh dimensions that divide it, and its parameter."""
    if isinstance(optimizer, ShardedOptimizer):
        for shard, parameter in optimizer.shards.items():
            if shard.grad is not None:
                yield shard.grad, optimizer.sharding.sharded_along(parameter), parameter
    else:
        for parameter in model.parameters():
            if parameter.grad is not None:
                yield parameter.grad, (), parameter


def agree_on_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Skip the update on all ranks if a gradient overflowed on one of them. Call it after ``unscale_``.

    torch's ShardedGradScaler does the same.
    """
    if mesh.device_mesh is not None and scaler.is_enabled():
        for found_inf in SCALER_STATES.of(scaler)[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
