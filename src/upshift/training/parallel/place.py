"""Find this rank's place in the layout of a plan, and the groups of ranks that it works with.

Ranks of a tensor-parallel group are neighbours, then those of context, of data and of pipeline parallelism
(planning/layout.py). Ranks of data and context parallelism have the same weights: gradients are summed over them, and
fully_shard divides among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from upshift.planning.plan import Plan


@dataclass(frozen=True)
class Place:
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


def find_place(plan: Plan) -> Place:
    """Return the place of this process in the default group of ``plan.num_processes`` ranks. Every rank calls it, as groups
    are made."""
    if plan.num_processes == 1:
        return Place(plan)
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
    return Place(plan, dist.get_rank(), whole, contexts, experted)
