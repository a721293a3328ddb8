"""Predict the seconds for which the ranks of a layout wait for exchanges that computation does not hide.

- fully_shard gathers a layer's weights while the layer before computes, and reduces its gradients while the next layer computes.
- Data parallelism reduces gradients during the last backward pass.
- Keys go round the ring while attention computes.
- Tensor parallelism and expert parallelism wait for their exchanges. CPUs wait for all exchanges.

volumes.py says how many bytes each exchange moves.

Count the bytes that one rank exchanges in an optimizer step, by the group of ranks it exchanges with.

They are the bytes that upshift's own loop moves, counted between gloo ranks (tests/cpu/test_layouts.py).

Volumes: Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022), ZeRO (Rajbhandari et al. 2020), ring attention (Liu et al.
2023), Ulysses (Jacobs et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm
from typing import Literal, NamedTuple

from upshift.hardware.spec import Collective, Host
from upshift.hardware.spec import Exchange as Operation
from upshift.models.profile import ModelProfile
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.network import Group, collective_seconds, point_to_point_seconds
from upshift.planning.cost.partition import (
    MASTERED_BYTES,
    REDUCED_BYTES,
    Stage,
    compute_bytes,
    elements,
    expert_elements,
    layer_elements,
    layers_with_experts,
    residual_bytes,
)
from upshift.planning.plan import Plan

GroupName = Literal["tensor", "context", "experts", "shard", "replicas", "pipeline"]
PAIRS_A_LAYER = 2  # attention and the feed-forward part each gather (or sum) once forward, and once backward
GATHERED_HEADS = {"colwise_gather_output", "colwise_rep"}  # styles of a head with which each rank gets all logits
STATISTICS = 2 * 4  # fp32 bytes of a token where ranks share the words of the loss: largest logit, sum of exponentials


class Transfer(NamedTuple):
    """An exchange of ``num_bytes``: of the tensor that the ranks have together, or of a rank's own for all_to_all and send."""

    among: GroupName
    operation: Operation
    num_bytes: float
    times: float = 1.0  # of a micro-batch; of a step, for weights and gradients
    same_experts: bool = False  # only ranks of the group that have the same experts


