"""Predict the bytes that one rank exchanges in an optimizer step, and the seconds that computation does not hide.

The bytes are counted by the group of ranks that exchange them. They are those that upshift's own loop moves, counted between gloo
ranks (tests/cpu/planning/test_layouts.py). Volumes: Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022), ZeRO
(Rajbhandari et al. 2020), ring attention (Liu et al. 2023), Ulysses (Jacobs et al. 2023).

Computation hides these exchanges:

- fully_shard gathers a layer's weights while the layer before computes, and reduces its gradients while the next layer computes.
- Data parallelism reduces gradients during the last backward pass.
- Ring attention sends keys and values while attention computes.
- Tensor parallelism and expert parallelism wait for their exchanges. With the fused kernels of Transformer Engine and sequence
  parallelism, a product runs on the pieces that are there, while the next one comes (its userbuffers).
- CPUs wait for all exchanges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Literal, NamedTuple

from upshift.hardware.spec import Collective, Host
from upshift.hardware.spec import Exchange as Operation
from upshift.models.profile import ModelProfile
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.network import Group, collective_seconds, hop_seconds
from upshift.planning.cost.parallel_trace import expert_elements, layers_with_experts
from upshift.planning.cost.partition import (
    MASTERED_BYTES,
    REDUCED_BYTES,
    Stage,
    compute_bytes,
    elements,
    layer_elements,
    residual_bytes,
    summed_bytes,
    trained_part,
)
from upshift.planning.plan import Plan

GroupName = Literal["tensor", "context", "experts", "shard", "replicas", "pipeline"]
PAIRS_A_LAYER = 2  # attention and the feed-forward part each gather (or sum) once forward, and once backward
GATHERED_HEADS = {"colwise_gather_output", "colwise_rep"}  # styles of a head with which each rank gets all logits
ROUTED_EXPERTS = "moe_tp_experts"  # style of experts that a router chooses
# Sums of shared experts in a layer, whatever becomes of the others: of the result, and of the gradient of the input once for each
# of the two matrices that read it. Counted in DeepSeek-V3's layers, with and without expert and sequence parallelism.
SUMS_OF_SHARED_EXPERTS = 3.0
STATISTICS = 2 * 4  # fp32 bytes of a token where ranks share the words of the loss: largest logit, sum of exponentials


class Transfer(NamedTuple):
    """An exchange of a tensor: that of all ranks together, or for all_to_all and send that of one rank."""

    group: GroupName
    operation: Operation
    num_bytes: float
    times: float = 1.0  # in a micro-batch; for weights and gradients, in a step
    same_experts: bool = False  # only ranks of the group that have the same experts


@dataclass(frozen=True)
class RowShares:
    """The shares of the rows of a micro-batch that are trained, and that have a forward pass alone: KTO's mismatched answers."""

    trained: float = 1.0
    forward: float = 0.0


