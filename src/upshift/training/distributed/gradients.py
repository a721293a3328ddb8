"""Sum the ranks' gradients between the last backward pass and the update, compute their norm, and clip them.

Each rank has its share of the gradient of the global batch's mean loss, so sums need no division. fully_shard has summed its
own gradients.

Sum gradients over plain data-parallel ranks on devices while the backward pass makes those of earlier layers.

Gradients live in flat buckets, the last layers first. Each bucket is summed when it is whole (Li et al. 2020, PyTorch
Distributed, section 3.2.3). On CPUs the sum waits for the end (gradients.py): the cores that would do it compute.

Keep weights equal that the first and the last pipeline stage both have, such as an embedding that is the head too.

Both stages get the same gradient, the sum of the two, so both weights stay the same. In the norm of all gradients it counts
once. An update that rounds at random draws other numbers in each stage, so the last stage then takes the first one's weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from upshift.internals.torch_names import norms
from upshift.planning.plan import Plan
from upshift.training.distributed.expert_parallel import expert_modules
from upshift.training.distributed.mesh import Mesh, OomAgreement
from upshift.training.distributed.pipeline_stage import Stage, stage_modules
from upshift.training.out_of_memory import halve, is_out_of_memory

BUCKET_ELEMENTS = 2**23  # gradients summed over ranks in flat buckets of this size
REPLICA_DIMENSIONS = ("replicas", "shard")  # dimensions of the mesh: ranks along them have gradients of the same weights
Key = TypeVar("Key")
ShardedDimensions = tuple[tuple[DeviceMesh, int], ...]  # dimensions of meshes along which ranks have different parts of a tensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_reduce_over(tensor: torch.Tensor, mesh: Mesh, names: Iterable[str]) -> None:
    """Sum a tensor in place over dimensions of the mesh."""
    if mesh.device_mesh is None:
        return
    for name in names:
        if mesh.device_mesh[name].size() > 1:
            dist.all_reduce(tensor, group=mesh.device_mesh.get_group(name))


def sum_loss(total: torch.Tensor, mesh: Mesh) -> None:
    """Sum the loss of the whole job in place from each rank's share.

    Tensor-parallel ranks have the same share. Stages without a loss have zero.
    """
    all_reduce_over(total, mesh, ("pipeline", *REPLICA_DIMENSIONS))


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's part of every gradient, zeros if this rank's micro-batches did not use a weight."""
    found = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append(local_shard(parameter.grad))
    return found


def sum_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Sum gradients over the ranks that have the same weights.

    An expert's gradient comes already from the tokens of all ranks that share experts.
    """
    experts = [parameter for module in expert_modules(model, mesh) for parameter in module.parameters()]
    apart = set(map(id, experts))
    shared = local_gradients(parameter for parameter in model.parameters() if id(parameter) not in apart)
    sum_in_buckets(shared, lambda flat: all_reduce_over(flat, mesh, REPLICA_DIMENSIONS))
    if mesh.expert_mesh is not None:
        group = mesh.expert_mesh.get_group("replicas")
        sum_in_buckets(local_gradients(experts), lambda flat: dist.all_reduce(flat, group=group))


def sum_in_buckets(gradients: list[torch.Tensor], sum_up: Callable[[torch.Tensor], object]) -> None:
    for bucket in make_buckets((gradient, gradient) for gradient in gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient, _ in bucket])
        sum_up(flat)
        for (gradient, _), summed in zip(bucket, flat.split([g.numel() for g, _ in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def make_buckets(
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


def clip_gradients(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> float:
    """Scale this rank's parts of the gradients so that ``norm``, over all ranks' parts, is at most ``max_norm``. Return the
    norm before."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's clip_grad_norm_ does
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return float(norm)


def total_norm(gradients: Iterable[tuple[torch.Tensor, ShardedDimensions]], mesh: Mesh) -> torch.Tensor:
    """Return the norm of all gradients. Parts are summed over the ranks that divide a tensor; a tensor that all ranks have
    counts once."""
    parts: dict[ShardedDimensions, list[torch.Tensor]] = defaultdict(list)
    for gradient, along in gradients:
        parts[along].append(gradient)
    total = torch.zeros((), device=mesh.plan.device)
    for along, found in parts.items():
        squares = torch.stack([norm.float().square() for norm in norms(found)]).sum()
        for device_mesh, dimension in along:
            dist.all_reduce(squares, group=device_mesh.get_group(dimension))
        total += squares
    all_reduce_over(total, mesh, ("pipeline",))
    return total.sqrt()


def sharded_dimensions(tensor: torch.Tensor) -> ShardedDimensions:
    """Return the mesh dimensions along which ranks have different parts of a parameter or a gradient."""
    if not isinstance(tensor, DTensor):
        return ()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"every rank has a summand, none a part: {tensor.placements}")
    device_mesh = tensor.device_mesh
    return tuple((device_mesh, number) for number, one in enumerate(tensor.placements) if not isinstance(one, Replicate))