@dataclass(frozen=True)
class Volumes:
    """The exchanges of one rank."""

    profile: ModelProfile
    plan: Plan
    stage: Stage
    memo: Memo

    def of_a_step(self) -> Iterator[Transfer]:
        layout = self.plan.layout
        count = self.plan.gradient_accumulation_steps
        for moved in (*self.tensor(), *self.context(), *self.experts(), *self.pipeline()):
            yield moved._replace(times=moved.times * count)
        if layout.gathers:
            yield from (moved._replace(times=moved.times * self.gathers) for moved in self.gathered())
            yield from (moved._replace(times=self.gathers_outside) for moved in self.gathered_outside())
            reduced = (*self.reduced(), *self.reduced_outside())
            yield from (moved._replace(times=moved.times * self.reductions) for moved in reduced)
        yield from self.gradients()

    @property
    def layers(self) -> int:
        return self.stage.last - self.stage.first

    @property
    def repeated(self) -> float:
        """Return the share of layers whose forward pass, with its exchanges, runs again in the backward pass."""
        recomputed = self.plan.activation_checkpointing / max(self.profile.num_layers, 1)
        return recomputed if self.plan.recompute_granularity == "full" else 0.0

    @property
    def gathers(self) -> int:
        """Return how often a step gathers a layer's weights.

        In a pipeline they stay whole from a backward pass to the next forward pass: whatever the order, one gather more than
        micro-batches.
        """
        count = self.plan.gradient_accumulation_steps
        layout = self.plan.layout
        if layout.fully_shard != "weights":
            return 1
        return count + 1 if layout.pipeline_parallel > 1 else 2 * count

    @property
    def gathers_outside(self) -> int:
        """Return how often a step gathers the weights outside the layers.

        They stay from forward to backward, in a pipeline to the end of the step.
        """
        layout = self.plan.layout
        each = layout.fully_shard == "weights" and layout.pipeline_parallel == 1
        return self.plan.gradient_accumulation_steps if each else 1

    @property
    def reductions(self) -> int:
        """Return how often a step reduces gradients. A pipeline does so once, after its last micro-batch."""
        return 1 if self.plan.layout.pipeline_parallel > 1 else self.plan.gradient_accumulation_steps

    @property
    def tokens(self) -> float:
        """Return the tokens of one micro-batch on a rank."""
        plan = self.plan
        return plan.per_device_train_batch_size * plan.sequence_length / plan.layout.context_parallel

    @property
    def hidden_bytes(self) -> float:
        """Return the bytes of the tokens' hidden states as matrix products give them."""
        return self.tokens * (self.profile.hidden_size or 0) * compute_bytes(self.plan)

    @property
    def residual_bytes(self) -> float:
        """Return the bytes of the hidden states between layers: autocast leaves their sum, and its gradient, in fp32."""
        return self.tokens * (self.profile.hidden_size or 0) * residual_bytes(self.plan)

    def tensor(self) -> Iterator[Transfer]:
        """Yield the exchanges of tensor parallelism.

        Each pair is a gather and a scatter with sequence parallelism, a sum without: the same volume. Recomputed layers repeat
        those of the forward pass but the last, after which the backward pass needs nothing. An input that is not kept whole is
        gathered again.
        """
        layout = self.plan.layout
        hidden = self.hidden_bytes
        if layout.tensor_parallel == 1:
            return
        pairs = PAIRS_A_LAYER * self.layers
        sums: Operation = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
        yield Transfer("tensor", sums, hidden, 2.0 * pairs + (pairs - self.layers) * self.repeated)
        if layout.sequence_parallel:
            yield Transfer("tensor", "all_gather", hidden, pairs * (2.0 + self.repeated + layout.gather_again))
            yield Transfer("tensor", "all_gather", self.residual_bytes, 2.0)  # behind the last layer; backward before the first
        yield from self._at_the_ends()

    def _at_the_ends(self) -> Iterator[Transfer]:
        """Yield the exchanges of embedding and head, where ranks have their own words of them."""
        layout = self.plan.layout
        styles = set(self.profile.declares.tensor_parallel_plan.values())
        if self.stage.has_embedding and (layout.vocabulary_parallel or "embedding_rowwise" in styles):
            yield Transfer("tensor", "all_reduce", self.residual_bytes)
        if self.stage.has_head and (layout.vocabulary_parallel or styles & GATHERED_HEADS):
            yield Transfer("tensor", "all_reduce", self.residual_bytes)  # of the gradient
            if layout.vocabulary_parallel or self.plan.loss_chunk_tokens:
                yield Transfer("tensor", "all_reduce", self.tokens * STATISTICS)
            else:
                logits = self.tokens * (self.profile.vocab_size or 0) * compute_bytes(self.plan)
                yield Transfer("tensor", "all_gather", logits)

    def context(self) -> Iterator[Transfer]:
        layout = self.plan.layout
        if layout.context_parallel == 1:
            return
        queries, keys = self.profile.heads or (1, 1)
        own = self.hidden_bytes / layout.tensor_parallel
        if layout.context_kind == "ulysses":  # queries, keys, values there, the result back; and their gradients
            keys_and_values = (
                2.0 * own * exchanged_key_heads(queries, keys, layout.tensor_parallel * layout.context_parallel) / queries
            )
            yield Transfer("context", "all_to_all", 2.0 * own + keys_and_values, (2.0 + self.repeated) * self.layers)
            return
        around = (layout.context_parallel - 1) * self.layers  # backward: keys and values, and their gradients
        yield Transfer("context", "send", 2.0 * own * keys / queries, (3.0 + self.repeated) * around)

    def experts(self) -> Iterator[Transfer]:
        """Yield the exchanges of experts. Tokens go to their experts and come back, and so do gradients."""
        if self.plan.layout.expert_parallel == 1 or self.profile.experts is None:
            return
        layers = sum(
            self.memo.get_or_compute("mixtures", lambda: layers_with_experts(self.profile))[self.stage.first : self.stage.last]
        )
        sent = self.hidden_bytes * self.profile.experts.per_token
        yield Transfer("experts", "all_to_all", sent, (4.0 + 2.0 * self.repeated) * layers)

    def pipeline(self) -> Iterator[Transfer]:
        """Yield the transfers of hidden states to the next stage and of gradients to the one before."""
        layout = self.plan.layout
        if layout.pipeline_parallel > 1:
            ends = self.stage.has_embedding + self.stage.has_head
            yield Transfer("pipeline", "send", self.hidden_bytes, 2.0 * layout.virtual_stages - ends)

    @property
    def elements(self) -> float:
        """Return the number of weights that the rank computes with."""
        layout = self.plan.layout
        key = ("elements", layout.tensor_parallel, layout.expert_parallel, self.stage.first, self.stage.last)
        return self.memo.get_or_compute(key, lambda: elements(self.profile, self.plan, self.stage))

    @property
    def layer_elements(self) -> float:
        layout = self.plan.layout
        key = ("layer elements", layout.tensor_parallel, layout.expert_parallel)
        return self.memo.get_or_compute(key, lambda: layer_elements(self.profile, self.plan))

    @property
    def outside_elements(self) -> float:
        return self.elements - self.layer_elements * self.layers

    @property
    def expert_elements(self) -> float:
        """Return how many of ``elements`` belong to experts that ranks share: only ranks with the same experts exchange them."""
        layout = self.plan.layout
        stage = self.stage
        if layout.expert_parallel == 1:
            return 0.0
        found = self.memo.get_or_compute(
            ("experts", stage.first, stage.last), lambda: expert_elements(self.profile, stage.first, stage.last)
        )
        return found / layout.tensor_parallel / layout.expert_parallel

    def gathered(self) -> tuple[Transfer, ...]:
        """Return the gather of the layers' weights, once for each layer."""
        return self._of_layers("all_gather", compute_bytes(self.plan))

    def reduced(self) -> tuple[Transfer, ...]:
        return self._of_layers("reduce_scatter", REDUCED_BYTES)

    def gathered_outside(self) -> tuple[Transfer, ...]:
        return (Transfer("shard", "all_gather", self.outside_elements * compute_bytes(self.plan)),)

    def reduced_outside(self) -> tuple[Transfer, ...]:
        return (Transfer("shard", "reduce_scatter", self.outside_elements * REDUCED_BYTES),)

    def gradients(self) -> tuple[Transfer, ...]:
        """Return the exchanges of gradients once a step.

        They are the sums over replicas that fully_shard leaves, or over all gradients where it divides none, and the weights
        that ZeRO 1 sends back.
        """
        plan, layout = self.plan, self.plan.layout
        trained = self.profile.parameters.trainable / self.profile.parameters.total
        size = self.elements * trained
        experts = self.expert_elements * trained
        if layout.fully_shard == "no":
            return _weight_transfers("replicas", "all_reduce", size, experts, plan.parameter_bytes)
        between = Transfer("replicas", "all_reduce", size / layout.shard_size * REDUCED_BYTES)
        if layout.fully_shard != "optimizer":
            return (between,)
        sent = MASTERED_BYTES if layout.master_weights else plan.parameter_bytes
        there = _weight_transfers("shard", "reduce_scatter", size, experts, plan.parameter_bytes)
        return (*there, *_weight_transfers("shard", "all_gather", size, experts, sent), between)

    def _of_layers(self, operation: Operation, size: float) -> tuple[Transfer, ...]:
        experts = self.expert_elements / max(self.layers, 1)
        found = _weight_transfers("shard", operation, self.layer_elements, experts, size)
        return tuple(moved._replace(times=self.layers) for moved in found)