@dataclass(frozen=True)
class Volumes:
    """The exchanges of one rank."""

    profile: ModelProfile
    plan: Plan
    stage: Stage
    memo: Memo
    rows: RowShares = RowShares()

    def step_transfers(self) -> Iterator[Transfer]:
        """Yield all exchanges of an optimizer step, each with the number of times in the step."""
        num_micro_batches = self.plan.gradient_accumulation_steps
        for transfer in (*self.tensor(), *self.context(), *self.experts(), *self.pipeline()):
            yield transfer._replace(times=transfer.times * num_micro_batches)
        if self.plan.layout.gathers:
            for transfer in self.layer_gathers():
                yield transfer._replace(times=transfer.times * (self.num_gathers + self.num_forward_gathers))
            for transfer in self.outside_gathers():
                yield transfer._replace(times=self.num_outside_gathers + self.num_forward_gathers)
            for transfer in (*self.layer_reductions(), *self.outside_reductions()):
                yield transfer._replace(times=transfer.times * self.num_reductions)
        yield from self.gradients()

    @property
    def layers(self) -> int:
        return self.stage.last - self.stage.first

    @property
    def recomputed_share(self) -> float:
        """Return the share of layers whose forward pass, with its exchanges, runs again in the backward pass."""
        if self.plan.recompute_granularity != "full":
            return 0.0
        return self.plan.activation_checkpointing / max(self.profile.num_layers, 1)

    @property
    def num_gathers(self) -> int:
        """Return how often a step gathers a layer's weights.

        In a pipeline they stay whole from a backward pass to the next forward pass. So in every order of passes there is one
        gather more than micro-batches.
        """
        count = self.plan.gradient_accumulation_steps
        layout = self.plan.layout
        if layout.fully_shard != "weights":
            return 1
        return count + 1 if layout.pipeline_parallel > 1 else 2 * count

    @property
    def num_forward_gathers(self) -> int:
        """Return how often the forward passes without a backward pass gather all weights. They come before those of the training.

        If only gradients are divided, the weights stay until the last of these passes.
        """
        if not self.rows.forward:
            return 0
        return self.plan.gradient_accumulation_steps if self.plan.layout.fully_shard == "weights" else 1

    @property
    def num_outside_gathers(self) -> int:
        """Return how often a step gathers the weights outside the layers.

        They stay from forward to backward, in a pipeline to the end of the step.
        """
        layout = self.plan.layout
        is_per_micro_batch = layout.fully_shard == "weights" and layout.pipeline_parallel == 1
        return self.plan.gradient_accumulation_steps if is_per_micro_batch else 1

    @property
    def num_reductions(self) -> int:
        """Return how often a step reduces gradients. A pipeline does so once, after its last micro-batch."""
        return 1 if self.plan.layout.pipeline_parallel > 1 else self.plan.gradient_accumulation_steps

    @property
    def tokens(self) -> float:
        """Return the tokens of one micro-batch on a rank. Tokens with a forward pass alone count half: they go only one way."""
        return (self.forward_tokens + self.backward_tokens) / 2

    @property
    def forward_tokens(self) -> float:
        """Return the tokens of one micro-batch on a rank that have a forward pass."""
        return self.backward_tokens * (1.0 + self.rows.forward / self.rows.trained)

    @property
    def backward_tokens(self) -> float:
        """Return the tokens of one micro-batch on a rank that have a backward pass."""
        plan = self.plan
        return plan.per_device_train_batch_size * self.rows.trained * plan.sequence_length / plan.layout.context_parallel

    @property
    def hidden_bytes(self) -> float:
        """Return the bytes of the tokens' hidden states in the dtype of matrix products."""
        return self.tokens * (self.profile.hidden_size or 0) * compute_bytes(self.plan)

    def residual_bytes(self, tokens: float) -> float:
        """Return the bytes of the tokens' hidden states between layers. Autocast leaves their sum, and its gradient, in fp32."""
        return tokens * (self.profile.hidden_size or 0) * residual_bytes(self.plan)

    def tensor(self) -> Iterator[Transfer]:
        """Yield the exchanges of tensor parallelism.

        With sequence parallelism each pair is a gather and a scatter, without it a sum of the same volume. Recomputed layers
        repeat the exchanges of the forward pass except the last, after which the backward pass needs nothing. An input that is
        not kept whole is gathered again. If ranks share experts, each has the results of its part of the tokens. These are
        gathered, and so are the gradients of the tokens.
        """
        layout = self.plan.layout
        hidden = self.hidden_bytes
        if layout.tensor_parallel == 1:
            return
        pairs = PAIRS_A_LAYER * self.layers
        sums: Operation = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
        gathered = self.layers_of_shared_experts
        yield Transfer("tensor", sums, hidden, 2.0 * (pairs - gathered) + (pairs - self.layers) * self.recomputed_share)
        if gathered:
            yield Transfer("tensor", "all_gather", hidden, 2.0 * gathered)
        if shared := self.layers_of_shared_experts_beside:
            yield Transfer("tensor", "all_reduce", hidden, (SUMS_OF_SHARED_EXPERTS + self.recomputed_share) * shared)
        if layout.sequence_parallel:
            yield Transfer("tensor", "all_gather", hidden, pairs * (2.0 + self.recomputed_share + layout.gather_again))
            states = self.residual_bytes(self.tokens)
            yield Transfer("tensor", "all_gather", states, 2.0)  # behind the last layer; backward before the first
        yield from self._embedding_and_head()

    def _embedding_and_head(self) -> Iterator[Transfer]:
        """Yield the exchanges of embedding and head, where each rank has its own part of the words."""
        layout = self.plan.layout
        styles = set(self.profile.declares.tensor_parallel_plan.values())
        if self.stage.has_embedding and (layout.vocabulary_parallel or "embedding_rowwise" in styles):
            yield Transfer("tensor", "all_reduce", self.residual_bytes(self.forward_tokens))
        if self.stage.has_head and (layout.vocabulary_parallel or styles & GATHERED_HEADS):
            yield Transfer("tensor", "all_reduce", self.residual_bytes(self.backward_tokens))  # of the gradient
            if layout.vocabulary_parallel or self.plan.loss_chunk_tokens:
                yield Transfer("tensor", "all_reduce", self.forward_tokens * STATISTICS)
            else:
                logits = self.forward_tokens * (self.profile.vocab_size or 0) * compute_bytes(self.plan)
                yield Transfer("tensor", "all_gather", logits)

    def context(self) -> Iterator[Transfer]:
        """Yield the exchanges of context parallelism."""
        layout = self.plan.layout
        if layout.context_parallel == 1:
            return
        queries, keys = self.profile.heads or (1, 1)
        local_hidden = self.hidden_bytes / layout.tensor_parallel
        if layout.context_kind == "ulysses":  # queries, keys and values are sent, the result comes back; so do their gradients
            key_heads = exchanged_key_heads(queries, keys, layout.tensor_parallel * layout.context_parallel)
            num_bytes = 2.0 * local_hidden + 2.0 * local_hidden * key_heads / queries
            yield Transfer("context", "all_to_all", num_bytes, (2.0 + self.recomputed_share) * self.layers)
            return
        ring_steps = (layout.context_parallel - 1) * self.layers  # backward also with gradients of keys and values
        yield Transfer("context", "send", 2.0 * local_hidden * keys / queries, (3.0 + self.recomputed_share) * ring_steps)

    def experts(self) -> Iterator[Transfer]:
        """Yield the exchanges of experts. Tokens go to their experts and come back, and so do gradients.

        Ranks of a tensor-parallel group have the same tokens. Each of them sends its part of the tokens.
        """
        if self.plan.layout.expert_parallel == 1 or self.profile.experts is None:
            return
        layers = self.layers_of_shared_experts
        exchanged = self.hidden_bytes * self.profile.experts.per_token / self.plan.layout.tensor_parallel
        yield Transfer("experts", "all_to_all", exchanged, (4.0 + 2.0 * self.recomputed_share) * layers)

    @property
    def layers_of_shared_experts(self) -> int:
        """Return the number of the stage's layers whose experts are shared by expert parallelism."""
        if self.plan.layout.expert_parallel == 1:
            return 0
        has_experts = self.memo.get_or_compute("mixtures", lambda: layers_with_experts(self.profile))
        return sum(has_experts[self.stage.first : self.stage.last])

    @property
    def layers_of_shared_experts_beside(self) -> int:
        """Return the number of the stage's layers with experts that every token goes to, beside those that a router chooses."""
        if self.profile.experts is None or not has_shared_experts(self.profile.declares.tensor_parallel_plan):
            return 0
        has_experts = self.memo.get_or_compute("mixtures", lambda: layers_with_experts(self.profile))
        return sum(has_experts[self.stage.first : self.stage.last])

    def pipeline(self) -> Iterator[Transfer]:
        """Yield the transfers of hidden states to the next stage and of gradients to the one before."""
        layout = self.plan.layout
        if layout.pipeline_parallel > 1:
            ends = self.stage.has_embedding + self.stage.has_head
            yield Transfer("pipeline", "send", self.hidden_bytes, 2.0 * layout.virtual_stages - ends)

    @property
    def _part_of_model(self) -> tuple[int, ...]:
        """Return what decides which weights the rank has."""
        layout = self.plan.layout
        divided = (layout.tensor_parallel, layout.vocabulary_parallel, layout.expert_parallel)
        return (*divided, self.stage.first, self.stage.last)

    @property
    def elements(self) -> float:
        """Return the number of weights that the rank computes with."""
        key = ("elements", *self._part_of_model)
        return self.memo.get_or_compute(key, lambda: elements(self.profile, self.plan, self.stage))

    @property
    def trained_elements(self) -> float:
        """Return how many of ``elements`` are trained."""
        key = ("trained", *self._part_of_model)
        part = self.memo.get_or_compute(key, lambda: trained_part(self.profile, self.plan, self.stage))
        return part * self.profile.parameters.trainable

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
        """Return how many of ``elements`` belong to experts that ranks share. Only ranks with the same experts exchange them."""
        layout = self.plan.layout
        stage = self.stage
        if layout.expert_parallel == 1:
            return 0.0
        key = ("experts", stage.first, stage.last)
        elements = self.memo.get_or_compute(key, lambda: expert_elements(self.profile, stage.first, stage.last))
        return elements / layout.tensor_parallel / layout.expert_parallel

    def layer_gathers(self) -> tuple[Transfer, ...]:
        """Return the gather of the layers' weights, once for each layer."""
        return self._layer_transfers("all_gather", compute_bytes(self.plan))

    def layer_reductions(self) -> tuple[Transfer, ...]:
        return self._layer_transfers("reduce_scatter", REDUCED_BYTES)

    def outside_gathers(self) -> tuple[Transfer, ...]:
        return (Transfer("shard", "all_gather", self.outside_elements * compute_bytes(self.plan)),)

    def outside_reductions(self) -> tuple[Transfer, ...]:
        return (Transfer("shard", "reduce_scatter", self.outside_elements * REDUCED_BYTES),)

    def gradients(self) -> tuple[Transfer, ...]:
        """Return the exchanges of gradients once a step, and of the weights that ZeRO 1 sends back.

        Gradients are summed over the replicas that fully_shard leaves. If it divides no gradients, all are summed.
        """
        plan = self.plan
        layout = plan.layout
        size = self.trained_elements
        experts = self.expert_elements * self.profile.parameters.trainable / self.profile.parameters.total
        if layout.fully_shard == "no":
            return _weight_transfers("replicas", "all_reduce", size, experts, plan.parameter_bytes)
        reduced = summed_bytes(plan) if layout.bf16_gradients else REDUCED_BYTES
        over_replicas = Transfer("replicas", "all_reduce", size / layout.shard_size * reduced)
        if layout.fully_shard != "optimizer":
            return (over_replicas,)
        weight_size = MASTERED_BYTES if layout.master_weights else plan.parameter_bytes
        reductions = _weight_transfers("shard", "reduce_scatter", size, experts, summed_bytes(plan))
        gathers = _weight_transfers("shard", "all_gather", size, experts, weight_size)
        return (*reductions, *gathers, over_replicas)

    def _layer_transfers(self, operation: Operation, size: float) -> tuple[Transfer, ...]:
        experts = self.expert_elements / max(self.layers, 1)
        transfers = _weight_transfers("shard", operation, self.layer_elements, experts, size)
        return tuple(transfer._replace(times=self.layers) for transfer in transfers)