OVERLAPPED_BUCKET_ELEMENTS = 25 * 2**18  # 25 MiB in fp32, as torch's DistributedDataParallel has them


def can_overlap(plan: Plan) -> bool:
    layout = plan.layout
    plain = layout.fully_shard == "no" and not layout.exchanges
    return plan.device == "cuda" and layout.overlap and plain and plan.num_processes > 1


class OverlappedSums:
    """A step with overlapped sums. ``run`` and ``agree`` work as in KeepPace.

    A rank that runs out of memory while others sum takes part with the gradients it has, and all ranks do the step again.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, *, on_failure: Callable[[], None], halve: Callable[[Any], object] = halve
    ) -> None:
        assert mesh.device_mesh is not None
        self.mesh = mesh
        self.group = mesh.device_mesh.get_group("replicas")
        self.agreement = OomAgreement(mesh, on_failure=on_failure, halve=halve)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = make_buckets(((parameter, parameter) for parameter in reversed(trained)), elements=OVERLAPPED_BUCKET_ELEMENTS)
        self._buckets = [[parameter for parameter, _ in bucket] for bucket in found]
        self._flat: list[torch.Tensor] = []
        self.summed = False  # the gradients are those of all ranks
        self._missing: list[int] | None = None  # gradients, of each bucket, in the last backward pass
        self._works: list[Any] = []
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._born, number))

    def run(self, micro_batch: Any, compute: Callable[[Any], torch.Tensor], *, last: bool) -> torch.Tensor:
        if self._buckets[0][0].grad is None:
            self._make_gradients()
        if not last:
            return compute(micro_batch)
        self._missing = [len(bucket) for bucket in self._buckets]
        share = torch.zeros((), device=self.mesh.plan.device)
        try:
            share = compute(micro_batch)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.agreement.record_out_of_memory(error, micro_batch)
        self._missing = [0] * len(self._buckets)  # a weight without a gradient counts as zero
        self._send()
        for work in self._works:
            work.wait()
        self._missing = None
        self._works = []
        self.summed = True
        return share

    def agree(self) -> None:
        self.agreement.agree()

    def forget(self) -> None:
        """Forget the buckets together with the gradients, once these are used or dropped."""
        self._flat = []
        self.summed = False

    def _make_gradients(self) -> None:
        self.forget()
        for bucket in self._buckets:
            flat = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
            self._flat.append(flat)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)

    def _born(self, number: int, parameter: torch.Tensor) -> None:
        if self._missing is not None:
            self._missing[number] -= 1
            self._send()

    def _send(self) -> None:
        """Start the sums of whole buckets, in the same order on all ranks."""
        assert self._missing is not None
        while len(self._works) < len(self._flat) and not self._missing[len(self._works)]:
            self._works.append(dist.all_reduce(self._flat[len(self._works)], group=self.group, async_op=True))


def tied_copies(model: nn.Module) -> set[nn.Parameter]:
    """Return weights of the last stage that the first has too."""
    return {weight for stage, weight in _tied_weights(model) if stage.is_last}


def sum_tied_gradients(model: nn.Module, gradient_of: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """Sum each gradient from ``gradient_of`` in place between the first stage and the last: this rank's part of it."""
    for stage, weight in _tied_weights(model):
        own = gradient_of(weight)
        if own is None or not own.numel():
            continue
        peer = _peer(stage)
        sent = own.contiguous()
        received = torch.empty_like(own, memory_format=torch.contiguous_format)
        exchanged = [dist.P2POp(dist.isend, sent, peer, stage.group), dist.P2POp(dist.irecv, received, peer, stage.group)]
        for work in dist.batch_isend_irecv(exchanged):
            work.wait()
        own.add_(received)


@torch.no_grad()
def copy_tied_weights(model: nn.Module) -> None:
    """Copy the first stage's weights to the last, after an update that rounds at random."""
    for stage, weight in _tied_weights(model):
        own = local_shard(weight)
        whole = own.contiguous()
        if stage.is_last:
            dist.recv(whole, _peer(stage), stage.group)
            own.copy_(whole)
        else:
            dist.send(whole, _peer(stage), stage.group)


def _peer(stage: Stage) -> int:
    """Return the rank of the other stage."""
    return dist.get_global_rank(stage.group, 0 if stage.is_last else dist.get_world_size(stage.group) - 1)


def _tied_weights(model: nn.Module) -> list[tuple[Stage, nn.Parameter]]:
    """Return trained weights that both stages have, in an order that is the same in both."""
    modules = [module for module in stage_modules(model) if hasattr(module, "pipeline_stage")]
    stages: list[tuple[nn.Module, Any]] = [(module, module.pipeline_stage) for module in modules]
    found = [(stage, module.get_parameter(name)) for module, stage in stages for name in stage.shared]
    return [(stage, weight) for stage, weight in found if weight.requires_grad]