def exchanged_key_heads(queries: int, keys: int, ranks: int) -> int:
    """Return the number of key heads as they are exchanged: repeated until each rank has whole ones
    (training/distributed/context_parallel.py)."""
    repeated = lcm(keys, ranks)
    return queries if queries % repeated else repeated


def _weight_transfers(
    among: GroupName, operation: Operation, elements: float, experts: float, size: float
) -> tuple[Transfer, ...]:
    """Return the exchange of ``elements`` of ``size`` bytes. Only ranks with the same experts exchange ``experts`` of these
    elements."""
    others = Transfer(among, operation, (elements - experts) * size)
    return (others, Transfer(among, operation, experts * size, same_experts=True)) if experts else (others,)


BACKWARD_SHARE = 2.0 / 3.0  # of a micro-batch's computation


@dataclass(frozen=True)
class ComputeSeconds:
    """Seconds for which a rank computes one micro-batch: in all, and in attention."""

    total: float
    attention: float


@dataclass(frozen=True)
class RankGroups:
    """The groups in which a rank exchanges. Ranks are numbered tensor first, then context, data and pipeline."""

    tensor: Group
    context: Group
    shard: Group
    replicas: Group
    experts: Group
    pipeline_stride: int


class UnknownLink(Exception):
    """Raised if the host does not say how fast a link is that the layout needs."""


