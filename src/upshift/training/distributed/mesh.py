"""Find this rank's place in the layout of a plan, and the groups of ranks that it works with.

Ranks of a tensor-parallel group are neighbours, then those of context, of data and of pipeline parallelism
(planning/layout.py). Ranks of data and context parallelism have the same weights: gradients are summed over them, and
fully_shard divides among them.

Let all ranks agree on a value or a failure. With one process, nothing is exchanged.

Tell all ranks that wait for each other within a step, at its end, that one of them ran out of memory.
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
    """A rank's place in the layout of a plan.

    ``mesh`` is pipeline x replicas x shard x tensor, and None with one process. Ranks of shard divide what fully_shard says.
    Ranks of replicas and shard together have gradients of the same weights.
    """

    plan: Plan
    rank: int = 0
    mesh: DeviceMesh | None = None
    contexts: DeviceMesh | None = None  # pipeline x data x context x tensor, where sequences are shared
    experts: DeviceMesh | None = None  # pipeline x replicas of experts x experts (of tensor ranks too), where they are shared

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.plan.layout.tensor_parallel

    @property
    def context_rank(self) -> int:
        return self.rank // self.plan.layout.tensor_parallel % self.plan.layout.context_parallel

    @property
    def data_rank(self) -> int:
        """Return the number of this rank's part of the global batch, below ``plan.data_parallel``."""
        layout = self.plan.layout
        return self.rank // (layout.tensor_parallel * layout.context_parallel) % self.plan.data_parallel

    @property
    def stage(self) -> int:
        """Return the number of this rank's stage of pipeline parallelism."""
        return self.rank // (self.plan.num_processes // self.plan.layout.pipeline_parallel)

    @property
    def sharing(self) -> DeviceMesh | None:
        """Return the mesh for fully_shard: ranks that divide the weights, or replicas x those ranks."""
        if self.mesh is None:
            return None
        return self.mesh["replicas", "shard"] if self.mesh["replicas"].size() > 1 else self.mesh["shard"]


def init_mesh(plan: Plan) -> Mesh:
    """Return the place of this process in the default group of ``plan.num_processes`` ranks. Every rank calls it, as groups
    are made."""
    if plan.num_processes == 1:
        return Mesh(plan)
    layout = plan.layout
    tensor, pipeline, context, experts = (
        layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel, layout.expert_parallel
    )  # fmt: skip
    sharing = plan.num_processes // (tensor * pipeline)
    shard = layout.shard_size if layout.fully_shard != "no" else 1

    def mesh(*sizes: tuple[str, int]) -> DeviceMesh:
        names, counts = zip(*sizes, strict=True)
        return init_device_mesh(plan.device, counts, mesh_dim_names=names)

    whole = mesh(("pipeline", pipeline), ("replicas", sharing // shard), ("shard", shard), ("tensor", tensor))
    contexts = experted = None
    if context > 1:
        contexts = mesh(("pipeline", pipeline), ("data", sharing // context), ("context", context), ("tensor", tensor))
    if experts > 1:
        experted = mesh(("pipeline", pipeline), ("replicas", sharing // experts), ("experts", experts * tensor))
    return Mesh(plan, dist.get_rank(), whole, contexts, experted)


T = TypeVar("T")


def all_reduce_max(number: int, plan: Plan) -> int:
    if plan.num_processes == 1:
        return number
    decision = torch.tensor(number, device=plan.device)
    dist.all_reduce(decision, op=dist.ReduceOp.MAX)
    return int(decision)


def largest_seconds(seconds: float, plan: Plan) -> float:
    """Return the largest seconds of all ranks."""
    found = torch.tensor(seconds, device=plan.device, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def all_gather_objects(value: T, plan: Plan) -> list[T]:
    """Return the values of all ranks, in order."""
    if plan.num_processes == 1:
        return [value]
    gathered: list[Any] = [None] * plan.num_processes
    dist.all_gather_object(gathered, value)
    return gathered


@contextmanager
def rank_0_first(plan: Plan) -> Iterator[None]:
    """Surround work of rank 0 that the others wait for. If it fails, all ranks raise the error with its words."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the others must not wait for what does not come
        failure = error
    if plan.num_processes > 1:
        words: list[str | None] = [_words(failure)]
        dist.broadcast_object_list(words, src=0)
        if failure is None and words[0] is not None:
            failure = JobFailed(words[0])
    if failure is not None:
        raise failure


@contextmanager
def gather_errors(plan: Plan) -> Iterator[None]:
    """Surround work of all ranks. If one rank fails, all ranks raise the error with its words."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the others must hear of it
        failure = error
    said = all_gather_objects(_words(failure), plan)
    if failure is None and any(said):
        failure = JobFailed(next(words for words in said if words))
    if failure is not None:
        raise failure


def _words(failure: Exception | None) -> str | None:
    if failure is None:
        return None
    if isinstance(failure, UpshiftError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"


WENT_WELL, RAN_OUT, INDIVISIBLE = range(3)


class OomAgreement:
    def __init__(self, place: Mesh, *, on_failure: Callable[[], None], halve: Callable[[Any], object] = halve) -> None:
        """Prepare the agreement of the ranks.

        ``on_failure`` may look at memory: as it was then on this rank, or as it is now if another rank failed. ``halve``
        divides a part of the step's work, and returns None if the part is indivisible.
        """
        self.place = place
        self._on_failure = on_failure
        self._halve = halve
        self.words: str | None = None  # the allocator's, when this rank ran out in this step
        self._outcome = WENT_WELL

    def ran_out(self, error: BaseException, part: Any) -> None:
        self.words = str(error)
        self._outcome = RAN_OUT if self._halve(part) is not None else INDIVISIBLE
        self._on_failure()

    def agree(self) -> None:
        """Raise Agreed on all ranks if one of them ran out of memory."""
        worst = all_reduce_max(self._outcome, self.place.plan)
        words = self.words
        self.words = None
        self._outcome = WENT_WELL
        if worst != WENT_WELL:
            if words is None:
                self._on_failure()
            raise OomOnSomeRank(words or "another rank ran out of memory", final=worst == INDIVISIBLE)
