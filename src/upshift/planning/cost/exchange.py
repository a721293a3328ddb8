"""Predict the seconds for which the ranks of a layout wait for exchanges that computation does not hide.

- fully_shard gathers a layer's weights while the layer before computes, and reduces its gradients while the next layer computes.
- Data parallelism reduces gradients during the last backward pass.
- Keys go round the ring while attention computes.
- Tensor parallelism and expert parallelism wait for their exchanges. CPUs wait for all exchanges.

volumes.py says how many bytes each exchange moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from upshift.hardware.spec import Collective, Host
from upshift.models.profile import ModelProfile
from upshift.planning.cost.known import Known
from upshift.planning.cost.network import Group, collective_seconds, point_to_point_seconds
from upshift.planning.cost.share import Stage
from upshift.planning.cost.volumes import Moved, Volumes
from upshift.planning.plan import Plan

BACKWARD_SHARE = 2.0 / 3.0  # of a micro-batch's computation


@dataclass(frozen=True)
class Computed:
    """Seconds for which a rank computes one micro-batch: in all, and in attention."""

    total: float
    attention: float


@dataclass(frozen=True)
class Groups:
    """The groups in which a rank exchanges. Ranks are numbered tensor first, then context, data and pipeline."""

    tensor: Group
    context: Group
    shard: Group
    replicas: Group
    experts: Group
    pipeline_stride: int


class UnknownLink(Exception):
    """Raised if the host does not say how fast a link is that the layout needs."""


def groups_of(host: Host, plan: Plan) -> Groups:
    layout, node = plan.layout, host.ranks_per_node(plan.num_processes)
    tensor, context = layout.tensor_parallel, layout.context_parallel
    sharing = plan.data_parallel * context  # gradients are summed over these
    sharded = layout.shard_size if layout.fully_shard != "no" else 1
    return Groups(
        tensor=Group(tensor, 1, node),
        context=Group(context, tensor, node),
        shard=Group(sharded, tensor, node),
        replicas=Group(sharing // sharded, tensor * sharded, node),
        experts=Group(layout.expert_parallel, tensor, node),
        pipeline_stride=tensor * sharing,
    )


@dataclass(frozen=True)
class Exchange:
    """All exchanges of one rank in an optimizer step. ``seconds`` raises UnknownLink."""

    host: Host
    profile: ModelProfile
    plan: Plan
    stage: Stage
    computed: Computed
    known: Known

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all micro-batches that are not hidden, by kind of parallelism."""
        return {name: value for name, value in self._terms() if value > 0.0}

    def _terms(self) -> Iterator[tuple[str, float]]:
        layout, count = self.plan.layout, self.plan.gradient_accumulation_steps
        groups = self.known.get(("groups", layout, self.plan.num_processes), lambda: groups_of(self.host, self.plan))
        if layout.tensor_parallel > 1:
            yield "tensor parallel", count * self._seconds(self._volumes.tensor(), groups.tensor)
        if layout.context_parallel > 1:
            yield "context parallel", count * self._context(groups.context)
        if layout.expert_parallel > 1:
            yield "expert parallel", count * self._seconds(self._volumes.experts(), groups.experts)
        if layout.gathers:
            yield "gathering weights, reducing gradients", self._sharded(groups.shard)
        yield "gradient exchange", self._gradients(groups)
        if layout.pipeline_parallel > 1:
            yield "pipeline transfers", self._pipeline(groups)

    @property
    def _volumes(self) -> Volumes:
        return Volumes(self.profile, self.plan, self.stage, self.known)

    @property
    def _hides(self) -> float:
        """Return the share of the computation beside which exchanges can run. On CPUs the same cores do both."""
        return 1.0 if self.plan.layout.overlap and self.plan.device != "cpu" else 0.0

    def _collective(self, operation: Collective, num_bytes: float, group: Group) -> float:
        key = (operation, num_bytes, group)
        found = self.known.get(key, lambda: collective_seconds(self.host, operation, num_bytes, group))
        if found is None:
            raise UnknownLink(f"the rate {'between' if group.num_nodes > 1 else 'inside'} nodes is unknown")
        return found

    def _seconds(self, moved: Iterable[Moved], group: Group) -> float:
        """Return the seconds of collectives that follow each other."""
        shared = self.plan.layout.expert_parallel
        same = Group(max(group.size // shared, 1), group.stride * shared, group.node_ranks)
        seconds = 0.0
        for one in moved:
            assert one.operation != "send"
            seconds += one.times * self._collective(one.operation, one.num_bytes, same if one.same_experts else group)
        return seconds

    def _context(self, group: Group) -> float:
        volumes = self._volumes
        if self.plan.layout.context_kind == "ulysses":
            return self._seconds(volumes.context(), group)
        leaves = group.num_nodes > 1  # then the slowest of the ring's links is between nodes
        stride = group.node_ranks if leaves else group.stride
        around = sum(one.times * self._to_next(one.num_bytes, stride) for one in volumes.context())
        return max(around - self._hides * self.computed.attention, 0.0)

    def _sharded(self, group: Group) -> float:
        plan, volumes = self.plan, self._volumes
        gather, reduce = self._seconds(volumes.gathered(), group), self._seconds(volumes.reduced(), group)
        gather_outside, reduce_outside = (
            self._seconds(moved, group) for moved in (volumes.gathered_outside(), volumes.reduced_outside())
        )
        total = self._hides * self.computed.total * plan.gradient_accumulation_steps
        forward, backward = total * (1.0 - BACKWARD_SHARE), total * BACKWARD_SHARE
        in_forward = min(plan.gradient_accumulation_steps, volumes.gathers)
        first = in_forward * gather / max(volumes.layers, 1)  # nothing computes yet
        waited = first + max(in_forward * gather - first - forward, 0.0)
        waited += max((volumes.gathers - in_forward) * gather + volumes.reductions * reduce - backward, 0.0)
        return waited + volumes.gathers_outside * gather_outside + volumes.reductions * reduce_outside

    def _gradients(self, groups: Groups) -> float:
        """Return the seconds of the gradient exchange that the last backward pass does not hide.

        It never hides the weights that ZeRO 1 sends back.
        """
        hidden = self._hides * self.computed.total * BACKWARD_SHARE
        by_group = {"replicas": groups.replicas, "shard": groups.shard}
        moved = self._volumes.gradients()
        if self.plan.layout.fully_shard != "optimizer":
            return max(sum(self._seconds((one,), by_group[one.among]) for one in moved) - hidden, 0.0)
        reduce, back, between = (
            self._seconds([one for one in moved if one.operation == operation], by_group[among])
            for operation, among in (("reduce_scatter", "shard"), ("all_gather", "shard"), ("all_reduce", "replicas"))
        )
        return max(reduce - hidden, 0.0) + back + between

    def _pipeline(self, groups: Groups) -> float:
        """Return the seconds for which a pipeline rank waits for transfers while the pipeline fills and drains.

        1F1B also waits in between: a stage has no more micro-batches under way than there are stages from it to the last, and
        each of them goes there and back. In the other schedules the rank computes other micro-batches meanwhile.
        """
        layout, count = self.plan.layout, self.plan.gradient_accumulation_steps
        one = max(self._to_next(moved.num_bytes, groups.pipeline_stride) for moved in self._volumes.pipeline())
        ranks = layout.pipeline_parallel
        waits = 2.0 * (ranks * layout.virtual_stages - 1)
        if layout.pipeline_schedule == "1f1b":
            waits += 2.0 * (ranks - 1) / ranks * max(count - 1, 0)
        return waits * one

    def _to_next(self, num_bytes: float, stride: int) -> float:
        node = self.host.ranks_per_node(self.plan.num_processes)
        found = point_to_point_seconds(self.host, num_bytes, stride=stride, node_ranks=node)
        if found is None:
            raise UnknownLink("the rate between nodes is unknown")
        return found
