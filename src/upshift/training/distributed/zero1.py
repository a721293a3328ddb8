"""Run ZeRO 1: every rank has all weights and gradients, and updates its rows of each weight.

Gradients are reduced and scattered to the ranks that update them, and updated weights are gathered (Rajbhandari et al. 2020,
section 5). Each rank has the rows that fully_shard would give it: ceil(rows / ranks), the last ranks fewer or none. An expert
that ranks divide among them is updated as a whole on its rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from upshift.internals.torch_names import CHUNK_CAT, COLLECTIVES
from upshift.training.distributed.expert_parallel import expert_modules
from upshift.training.distributed.gradients import (
    ShardedDimensions,
    all_reduce_over,
    local_shard,
    make_buckets,
    sharded_dimensions,
    sum_in_buckets,
)
from upshift.training.distributed.mesh import Mesh

collectives = COLLECTIVES.get()  # a namespace of torch.ops, which is never missing; parallelize.py checks its operators


class ShardedUpdate:
    """The UpdateSharding of all trained parameters.

    With ``master_weights`` the shards are fp32 copies. The model is then bf16, except for the sums of its gradients.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        assert mesh.device_mesh is not None
        self.mesh = mesh
        self.group = mesh.device_mesh.get_group("shard").group_name
        self.ranks = mesh.device_mesh["shard"].size()
        self.rank = mesh.device_mesh.get_local_rank("shard")
        self.has_masters = mesh.plan.layout.master_weights
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        experts = {id(parameter) for module in expert_modules(model, mesh) for parameter in module.parameters()}
        self._experts = dict.fromkeys(parameter for parameter in self.trained if id(parameter) in experts)
        self._divided = [parameter for parameter in self.trained if id(parameter) not in experts]
        self._shards: dict[Tensor, Tensor] = {}
        for parameter in self._divided:
            # Detached, a shard shares the version of its weight: a copy on the host is made again if the weight was loaded.
            self._shards[parameter] = self._own_rows(local_shard(parameter.detach()))
        for parameter in self._experts:
            self._shards[parameter] = local_shard(parameter.detach())
        self._sums: dict[Tensor, Tensor] = {}  # sums of gradients in fp32, if the weights are bf16
        self._reduced: dict[Tensor, Tensor] = {}
        if self.has_masters:
            self._shards = {parameter: shard.float().clone() for parameter, shard in self._shards.items()}
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
            for parameter in self.trained:
                parameter.register_post_accumulate_grad_hook(self._add_gradient)

    def _own_rows(self, whole: Tensor) -> Tensor:
        """Return this rank's rows."""
        begin, end = self._row_range(whole)
        return _as_rows(whole)[begin:end]

    def _row_range(self, whole: Tensor) -> tuple[int, int]:
        count = len(_as_rows(whole))
        rows_per_rank = -(-count // self.ranks)
        return min(self.rank * rows_per_rank, count), min((self.rank + 1) * rows_per_rank, count)

    def rows(self, parameter: Tensor) -> tuple[int, int] | None:
        shard = self._shards[parameter]
        whole = local_shard(parameter.data)
        return None if shard.shape == whole.shape else self._row_range(whole)

    def _add_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = local_shard(parameter.grad)
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient.float()
        parameter.grad = None

    def shard(self, parameter: Tensor) -> Tensor:
        return self._shards[parameter]

    def whole_gradient(self, parameter: Tensor) -> Tensor:
        """Return this rank's own gradient of the whole parameter."""
        if self.has_masters:
            if parameter not in self._sums:
                self._sums[parameter] = torch.zeros_like(local_shard(parameter.data), dtype=torch.float32)
            return self._sums[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return local_shard(parameter.grad)

    def is_used(self, parameter: Tensor) -> bool:
        return parameter in self._sums if self.has_masters else parameter.grad is not None

    def drop_gradient(self, parameter: Tensor) -> None:
        self._reduced.pop(parameter, None)

    def reduce(self) -> None:
        """Reduce gradients bucket by bucket, and drop the unreduced ones."""
        wholes = {parameter: self.whole_gradient(parameter) for parameter in self.trained}
        self.forget()
        for parameter in self.trained:
            parameter.grad = None
        experts = [wholes.pop(parameter) for parameter in self._experts]
        if self.mesh.expert_mesh is not None:
            group = self.mesh.expert_mesh.get_group("replicas")
            sum_in_buckets(experts, lambda flat: dist.all_reduce(flat, group=group))
        self._reduced |= zip(self._experts, experts, strict=True)
        for bucket in make_buckets(wholes.items()):
            sizes = [self._padded_size(whole) for _, whole in bucket]
            sent = torch.empty(self.ranks, sum(sizes), dtype=bucket[0][1].dtype, device=bucket[0][1].device)
            CHUNK_CAT.get()([_as_rows(whole) for _, whole in bucket], 0, self.ranks, out=sent)
            received = collectives.wait_tensor(collectives.reduce_scatter_tensor(sent.view(-1), "sum", self.ranks, self.group))
            all_reduce_over(received, self.mesh, ("replicas",))
            for (parameter, _), piece in zip(bucket, received.split(sizes), strict=True):
                shard = self._shards[parameter]
                self._reduced[parameter] = piece[: shard.numel()].view_as(shard)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return self._reduced.get(parameter)

    def sharded_along(self, parameter: Tensor) -> ShardedDimensions:
        assert self.mesh.device_mesh is not None
        dimensions = sharded_dimensions(parameter)
        if parameter in self._experts:
            return dimensions
        return (*dimensions, (self.mesh.device_mesh["shard"], 0))

    def publish(self, shards: dict[Tensor, Tensor]) -> None:
        """Copy the updated shards into the weights of all ranks."""
        for parameter in self._experts:
            if self.has_masters:
                local_shard(parameter.data).copy_(shards[parameter])
        for bucket in make_buckets((parameter, local_shard(parameter.data)) for parameter in self._divided):
            sizes = [self._padded_size(whole) for _, whole in bucket]
            sent = torch.zeros(sum(sizes), dtype=bucket[0][1].dtype, device=bucket[0][1].device)
            for (parameter, _), piece in zip(bucket, sent.split(sizes), strict=True):
                piece[: shards[parameter].numel()].copy_(shards[parameter].reshape(-1))
            received = collectives.wait_tensor(collectives.all_gather_into_tensor(sent, self.ranks, self.group))
            for (_, whole), pieces in zip(bucket, received.view(self.ranks, -1).split(sizes, dim=1), strict=True):
                whole.copy_(pieces.reshape(-1)[: whole.numel()].view_as(whole))

    def forget(self) -> None:
        self._reduced.clear()
        self._sums.clear()

    def _padded_size(self, whole: Tensor) -> int:
        """Return the number of elements of a shard, if all ranks had equally many rows."""
        rows = _as_rows(whole)
        return -(-len(rows) // self.ranks) * rows[:1].numel()


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a number as one row, and any other tensor as it is."""
    return tensor if tensor.ndim else tensor.view(1)
