"""Seconds that ranks of one layout spend on exchanging what the computation does not hide.

What hides what: fully_shard gathers a layer's weights while the one before computes, and reduces its gradients while the next
one does; data parallelism reduces during the last backward pass; keys go round while attention computes. Tensor parallelism
and experts wait for their exchange, and CPUs for all of it. Volumes: Megatron-LM (Korthikanti et al. 2022), ZeRO (Rajbhandari
et al. 2020), ring attention (Liu et al. 2023), Ulysses (Jacobs et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from upshift.hardware.spec import Collective, Host
from upshift.models.profile import ModelProfile
from upshift.planning.cost.divide import experts_of, mixtures
from upshift.planning.cost.known import Known
from upshift.planning.cost.network import Group, collective_seconds, point_to_point_seconds
from upshift.planning.cost.share import MASTERED_BYTES, REDUCED_BYTES, Stage, compute_bytes, elements, layer_elements
from upshift.planning.plan import Plan

PAIRS_A_LAYER = 2  # attention and the feed-forward part each gather (or sum) once forward, and once backward
BACKWARD_SHARE = 2.0 / 3.0  # of a micro-batch's computation


@dataclass(frozen=True)
class Computed:
    """Seconds that one micro-batch computes on a rank: all of it, and of that attention."""

    total: float
    attention: float


@dataclass(frozen=True)
class Groups:
    """Ranks are numbered tensor first, then context, data and pipeline."""

    tensor: Group
    context: Group
    shard: Group
    replicas: Group
    experts: Group
    pipeline_stride: int


class UnknownLink(Exception):
    """The host does not say how fast a link is that the layout needs."""


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
    """All exchanges of an optimizer step of one rank. ``seconds`` raises UnknownLink."""

    host: Host
    profile: ModelProfile
    plan: Plan
    stage: Stage
    computed: Computed
    known: Known

    def seconds(self) -> dict[str, float]:
        """By kind of parallelism, what is not hidden; of all micro-batches."""
        return {name: value for name, value in self._terms() if value > 0.0}

    def _terms(self) -> Iterator[tuple[str, float]]:
        layout, count = self.plan.layout, self.plan.gradient_accumulation_steps
        groups = self.known.get(("groups", layout, self.plan.num_processes), lambda: groups_of(self.host, self.plan))
        if layout.tensor_parallel > 1:
            yield "tensor parallel", count * self._tensor(groups.tensor)
        if layout.context_parallel > 1:
            yield "context parallel", count * self._context(groups.context)
        if layout.expert_parallel > 1:
            yield "expert parallel", count * self._experts(groups.experts)
        if layout.gathers:
            yield "gathering weights, reducing gradients", self._sharded(groups.shard)
        yield "gradient exchange", self._gradients(groups)
        if layout.pipeline_parallel > 1:
            yield "pipeline transfers", self._pipeline(groups)

    @property
    def _layers(self) -> int:
        return self.stage.last - self.stage.first

    @property
    def _layer_elements(self) -> float:
        layout = self.plan.layout
        key = ("layer elements", layout.tensor_parallel, layout.expert_parallel)
        return self.known.get(key, lambda: layer_elements(self.profile, self.plan))

    @property
    def _elements(self) -> float:
        layout = self.plan.layout
        key = ("elements", layout.tensor_parallel, layout.expert_parallel, self.stage.first, self.stage.last)
        return self.known.get(key, lambda: elements(self.profile, self.plan, self.stage))

    @property
    def _repeated(self) -> float:
        """The share of layers whose forward pass, with its exchanges, runs again in the backward pass."""
        recomputed = self.plan.activation_checkpointing / max(self.profile.num_layers, 1)
        return recomputed if self.plan.recompute_granularity == "full" else 0.0

    @property
    def _hides(self) -> float:
        """The share of the computation that exchanges may run beside. On CPUs the same cores do both."""
        return 1.0 if self.plan.layout.overlap and self.plan.device != "cpu" else 0.0

    @property
    def _hidden_bytes(self) -> float:
        """Of one micro-batch's hidden states on a rank."""
        plan = self.plan
        tokens = plan.per_device_train_batch_size * plan.sequence_length / plan.layout.context_parallel
        return tokens * (self.profile.hidden_size or 0) * compute_bytes(plan)

    def _collective(self, operation: Collective, num_bytes: float, group: Group) -> float:
        key = (operation, num_bytes, group)
        found = self.known.get(key, lambda: collective_seconds(self.host, operation, num_bytes, group))
        if found is None:
            raise UnknownLink(f"the rate {'between' if group.num_nodes > 1 else 'inside'} nodes is unknown")
        return found

    @property
    def _expert_elements(self) -> float:
        """Of ``_elements``, those of the experts that ranks share: only ranks with the same ones exchange them."""
        layout, stage = self.plan.layout, self.stage
        if layout.expert_parallel == 1:
            return 0.0
        found = self.known.get(("experts", stage.first, stage.last), lambda: experts_of(self.profile, stage.first, stage.last))
        return found / layout.tensor_parallel / layout.expert_parallel

    def _of_weights(self, operation: Collective, elements: float, experts: float, size: float, group: Group) -> float:
        """Of ``elements`` of ``size`` bytes, ``experts`` of them among the ranks of the group that have the same ones."""
        shared = self.plan.layout.expert_parallel
        same = Group(max(group.size // shared, 1), group.stride * shared, group.node_ranks)
        return self._collective(operation, (elements - experts) * size, group) + self._collective(operation, experts * size, same)

    def _tensor(self, group: Group) -> float:
        """Each pair is a gather and a scatter with sequence parallelism, a sum without: the same volume. Recomputed layers
        repeat those of the forward pass; an input that is not kept whole is gathered again."""
        one: float
        if self.plan.layout.sequence_parallel:
            one = self._collective("all_gather", self._hidden_bytes, group)
            one += self._collective("reduce_scatter", self._hidden_bytes, group)
        else:
            one = self._collective("all_reduce", self._hidden_bytes, group)
        passes = 2.0 + self._repeated
        again = self._collective("all_gather", self._hidden_bytes, group) if self.plan.layout.gather_again else 0.0
        return (one * passes + again) * PAIRS_A_LAYER * self._layers

    def _context(self, group: Group) -> float:
        plan, degree = self.plan, group.size
        queries, keys = self.profile.heads or (1, 1)
        own = self._hidden_bytes / plan.layout.tensor_parallel
        keys_and_values = 2.0 * own * keys / queries
        if plan.layout.context_kind == "ulysses":  # queries, keys, values there, the result back; and their gradients
            passes = 2.0 + self._repeated
            return passes * self._layers * self._collective("all_to_all", 2.0 * own + keys_and_values, group)
        leaves = group.num_nodes > 1  # then the slowest of the ring's links is between nodes
        around = (degree - 1) * self._to_next(keys_and_values, group.node_ranks if leaves else group.stride)
        hidden = self._hides * self.computed.attention / max(self._layers, 1)
        # Backward: keys and values, and their gradients.
        return self._layers * max((3.0 + self._repeated) * around - hidden, 0.0)

    def _experts(self, group: Group) -> float:
        """Tokens go to their experts and come back, and so do gradients."""
        experts, stage = self.profile.experts, self.stage
        sent = self._hidden_bytes * (experts.per_token if experts else 0)
        layers = sum(self.known.get("mixtures", lambda: mixtures(self.profile))[stage.first : stage.last])
        return (4.0 + 2.0 * self._repeated) * layers * self._collective("all_to_all", sent, group)

    def _sharded(self, group: Group) -> float:
        plan, size = self.plan, compute_bytes(self.plan)
        inner, experts = self._layer_elements, self._expert_elements / max(self._layers, 1)
        gather = self._layers * self._of_weights("all_gather", inner, experts, size, group)
        reduce = self._layers * self._of_weights("reduce_scatter", inner, experts, REDUCED_BYTES, group)
        outside = self._elements - inner * self._layers
        gather_outside = self._collective("all_gather", outside * size, group)
        reduce_outside = self._collective("reduce_scatter", outside * REDUCED_BYTES, group)
        total = self._hides * self.computed.total
        forward, backward = total * (1.0 - BACKWARD_SHARE), total * BACKWARD_SHARE
        first = gather / max(self._layers, 1)  # nothing computes yet
        count = plan.gradient_accumulation_steps
        again = gather if plan.layout.fully_shard == "weights" else 0.0
        in_backward = max(again + reduce - backward, 0.0)
        in_forward = max(gather - forward, 0.0) + first
        gathers = count if plan.layout.fully_shard == "weights" else 1
        return gathers * (in_forward + gather_outside) + count * (in_backward + reduce_outside)

    def _gradients(self, groups: Groups) -> float:
        """Once a step; hidden by the last backward pass, but for what fully_shard leaves to sum over replicas and the weights
        that ZeRO 1 sends back."""
        plan, hidden = self.plan, self._hides * self.computed.total * BACKWARD_SHARE
        trained = self.profile.parameters.trainable / self.profile.parameters.total
        size, experts = self._elements * trained, self._expert_elements * trained
        if plan.layout.fully_shard == "no":
            seconds = self._of_weights("all_reduce", size, experts, plan.parameter_bytes, groups.replicas)
            return max(seconds - hidden, 0.0)
        sharded = size / groups.shard.size * REDUCED_BYTES
        between = self._collective("all_reduce", sharded, groups.replicas)
        if plan.layout.fully_shard == "optimizer":
            reduce = self._of_weights("reduce_scatter", size, experts, plan.parameter_bytes, groups.shard)
            sent = MASTERED_BYTES if plan.layout.master_weights else plan.parameter_bytes
            back = self._of_weights("all_gather", size, experts, sent, groups.shard)
            return max(reduce - hidden, 0.0) + back + between
        return max(between - hidden, 0.0)

    def _pipeline(self, groups: Groups) -> float:
        """What fills and drains the pipeline waits; the rest is sent while the next micro-batch computes."""
        layout = self.plan.layout
        sent = self._hidden_bytes / (layout.tensor_parallel if layout.sequence_parallel else 1)
        one = self._to_next(sent, groups.pipeline_stride)
        return 2.0 * (layout.pipeline_parallel * layout.virtual_stages - 1) * one

    def _to_next(self, num_bytes: float, stride: int) -> float:
        node = self.host.ranks_per_node(self.plan.num_processes)
        found = point_to_point_seconds(self.host, num_bytes, stride=stride, node_ranks=node)
        if found is None:
            raise UnknownLink("the rate between nodes is unknown")
        return found