def has_shared_experts(styles: Mapping[str, str]) -> bool:
    """Return whether a tensor-parallel plan divides other matrices beside a router's experts, in the same part of a layer."""
    for experts in (name for name, style in styles.items() if style == ROUTED_EXPERTS):
        part = f"{experts.rpartition('.')[0]}."
        beside = (name.removeprefix(part) for name, style in styles.items() if style == "rowwise" and name.startswith(part))
        if any("." in name and not f"{part}{name}".startswith(f"{experts}.") for name in beside):
            return True
    return False


def exchanged_key_heads(queries: int, keys: int, ranks: int) -> int:
    """Return the number of key heads that ranks exchange: repeated until each rank has whole ones.

    It follows training/distributed/context_parallel.py.
    """
    repeated = lcm(keys, ranks)
    return queries if queries % repeated else repeated


def _weight_transfers(
    group: GroupName, operation: Operation, num_elements: float, num_in_experts: float, element_size: float
) -> tuple[Transfer, ...]:
    """Return the exchange of ``num_elements``. Only ranks with the same experts exchange ``num_in_experts`` of them."""
    shared_by_all = Transfer(group, operation, (num_elements - num_in_experts) * element_size)
    if not num_in_experts:
        return (shared_by_all,)
    return (shared_by_all, Transfer(group, operation, num_in_experts * element_size, same_experts=True))