def rank_groups(host: Host, plan: Plan) -> RankGroups:
    layout = plan.layout
    node = host.ranks_per_node(plan.num_processes)
    tensor = layout.tensor_parallel
    context = layout.context_parallel
    sharing = plan.data_parallel * context  # gradients are summed over these
    sharded = layout.shard_size if layout.fully_shard != "no" else 1
    return RankGroups(
        tensor=Group(tensor, 1, node),
        context=Group(context, tensor, node),
        shard=Group(sharded, tensor, node),
        replicas=Group(sharing // sharded, tensor * sharded, node),
        experts=Group(layout.expert_parallel, tensor, node),
        pipeline_stride=tensor * sharing,
    )


@dataclass(frozen=True)
class ExchangeCost:
    """All exchanges of one rank in an optimizer step. ``seconds`` raises UnknownLink."""

    host: Host
    profile: ModelProfile
    plan: Plan
    stage: Stage
    computed: ComputeSeconds
    memo: Memo

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all micro-batches that are not hidden, by kind of parallelism."""
        return {name: value for name, value in self._terms() if value > 0.0}

    def _terms(self) -> Iterator[tuple[str, float]]:
        layout = self.plan.layout
        count = self.plan.gradient_accumulation_steps
        groups = self.memo.get_or_compute(("groups", layout, self.plan.num_processes), lambda: rank_groups(self.host, self.plan))
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
        return Volumes(self.profile, self.plan, self.stage, self.memo)

    @property
    def _hides(self) -> float:
        """Return the share of the computation beside which exchanges can run. On CPUs the same cores do both."""
        return 1.0 if self.plan.layout.overlap and self.plan.device != "cpu" else 0.0

    def _collective(self, operation: Collective, num_bytes: float, group: Group) -> float:
        key = (operation, num_bytes, group)
        found = self.memo.get_or_compute(key, lambda: collective_seconds(self.host, operation, num_bytes, group))
        if found is None:
            raise UnknownLink(f"the rate {'between' if group.num_nodes > 1 else 'inside'} nodes is unknown")
        return found

    def _seconds(self, moved: Iterable[Transfer], group: Group) -> float:
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
        plan = self.plan
        volumes = self._volumes
        gather = self._seconds(volumes.gathered(), group)
        reduce = self._seconds(volumes.reduced(), group)
        gather_outside, reduce_outside = (
            self._seconds(moved, group) for moved in (volumes.gathered_outside(), volumes.reduced_outside())
        )
        total = self._hides * self.computed.total * plan.gradient_accumulation_steps
        forward = total * (1.0 - BACKWARD_SHARE)
        backward = total * BACKWARD_SHARE
        in_forward = min(plan.gradient_accumulation_steps, volumes.gathers)
        first = in_forward * gather / max(volumes.layers, 1)  # nothing computes yet
        waited = first + max(in_forward * gather - first - forward, 0.0)
        waited += max((volumes.gathers - in_forward) * gather + volumes.reductions * reduce - backward, 0.0)
        return waited + volumes.gathers_outside * gather_outside + volumes.reductions * reduce_outside

    def _gradients(self, groups: RankGroups) -> float:
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

    def _pipeline(self, groups: RankGroups) -> float:
        """Return the seconds for which a pipeline rank waits for transfers while the pipeline fills and drains.

        1F1B also waits in between: a stage has no more micro-batches under way than there are stages from it to the last, and
        each of them goes there and back. In the other schedules the rank computes other micro-batches meanwhile.
        """
        layout = self.plan.layout
        count = self.plan.gradient_accumulation_steps
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
