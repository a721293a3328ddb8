"""Run ZeRO 1: every rank has all weights and gradients, and updates its rows of each weight.

Gradients are reduced and scattered to the ranks that update them, and updated weights are gathered (Rajbhandari et al. 2020,
section 5). Rows are those that fully_shard would give the rank: ceil(rows / ranks) each, the last ranks fewer or none. Experts
that ranks share are updated where they are, all of each.
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

collectives = COLLECTIVES.get()  # a namespace of torch.ops, which is never missing; its operators are checked (refusals.py)


class ShardedUpdate:
    """A Division (optimizers/on_parts.py) of all trained parameters.

    With ``master_weights`` parts are fp32 copies, and the model is bf16 from here on, except for the sums of its gradients.
    """

    def __init__(self, model: nn.Module, place: Mesh) -> None:
        assert place.mesh is not None
        self.place = place
        self.group = place.mesh.get_group("shard").group_name
        self.ranks = place.mesh["shard"].size()
        self.rank = place.mesh.get_local_rank("shard")
        self.masters = place.plan.layout.master_weights
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        experts = {id(parameter) for module in expert_modules(model, place) for parameter in module.parameters()}
        self._experts = dict.fromkeys(parameter for parameter in self.trained if id(parameter) in experts)
        self._divided = [parameter for parameter in self.trained if id(parameter) not in experts]
        self._parts: dict[Tensor, Tensor] = {parameter: self._own(local_shard(parameter.data)) for parameter in self._divided}
        self._parts |= {parameter: local_shard(parameter.data) for parameter in self._experts}
        self._sums: dict[Tensor, Tensor] = {}  # of gradients, in fp32, where weights are bf16
        self._reduced: dict[Tensor, Tensor] = {}
        if self.masters:
            self._parts = {parameter: part.float().clone() for parameter, part in self._parts.items()}
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
            for parameter in self.trained:
                parameter.register_post_accumulate_grad_hook(self._add)

    def _own(self, whole: Tensor) -> Tensor:
        """Return this rank's rows."""
        begin, end = self._rows_of(whole)
        return _rows(whole)[begin:end]

    def _rows_of(self, whole: Tensor) -> tuple[int, int]:
        count = len(_rows(whole))
        each = -(-count // self.ranks)
        return min(self.rank * each, count), min((self.rank + 1) * each, count)

    def rows(self, parameter: Tensor) -> tuple[int, int] | None:
        part = self._parts[parameter]
        whole = local_shard(parameter.data)
        return None if part.shape == whole.shape else self._rows_of(whole)

    def _add(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = local_shard(parameter.grad)
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient.float()
        parameter.grad = None

    def part(self, parameter: Tensor) -> Tensor:
        return self._parts[parameter]

    def whole_gradient(self, parameter: Tensor) -> Tensor:
        """Return this rank's own gradient of the whole parameter."""
        if self.masters:
            if parameter not in self._sums:
                self._sums[parameter] = torch.zeros_like(local_shard(parameter.data), dtype=torch.float32)
            return self._sums[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return local_shard(parameter.grad)

    def reduce(self) -> None:
        """Reduce gradients bucket by bucket, and drop the whole ones."""
        wholes = {parameter: self.whole_gradient(parameter) for parameter in self.trained}
        self.forget()
        for parameter in self.trained:
            parameter.grad = None
        experts = [wholes.pop(parameter) for parameter in self._experts]
        if self.place.experts is not None:
            group = self.place.experts.get_group("replicas")
            sum_in_buckets(experts, lambda flat: dist.all_reduce(flat, group=group))
        self._reduced |= zip(self._experts, experts, strict=True)
        for bucket in make_buckets(wholes.items()):
            sizes = [self._padded(whole) for _, whole in bucket]
            sent = torch.empty(self.ranks, sum(sizes), dtype=bucket[0][1].dtype, device=bucket[0][1].device)
            CHUNK_CAT.get()([_rows(whole) for _, whole in bucket], 0, self.ranks, out=sent)
            received = collectives.wait_tensor(collectives.reduce_scatter_tensor(sent.view(-1), "sum", self.ranks, self.group))
            all_reduce_over(received, self.place, ("replicas",))
            for (parameter, _), piece in zip(bucket, received.split(sizes), strict=True):
                part = self._parts[parameter]
                self._reduced[parameter] = piece[: part.numel()].view_as(part)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return self._reduced.get(parameter)

    def along(self, parameter: Tensor) -> ShardedDimensions:
        assert self.place.mesh is not None
        own = sharded_dimensions(parameter)
        return own if parameter in self._experts else (*own, (self.place.mesh["shard"], 0))

    def publish(self, parts: dict[Tensor, Tensor]) -> None:
        """Copy the updated parts into the weights of all ranks."""
        for parameter in self._experts:
            if self.masters:
                local_shard(parameter.data).copy_(parts[parameter])
        for bucket in make_buckets((parameter, local_shard(parameter.data)) for parameter in self._divided):
            sizes = [self._padded(whole) for _, whole in bucket]
            sent = torch.zeros(sum(sizes), dtype=bucket[0][1].dtype, device=bucket[0][1].device)
            for (parameter, _), piece in zip(bucket, sent.split(sizes), strict=True):
                piece[: parts[parameter].numel()].copy_(parts[parameter].reshape(-1))
            received = collectives.wait_tensor(collectives.all_gather_into_tensor(sent, self.ranks, self.group))
            for (_, whole), pieces in zip(bucket, received.view(self.ranks, -1).split(sizes, dim=1), strict=True):
                whole.copy_(pieces.reshape(-1)[: whole.numel()].view_as(whole))

    def forget(self) -> None:
        self._reduced.clear()
        self._sums.clear()

    def _padded(self, whole: Tensor) -> int:
        """Return the elements of a rank's part if all ranks had as many rows."""
        rows = _rows(whole)
        return -(-len(rows) // self.ranks) * rows[:1].numel()


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim else tensor.view(1)