BACKWARD_SHARE = 2.0 / 3.0  # of the computation of rows that are trained


@dataclass(frozen=True)
class ComputeSeconds:
    """The seconds for which a rank computes one micro-batch: in all, and in attention."""

    total: float
    attention: float
    forward: float = 0.0  # of total: of rows that have no backward pass

    @property
    def backward(self) -> float:
        """Return the seconds of the backward pass."""
        return (self.total - self.forward) * BACKWARD_SHARE


@dataclass(frozen=True)
class RankGroups:
    """The groups in which a rank exchanges. Ranks are numbered by tensor first, then by context, data and pipeline."""

    tensor: Group
    context: Group
    shard: Group
    replicas: Group
    experts: Group
    pipeline: Group


class UnknownLink(Exception):
    """The host does not say how fast a link is that the layout needs."""


def link_advice(host: Host) -> str:
    """Return how to state the link of a described host that is unknown."""
    if host.num_nodes > 1 and host.inter_node is None:
        return "name the host with its link, as HOST@LINK, such as @ib-ndr"
    return "give the path of a Host JSON file with its intra_node"


def rank_groups(host: Host, plan: Plan) -> RankGroups:
    """Return the groups of a plan's ranks."""
    layout = plan.layout
    node = host.ranks_per_node(plan.num_processes)
    tensor = layout.tensor_parallel
    context = layout.context_parallel
    num_summing = plan.data_parallel * context  # ranks over which gradients are summed
    sharded = layout.shard_size if layout.fully_shard != "no" else 1
    return RankGroups(
        tensor=Group(tensor, 1, node),
        context=Group(context, tensor, node),
        shard=Group(sharded, tensor, node),
        replicas=Group(num_summing // sharded, tensor * sharded, node),
        experts=Group(layout.expert_parallel * tensor, 1, node),
        pipeline=Group(layout.pipeline_parallel, tensor * num_summing, node),
    )


@dataclass(frozen=True)
class ExchangeCost:
    """All exchanges of one rank in an optimizer step. ``seconds`` raises UnknownLink."""

    host: Host
    profile: ModelProfile
    plan: Plan
    stage: Stage
    compute: ComputeSeconds
    memo: Memo
    rows: RowShares = RowShares()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of a step's exchanges that are not hidden, by kind of parallelism."""
        return {name: value for name, value in self._terms() if value > 0.0}

    def _terms(self) -> Iterator[tuple[str, float]]:
        layout = self.plan.layout
        count = self.plan.gradient_accumulation_steps
        groups = self.memo.get_or_compute(("groups", layout, self.plan.num_processes), lambda: rank_groups(self.host, self.plan))
        if layout.tensor_parallel > 1:
            yield "tensor parallel", count * self._tensor_seconds(groups.tensor)
        if layout.context_parallel > 1:
            yield "context parallel", count * self._context_seconds(groups.context)
        if layout.expert_parallel > 1:
            yield "expert parallel", count * self._total_seconds(self._volumes.experts(), groups.experts)
        if layout.gathers:
            yield "gathering weights, reducing gradients", self._sharded_seconds(groups.shard)
        yield "gradient exchange", self._gradient_seconds(groups)
        if layout.pipeline_parallel > 1:
            yield "pipeline transfers", self._pipeline_seconds(groups)

    @property
    def _volumes(self) -> Volumes:
        return Volumes(self.profile, self.plan, self.stage, self.memo, self.rows)

    @property
    def _hidden_share(self) -> float:
        """Return the share of the computation beside which exchanges can run. On CPUs the same cores do both."""
        return 1.0 if self.plan.layout.overlap and self.plan.device != "cpu" else 0.0

    def _collective_seconds(self, operation: Collective, num_bytes: float, group: Group) -> float:
        key = (operation, num_bytes, group)
        seconds = self.memo.get_or_compute(key, lambda: collective_seconds(self.host, operation, num_bytes, group))
        if seconds is None:
            place = "between" if group.num_nodes > 1 else "inside"
            raise UnknownLink(f"the rate {place} nodes is unknown")
        return seconds

    def _total_seconds(self, transfers: Iterable[Transfer], group: Group) -> float:
        """Return the seconds of collectives that follow each other."""
        expert_parallel = self.plan.layout.expert_parallel
        same_experts = Group(max(group.size // expert_parallel, 1), group.stride * expert_parallel, group.node_ranks)
        seconds = 0.0
        for transfer in transfers:
            assert transfer.operation != "send"
            members = same_experts if transfer.same_experts else group
            seconds += transfer.times * self._collective_seconds(transfer.operation, transfer.num_bytes, members)
        return seconds

    def _tensor_seconds(self, group: Group) -> float:
        seconds = self._total_seconds(self._volumes.tensor(), group)
        if not (self.plan.fused_kernels and self.plan.layout.sequence_parallel and self._hidden_share):
            return seconds
        first_pieces = seconds / group.size  # nothing computes yet
        products = self._hidden_share * (self.compute.total - self.compute.attention)
        return first_pieces + max(seconds - first_pieces - products, 0.0)

    def _context_seconds(self, group: Group) -> float:
        volumes = self._volumes
        if self.plan.layout.context_kind == "ulysses":
            return self._total_seconds(volumes.context(), group)
        (transfer,) = volumes.context()
        step_seconds = max(self._hop_seconds(transfer.num_bytes, group))  # in each step every rank waits for the slowest
        ring_seconds = transfer.times * step_seconds
        return max(ring_seconds - self._hidden_share * self.compute.attention, 0.0)

    def _sharded_seconds(self, group: Group) -> float:
        plan = self.plan
        volumes = self._volumes
        gather_seconds = self._total_seconds(volumes.layer_gathers(), group)
        reduce_seconds = self._total_seconds(volumes.layer_reductions(), group)
        gather_outside = self._total_seconds(volumes.outside_gathers(), group)
        reduce_outside = self._total_seconds(volumes.outside_reductions(), group)
        compute = self.compute
        can_hide = self._hidden_share * plan.gradient_accumulation_steps
        hidden_backward = can_hide * compute.backward
        hidden_forward = can_hide * (compute.total - compute.forward - compute.backward)
        forward_gathers = min(plan.gradient_accumulation_steps, volumes.num_gathers)
        waiting = 0.0
        for num_gathers, hidden in (
            (volumes.num_forward_gathers, can_hide * compute.forward),
            (forward_gathers, hidden_forward),
        ):
            first_gather = num_gathers * gather_seconds / max(volumes.layers, 1)  # nothing computes yet
            waiting += first_gather + max(num_gathers * gather_seconds - first_gather - hidden, 0.0)
        backward_gathers = volumes.num_gathers - forward_gathers
        in_backward = backward_gathers * gather_seconds + volumes.num_reductions * reduce_seconds
        waiting += max(in_backward - hidden_backward, 0.0)
        num_outside_gathers = volumes.num_outside_gathers + volumes.num_forward_gathers
        return waiting + num_outside_gathers * gather_outside + volumes.num_reductions * reduce_outside

    def _gradient_seconds(self, groups: RankGroups) -> float:
        """Return the seconds of the gradient exchange that the last backward pass does not hide.

        It never hides the weights that ZeRO 1 sends back.
        """
        hidden = self._hidden_share * self.compute.backward
        transfers = self._volumes.gradients()

        def seconds(operation: Operation, group: Group) -> float:
            return self._total_seconds([transfer for transfer in transfers if transfer.operation == operation], group)

        if self.plan.layout.fully_shard != "optimizer":
            by_group = {"replicas": groups.replicas, "shard": groups.shard}
            total = sum(self._total_seconds((transfer,), by_group[transfer.group]) for transfer in transfers)
            return max(total - hidden, 0.0)
        reduce = seconds("reduce_scatter", groups.shard)
        gather = seconds("all_gather", groups.shard)
        over_replicas = seconds("all_reduce", groups.replicas)
        return max(reduce - hidden, 0.0) + gather + over_replicas

    def _pipeline_seconds(self, groups: RankGroups) -> float:
        """Return the seconds for which a pipeline rank waits for transfers while the pipeline fills and drains.

        With 1F1B a rank also waits in between: a stage has no more micro-batches in flight than there are stages from it to the
        last, and each of them is sent there and back. With the other schedules the rank computes other micro-batches meanwhile.
        """
        layout = self.plan.layout
        (transfer,) = self._volumes.pipeline()
        hops = self._hop_seconds(transfer.num_bytes, groups.pipeline)
        ranks = layout.pipeline_parallel
        # The last rank sends to the first one where ranks have several stages. They are on other nodes where any two are.
        seconds = 2.0 * (layout.virtual_stages * sum(hops) + (layout.virtual_stages - 1) * max(hops))
        if layout.pipeline_schedule == "1f1b":
            round_trip = max(2.0 * sum(hops[rank:]) / (ranks - rank) for rank in range(ranks - 1))
            seconds += round_trip * max(self.plan.gradient_accumulation_steps - 1, 0)
        return seconds

    def _hop_seconds(self, num_bytes: float, group: Group) -> list[float]:
        """Return the seconds of each hop from the first rank of a group to the last."""
        seconds = self.memo.get_or_compute(("hops", num_bytes, group), lambda: hop_seconds(self.host, num_bytes, group))
        hops = [hop for hop in seconds if hop is not None]
        if len(hops) < len(seconds):
            place = "between" if group.num_nodes > 1 and self.host.inter_node is None else "inside"
            raise UnknownLink(f"the rate {place} nodes is unknown")
        return hops
