"""Sum the ranks' gradients between the last backward pass and the update, compute their norm, and clip them.

Each rank has its share of the gradient of the global batch's mean loss, so sums need no division. fully_shard sums its own
gradients.

On GPUs OverlappedSums sums the gradients of plain data-parallel ranks while the backward pass computes those of earlier layers.
Gradients lie in flat buckets, the last layers first, and a bucket is summed as soon as it is complete (Li et al. 2020, PyTorch
Distributed, section 3.2.3). On CPUs the sum waits for the end, because it would take cores from the backward pass.

Tied weights that the first and the last pipeline stage both have, such as an embedding that is also the head, get the same
gradient, the sum of both, so they stay equal. It counts once in the norm. Updates that round at random differ between stages,
so the last stage then copies the first one's weights.
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
REPLICA_DIMENSIONS = ("replicas", "shard")  # mesh dimensions along which ranks have gradients of the same weights
Key = TypeVar("Key")
ShardedDimensions = tuple[tuple[DeviceMesh, int], ...]  # mesh dimensions along which ranks have different parts


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_reduce_over(tensor: torch.Tensor, mesh: Mesh, names: Iterable[str], *, operation: Any = dist.ReduceOp.SUM) -> None:
    """Sum a tensor in place, or apply another reduction, over these dimensions of the mesh."""
    if mesh.device_mesh is None:
        return
    for name in names:
        if mesh.device_mesh[name].size() > 1:
            dist.all_reduce(tensor, op=operation, group=mesh.device_mesh.get_group(name))


def sum_loss(total: torch.Tensor, mesh: Mesh) -> None:
    """Sum the ranks' shares of the job's loss in place.

    Tensor-parallel ranks have the same share. Pipeline stages without a loss have zero.
    """
    all_reduce_over(total, mesh, ("pipeline", *REPLICA_DIMENSIONS))


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's part of every gradient. It is zero if this rank's micro-batches did not use the weight."""
    gradients = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(local_shard(parameter.grad))
    return gradients


