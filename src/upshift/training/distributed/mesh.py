"""Define the mesh of ranks of a plan, and let all ranks agree on a value or a failure.

Ranks of a tensor-parallel group are neighbours, then come those of context, of data and of pipeline parallelism
(planning/layout.py). Ranks of data and context parallelism have the same weights: gradients are summed over them, and
fully_shard divides the weights among them.

With one process nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from upshift.errors import JobFailed, UpshiftError
from upshift.planning.plan import Plan
from upshift.training.out_of_memory import OomOnSomeRank, halve


@dataclass(frozen=True)
class Mesh:
    """The layout of a plan as one rank sees it: its rank, and the meshes of ranks that it works with.

    ``device_mesh`` is pipeline x replicas x shard x tensor, and None with one process. The ranks along shard divide what
    fully_shard says. The ranks along replicas and shard together have gradients of the same weights.
    """

    plan: Plan
    rank: int = 0
    device_mesh: DeviceMesh | None = None
    context_mesh: DeviceMesh | None = None  # pipeline x data x context x tensor, if ranks share sequences
    expert_mesh: DeviceMesh | None = None  # pipeline x replicas x experts, if ranks share experts; tensor ranks share them too

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.plan.layout.tensor_parallel

    @property
    def context_rank(self) -> int:
        return self.rank // self.plan.layout.tensor_parallel % self.plan.layout.context_parallel

    @property
    def data_rank(self) -> int:
        """Return the number of this rank's share of the global batch, below ``plan.data_parallel``."""
        layout = self.plan.layout
        return self.rank // (layout.tensor_parallel * layout.context_parallel) % self.plan.data_parallel

    @property
    def stage(self) -> int:
        """Return the number of this rank's pipeline stage."""
        return self.rank // (self.plan.num_processes // self.plan.layout.pipeline_parallel)

    @property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """Return the mesh for fully_shard: the ranks that divide the weights, or replicas x those ranks."""
        if self.device_mesh is None:
            return None
        if self.device_mesh["replicas"].size() > 1:
            return self.device_mesh["replicas", "shard"]
        return self.device_mesh["shard"]


def init_mesh(plan: Plan) -> Mesh:
    """Return the mesh of the default group's ``plan.num_processes`` ranks. Every rank calls it, because it makes groups."""
    if plan.num_processes == 1:
        return Mesh(plan)
    layout = plan.layout
    tensor = layout.tensor_parallel
    pipeline = layout.pipeline_parallel
    context = layout.context_parallel
    experts = layout.expert_parallel
    same_weights = plan.num_processes // (tensor * pipeline)  # ranks that have the same weights
    shard = layout.shard_size if layout.fully_shard != "no" else 1

    def make(*sizes: tuple[str, int]) -> DeviceMesh:
        names, counts = zip(*sizes, strict=True)
        return init_device_mesh(plan.device, counts, mesh_dim_names=names)

    device_mesh = make(("pipeline", pipeline), ("replicas", same_weights // shard), ("shard", shard), ("tensor", tensor))
    context_mesh = None
    expert_mesh = None
    if context > 1:
        context_mesh = make(("pipeline", pipeline), ("data", same_weights // context), ("context", context), ("tensor", tensor))
    if experts > 1:
        expert_mesh = make(("pipeline", pipeline), ("replicas", same_weights // experts), ("experts", experts * tensor))
    return Mesh(plan, dist.get_rank(), device_mesh, context_mesh, expert_mesh)


T = TypeVar("T")


def all_reduce_max(number: int, plan: Plan) -> int:
    """Return the largest number of all ranks."""
    if plan.num_processes == 1:
        return number
    largest = torch.tensor(number, device=plan.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def largest_seconds(seconds: float, plan: Plan) -> float:
    """Return the seconds of the slowest rank."""
    largest = torch.tensor(seconds, device=plan.device, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def all_gather_objects(value: T, plan: Plan) -> list[T]:
    """Return the values of all ranks, in order."""
    if plan.num_processes == 1:
        return [value]
    gathered: list[Any] = [None] * plan.num_processes
    dist.all_gather_object(gathered, value)
    return gathered


@contextmanager
def rank_0_first(plan: Plan) -> Iterator[None]:
    """Let all ranks wait, at the end of this block, for the work that rank 0 does in it.

    If the work fails, all ranks raise an error with the same message.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # of any kind: the others must not wait for ever
        failure = error
    if plan.num_processes > 1:
        messages: list[str | None] = [_failure_message(failure)]
        dist.broadcast_object_list(messages, src=0)
        if failure is None and messages[0] is not None:
            failure = JobFailed(messages[0])
    if failure is not None:
        raise failure


@contextmanager
def gather_errors(plan: Plan) -> Iterator[None]:
    """Collect, at the end of this block, the errors of all ranks. If one rank failed, all raise an error with its message."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # of any kind: the others must learn of it
        failure = error
    messages = all_gather_objects(_failure_message(failure), plan)
    if failure is None and any(messages):
        failure = JobFailed(next(message for message in messages if message))
    if failure is not None:
        raise failure


def _failure_message(failure: Exception | None) -> str | None:
    if failure is None:
        return None
    if isinstance(failure, UpshiftError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"


WENT_WELL, RAN_OUT, INDIVISIBLE = range(3)  # outcomes of a step on one rank; the largest one decides


class OomAgreement:
    """Tell all ranks that exchange tensors within a step, at its end, that one of them ran out of memory."""

    def __init__(self, mesh: Mesh, *, on_failure: Callable[[], None], halve: Callable[[Any], object] = halve) -> None:
        """Set the callbacks.

        ``on_failure`` may read the memory in use: on the rank that failed it runs at the moment of the failure, on the others
        at the end of the step. ``halve`` divides a part of the step's work, and returns None if the part is indivisible.
        """
        self.plan = mesh.plan
        self._on_failure = on_failure
        self._halve = halve
        self.message: str | None = None  # the allocator's, if this rank ran out of memory in this step
        self._outcome = WENT_WELL

    def record_out_of_memory(self, error: BaseException, part: Any) -> None:
        """Note that this rank ran out of memory in a part of the step's work."""
        self.message = str(error)
        self._outcome = RAN_OUT if self._halve(part) is not None else INDIVISIBLE
        self._on_failure()

    def agree(self) -> None:
        """Raise OomOnSomeRank on all ranks if one of them ran out of memory in this step."""
        worst = all_reduce_max(self._outcome, self.plan)
        message = self.message
        self.message = None
        self._outcome = WENT_WELL
        if worst != WENT_WELL:
            if message is None:
                self._on_failure()
            raise OomOnSomeRank(message or "another rank ran out of memory", final=worst == INDIVISIBLE)