def sum_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Sum gradients over the ranks that have the same weights.

    An expert's gradient already covers the tokens of all ranks that share experts.
    """
    experts = [parameter for module in expert_modules(model, mesh) for parameter in module.parameters()]
    expert_ids = set(map(id, experts))
    shared = local_gradients(parameter for parameter in model.parameters() if id(parameter) not in expert_ids)
    sum_in_buckets(shared, lambda flat: all_reduce_over(flat, mesh, REPLICA_DIMENSIONS))
    if mesh.expert_mesh is not None:
        group = mesh.expert_mesh.get_group("replicas")
        sum_in_buckets(local_gradients(experts), lambda flat: dist.all_reduce(flat, group=group))


def has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None


def unused_parameters(
    parameters: list[nn.Parameter],
    is_used: Callable[[nn.Parameter], bool],
    largest: Callable[[torch.Tensor], object],
    device: torch.device | str,
) -> list[nn.Parameter]:
    """Return the parameters that no rank used in this step, so that an optimizer leaves them alone, as in one process.

    Every rank calls it. ``is_used`` says whether this rank's backward passes gave a gradient to the parameter, or to its part
    of it. ``largest`` sets flags on ``device`` to their maximum over the ranks, in place. A GPU is waited for only if some
    parameter was not used here.
    """
    used = [is_used(parameter) for parameter in parameters]
    flags = torch.tensor(used, dtype=torch.uint8, device=device)
    largest(flags)
    if all(used):
        return []
    return [parameter for parameter, flag in zip(parameters, flags.tolist(), strict=True) if not flag]


def sum_in_buckets(gradients: list[torch.Tensor], sum_up: Callable[[torch.Tensor], object]) -> None:
    """Sum gradients in place. ``sum_up`` sums a flat bucket of them over ranks."""
    for bucket in make_buckets((gradient, gradient) for gradient in gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient, _ in bucket])
        sum_up(flat)
        for (gradient, _), summed in zip(bucket, flat.split([gradient.numel() for gradient, _ in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def make_buckets(
    tensors: Iterable[tuple[Key, torch.Tensor]], *, elements: int = BUCKET_ELEMENTS
) -> Iterator[list[tuple[Key, torch.Tensor]]]:
    """Yield buckets of tensors with their keys. A bucket has one dtype, and is full at ``elements``."""
    open_buckets: dict[torch.dtype, list[tuple[Key, torch.Tensor]]] = defaultdict(list)
    for key, tensor in tensors:
        bucket = open_buckets[tensor.dtype]
        bucket.append((key, tensor))
        if sum(member.numel() for _, member in bucket) >= elements:
            yield open_buckets.pop(tensor.dtype)
    yield from open_buckets.values()


def clip_gradients(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale this rank's parts of the gradients so that the norm of all ranks' gradients is at most ``max_norm``.

    ``norm`` is that norm before clipping.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's clip_grad_norm_ does
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))


def total_norm(gradients: Iterable[tuple[torch.Tensor, ShardedDimensions]], mesh: Mesh) -> torch.Tensor:
    """Return the norm of all gradients, each with the mesh dimensions that divide it.

    Parts are summed over the ranks that divide a tensor. A tensor that all ranks have counts once.
    """
    by_dimensions: dict[ShardedDimensions, list[torch.Tensor]] = defaultdict(list)
    for gradient, dimensions in gradients:
        by_dimensions[dimensions].append(gradient)
    total = torch.zeros((), device=mesh.plan.device)
    for dimensions, parts in by_dimensions.items():
        squares = torch.stack([norm.float().square() for norm in norms(parts)]).sum()
        for device_mesh, dimension in dimensions:
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
    return tuple(
        (device_mesh, number) for number, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)
    )


OVERLAPPED_BUCKET_ELEMENTS = 25 * 2**18  # 25 MiB in fp32, as torch's DistributedDataParallel has them


def can_overlap(plan: Plan) -> bool:
    """Return whether gradients can be summed while the backward pass runs."""
    layout = plan.layout
    is_data_parallel = layout.fully_shard == "no" and not layout.exchanges
    return plan.device == "cuda" and layout.overlap and is_data_parallel and plan.num_processes > 1


class OverlappedSums:
    """Sum gradients during the last backward pass of a step. ``run`` and ``agree`` work as in OomCatchUp.

    A rank that runs out of memory takes part in the sums with the gradients it has. Then all ranks repeat the step.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, *, on_failure: Callable[[], None], halve: Callable[[Any], object] = halve
    ) -> None:
        assert mesh.device_mesh is not None
        self.mesh = mesh
        self.group = mesh.device_mesh.get_group("replicas")
        self.agreement = OomAgreement(mesh, on_failure=on_failure, halve=halve)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        buckets = make_buckets(((parameter, parameter) for parameter in reversed(trained)), elements=OVERLAPPED_BUCKET_ELEMENTS)
        self._buckets = [[parameter for parameter, _ in bucket] for bucket in buckets]
        self._flat: list[torch.Tensor] = []
        self.summed = False  # whether the gradients are those of all ranks
        self._num_missing: list[int] | None = None  # gradients of each bucket, during the last backward pass
        self._used: set[nn.Parameter] = set()  # in this step, by this rank
        self._works: list[Any] = []
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._count_gradient, number))

    def run(self, micro_batch: Any, compute: Callable[[Any], torch.Tensor], *, last: bool) -> torch.Tensor:
        """Compute a micro-batch. In the last one of the step, sum the gradients and wait for the sums."""
        if self._buckets[0][0].grad is None:
            self._make_gradients()
        if not last:
            return compute(micro_batch)
        self._num_missing = [len(bucket) for bucket in self._buckets]
        share = torch.zeros((), device=self.mesh.plan.device)
        try:
            share = compute(micro_batch)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.agreement.record_out_of_memory(error, micro_batch)
        self._num_missing = [0] * len(self._buckets)  # a weight without a gradient counts as zero
        self._send()
        for work in self._works:
            work.wait()
        self._num_missing = None
        self._works = []
        self.summed = True
        return share

    def agree(self) -> None:
        self.agreement.agree()

    def is_used(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank's backward passes of the step gave the parameter a gradient.

        ``grad`` does not tell: it is a part of a bucket, which begins as zeros.
        """
        return parameter in self._used

    def forget(self) -> None:
        """Forget the buckets, after their gradients are used or dropped."""
        self._flat = []
        self._used = set()
        self.summed = False

    def _make_gradients(self) -> None:
        self.forget()
        for bucket in self._buckets:
            sizes = [parameter.numel() for parameter in bucket]
            flat = torch.zeros(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
            self._flat.append(flat)
            for parameter, part in zip(bucket, flat.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)

    def _count_gradient(self, number: int, parameter: nn.Parameter) -> None:
        self._used.add(parameter)
        if self._num_missing is not None:
            self._num_missing[number] -= 1
            self._send()

    def _send(self) -> None:
        """Start the sums of complete buckets, in the same order on all ranks."""
        assert self._num_missing is not None
        while len(self._works) < len(self._flat) and not self._num_missing[len(self._works)]:
            self._works.append(dist.all_reduce(self._flat[len(self._works)], group=self.group, async_op=True))


def tied_copies(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of the last stage that the first one has too."""
    return {weight for stage, weight in _tied_weights(model) if stage.is_last}


def sum_tied_gradients(model: nn.Module, gradient_of: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """Sum the gradients of tied weights in place between the first and the last stage.

    ``gradient_of`` returns this rank's part of a weight's gradient.
    """
    for stage, weight in _tied_weights(model):
        gradient = gradient_of(weight)
        if gradient is None or not gradient.numel():
            continue
        peer = _peer_rank(stage)
        sent = gradient.contiguous()
        received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        operations = [dist.P2POp(dist.isend, sent, peer, stage.group), dist.P2POp(dist.irecv, received, peer, stage.group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient.add_(received)


@torch.no_grad()
def copy_tied_weights(model: nn.Module) -> None:
    """Copy the first stage's weights to the last, after an update that rounds at random."""
    for stage, weight in _tied_weights(model):
        shard = local_shard(weight)
        buffer = shard.contiguous()
        if stage.is_last:
            dist.recv(buffer, _peer_rank(stage), stage.group)
            shard.copy_(buffer)
        else:
            dist.send(buffer, _peer_rank(stage), stage.group)


def _peer_rank(stage: Stage) -> int:
    """Return the rank of the other stage that has the tied weights."""
    group_rank = 0 if stage.is_last else dist.get_world_size(stage.group) - 1
    return dist.get_global_rank(stage.group, group_rank)


def _tied_weights(model: nn.Module) -> list[tuple[Stage, nn.Parameter]]:
    """Return the trained weights that the first and the last stage have, with the stage, in the same order in both."""
    tied: list[tuple[Stage, nn.Parameter]] = []
    for module in stage_modules(model):
        stage: Any = getattr(module, "pipeline_stage", None)
        if stage is None:
            continue
        for name in stage.tied_names:
            weight = module.get_parameter(name)
            if weight.requires_grad:
                tied.append((stage, weight))
    return tied
