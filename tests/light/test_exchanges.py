"""What a rank exchanges in a step, by hand, and how much of it computation hides."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from made_profile import HIDDEN, LAYER, LAYERS, OUTSIDE, VOCABULARY, make_profile
from made_requests import model_of

from upshift.hardware import describe
from upshift.models.profile import ModelProfile
from upshift.planning.cost import communication
from upshift.planning.cost.communication import (
    ComputeSeconds,
    ExchangeCost,
    RankGroups,
    RowShares,
    Transfer,
    UnknownLink,
    Volumes,
    rank_groups,
)
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.network import Group, collective_seconds
from upshift.planning.cost.partition import Stage, stage_of
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan

PROFILE = make_profile()
MIXTURE = model_of("mixture", "causal-lm", longest=4096)
ROWWISE = PROFILE.changed(
    declares=PROFILE.declares.changed(tensor_parallel_plan={"embed": "embedding_rowwise", "head": "colwise_rep"})
)
TOKENS = 2 * 1024
STATES = TOKENS * HIDDEN * 2  # bytes of hidden states in bf16; between layers they are in fp32
BOTH_WAYS = 2 * LAYERS * 2  # behind attention and behind the feed-forward part, forward and backward
ALL_TRAINED = RowShares()
HALF = {"activation_checkpointing": LAYERS // 2}


def plan_of(ranks: int, layout: Layout, **fields: object) -> Plan:
    plain = {"device": "cuda", "host": "h", "model": "m", "sequence_length": 1024, "per_device_train_batch_size": 2}
    return Plan(**{**plain, "precision": "bf16", "num_processes": ranks, "layout": layout, **fields})  # type: ignore[arg-type]


def volumes_of(plan: Plan, profile: ModelProfile = PROFILE, rank: int = 0) -> Volumes:
    return Volumes(profile, plan, stage_of(profile, plan, rank), Memo())


def listed(transfers: Iterable[Transfer]) -> list[tuple[str, float, float]]:
    return [(transfer.operation, transfer.num_bytes, transfer.times) for transfer in transfers]


def test_tensor_parallel_ranks_sum_twice_a_layer_in_each_direction() -> None:
    """A recomputed layer repeats the first of its two sums. With sequence parallelism a sum is a scatter and a gather."""
    plain = Layout(tensor_parallel=2)
    assert listed(volumes_of(plan_of(2, plain)).tensor()) == [("all_reduce", STATES, BOTH_WAYS)]
    assert listed(volumes_of(plan_of(2, plain, **HALF)).tensor()) == [("all_reduce", STATES, BOTH_WAYS + LAYERS / 2)]
    selective = plan_of(2, plain, recompute_granularity="selective", **HALF)
    assert listed(volumes_of(selective).tensor()) == [("all_reduce", STATES, BOTH_WAYS)]
    shared = plain.changed(sequence_parallel=True)
    assert listed(volumes_of(plan_of(2, shared, **HALF)).tensor()) == [
        ("reduce_scatter", STATES, BOTH_WAYS + LAYERS / 2),
        ("all_gather", STATES, BOTH_WAYS + 2 * LAYERS / 2),
        ("all_gather", 2 * STATES, 2.0),
    ]
    again = plan_of(2, shared.changed(gather_again=True))
    assert listed(volumes_of(again).tensor())[1] == ("all_gather", STATES, BOTH_WAYS + 2 * LAYERS)
    assert listed(volumes_of(plan_of(2, Layout())).tensor()) == []


def test_sizes_that_a_config_does_not_name_are_counted_as_nothing() -> None:
    """Exchanges of hidden states and logits then have no bytes."""
    unnamed = ROWWISE.changed(hidden_size=None, vocab_size=None)
    plan = plan_of(2, Layout(tensor_parallel=2, sequence_parallel=True))
    assert {num_bytes for _, num_bytes, _ in listed(volumes_of(plan, unnamed).tensor())} == {0.0}
    ring = plan_of(2, Layout(context_parallel=2))
    assert {num_bytes for _, num_bytes, _ in listed(volumes_of(ring, unnamed.changed(heads=None)).context())} == {0.0}


def test_ranks_that_divide_the_words_sum_embeddings_and_share_the_loss() -> None:
    """The loss needs two fp32 numbers a token; without a loss of its own words each rank gathers all logits."""
    words = plan_of(2, Layout(tensor_parallel=2, vocabulary_parallel=True))
    embedding = ("all_reduce", 2 * STATES, 1.0)
    assert listed(volumes_of(words).tensor())[1:] == [embedding, embedding, ("all_reduce", 8 * TOKENS, 1.0)]
    rowwise = plan_of(2, Layout(tensor_parallel=2))
    logits = ("all_gather", 2 * TOKENS * VOCABULARY, 1.0)
    assert listed(volumes_of(rowwise, ROWWISE).tensor())[1:] == [embedding, embedding, logits]
    chunked = rowwise.changed(loss_chunk_tokens=512)
    assert listed(volumes_of(chunked, ROWWISE).tensor())[1:] == [embedding, embedding, ("all_reduce", 8 * TOKENS, 1.0)]
    stages = rowwise.changed(num_processes=4, layout=Layout(tensor_parallel=2, pipeline_parallel=2))
    assert listed(volumes_of(stages, ROWWISE, rank=0).tensor())[1:] == [embedding]
    assert listed(volumes_of(stages, ROWWISE, rank=1).tensor())[1:] == [embedding, logits]


@pytest.mark.parametrize(("keys", "share"), [(16, 1.0), (4, 1 / 4), (2, 1 / 4)])
def test_context_parallel_ranks_pass_keys_round_or_exchange_heads(keys: int, share: float) -> None:
    """Four ranks: three times forward keys and values, backward with their gradients, and half of the layers forward again.

    Heads: queries, keys, values and the result; fewer keys than ranks are repeated until each rank has one.
    """
    profile = PROFILE.changed(heads=(16, keys))
    states = STATES / 4
    ring = plan_of(4, Layout(context_parallel=4), **HALF)
    assert listed(volumes_of(ring, profile).context()) == [("send", 2 * states * keys / 16, 3.5 * 3 * LAYERS)]
    heads = ring.changed(layout=Layout(context_parallel=4, context_kind="ulysses"))
    assert listed(volumes_of(heads, profile).context()) == [("all_to_all", 2 * states * (1 + share), 2.5 * LAYERS)]


def test_tokens_go_to_their_experts_and_come_back() -> None:
    plan = plan_of(4, Layout(expert_parallel=4), **HALF)
    assert listed(volumes_of(plan, MIXTURE).experts()) == [("all_to_all", 2 * STATES, 5 * LAYERS)]
    assert listed(volumes_of(plan).experts()) == []


def test_ranks_of_a_tensor_parallel_group_each_send_their_part_of_the_tokens_to_experts() -> None:
    """Each half of the tokens is computed once. Their results are gathered, where a sum would count them twice."""
    plan = plan_of(4, Layout(tensor_parallel=2, expert_parallel=2))
    volumes = volumes_of(plan, MIXTURE)
    assert listed(volumes.experts()) == [("all_to_all", STATES, 4 * LAYERS)]
    assert listed(volumes.tensor()) == [("all_reduce", STATES, 2 * LAYERS), ("all_gather", STATES, 2 * LAYERS)]


@pytest.mark.parametrize("sequence", [False, True])
def test_shared_experts_sum_their_results_beside_exchanged_experts(sequence: bool) -> None:
    """One sum forward and two backward in each layer, as DeepSeek-V3's layers do in a world of fake ranks."""
    mlp = "model.layers.*.mlp"
    routed = {f"{mlp}.experts": "moe_tp_experts", f"{mlp}.experts.down_proj": "rowwise", f"{mlp}.down_proj": "rowwise"}
    both = routed | {f"{mlp}.shared_experts.gate_proj": "colwise", f"{mlp}.shared_experts.down_proj": "rowwise"}
    plan = plan_of(4, Layout(tensor_parallel=2, expert_parallel=2, sequence_parallel=sequence))

    def exchanges(styles: dict[str, str]) -> list[tuple[str, float, float]]:
        profile = MIXTURE.changed(declares=MIXTURE.declares.changed(tensor_parallel_plan=styles))
        return listed(volumes_of(plan, profile).tensor())

    alone = exchanges(routed)
    assert [entry for entry in exchanges(both) if entry not in alone] == [("all_reduce", STATES, 3 * LAYERS)]
    assert len(exchanges(both)) == len(alone) + 1


@pytest.mark.parametrize(("rank", "neighbours"), [(0, 3), (3, 3)])
def test_stages_send_states_on_and_gradients_back(rank: int, neighbours: int) -> None:
    layout = Layout(pipeline_parallel=4, pipeline_schedule="interleaved_1f1b", virtual_stages=2)
    plan = plan_of(4, layout, gradient_accumulation_steps=4)
    assert listed(volumes_of(plan, rank=rank).pipeline()) == [("send", STATES, neighbours)]


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (Layout(fully_shard="weights", shard_size=4), (8, 4, 4)), (Layout(fully_shard="gradients", shard_size=4), (1, 1, 4)),
        (Layout(fully_shard="weights", shard_size=4, pipeline_parallel=2), (5, 1, 1)),
        (Layout(fully_shard="gradients", shard_size=4, pipeline_parallel=2), (1, 1, 1)),
    ],
)  # fmt: skip
def test_how_often_weights_are_gathered_and_gradients_divided(layout: Layout, counts: tuple[int, int, int]) -> None:
    """Four micro-batches: layers forward and backward, the weights outside them once for both."""
    volumes = volumes_of(plan_of(4 * layout.pipeline_parallel, layout, gradient_accumulation_steps=4))
    assert (volumes.num_gathers, volumes.num_outside_gathers, volumes.num_reductions) == counts
    layers = LAYERS / layout.pipeline_parallel
    outside = 2 * OUTSIDE / layout.pipeline_parallel
    gathers = counts[0]
    outside_gathers = counts[1]
    reductions = counts[2]
    steps = [entry for entry in listed(volumes.step_transfers()) if entry[0] != "send"]
    assert steps == [
        ("all_gather", 2 * LAYER, gathers * layers), ("all_gather", 2 * outside, outside_gathers),
        ("reduce_scatter", 4 * LAYER, reductions * layers), ("reduce_scatter", 4 * outside, reductions),
        ("all_reduce", (LAYER * layers + outside), 1.0),
    ]  # fmt: skip


def test_gradients_of_experts_are_exchanged_by_those_that_have_them() -> None:
    """Half of the ranks have the same four of eight experts."""
    expert_weights = MIXTURE.experts.parameters if MIXTURE.experts else 0
    everything = MIXTURE.parameters.total
    plan = plan_of(4, Layout(expert_parallel=2))
    shared, own = volumes_of(plan, MIXTURE).gradients()
    assert (shared.num_bytes, shared.same_experts) == (pytest.approx(4 * (everything - expert_weights)), False)
    assert (own.num_bytes, own.same_experts) == (pytest.approx(4 * expert_weights / 2), True)


def test_weights_that_zero_1_sends_back_are_those_of_the_model() -> None:
    plan = plan_of(4, Layout(fully_shard="optimizer", shard_size=2))
    size = 4 * PROFILE.parameters.total
    assert listed(volumes_of(plan).gradients()) == [
        ("reduce_scatter", size, 1.0), ("all_gather", size, 1.0), ("all_reduce", size / 2, 1.0)
    ]  # fmt: skip
    masters = plan.changed(layout=plan.layout.changed(master_weights=True))
    assert listed(volumes_of(masters).gradients())[1] == ("all_gather", size / 2, 1.0)


def test_groups_of_ranks_by_hand() -> None:
    """Two nodes of eight: two ranks share matrices, two the tokens, two the layers, and two copies divide the weights."""
    layout = Layout(tensor_parallel=2, context_parallel=2, pipeline_parallel=2, fully_shard="weights", shard_size=2)
    assert rank_groups(describe("2x8xh100"), plan_of(16, layout)) == RankGroups(
        tensor=Group(2, 1, 8), context=Group(2, 2, 8), shard=Group(2, 2, 8), replicas=Group(2, 4, 8), experts=Group(2, 1, 8),
        pipeline=Group(2, 8, 8),
    )  # fmt: skip


def test_an_unknown_rate_is_named_by_its_place() -> None:
    plan = plan_of(4, Layout(tensor_parallel=2, pipeline_parallel=2))
    copies = plan_of(4, Layout())
    node = describe("4xh100").changed(intra_node=None)
    nodes = describe("2x2xh100").changed(inter_node=None)
    for host, asked, place in ((node, plan, "inside"), (nodes, copies, "between"), (nodes, plan, "between")):
        assert host.gpu is not None
        unlisted = host.changed(gpu=host.gpu.changed(table_key=None))
        cost = ExchangeCost(unlisted, PROFILE, asked, stage_of(PROFILE, asked, 0), ComputeSeconds(0.0, 0.0), Memo())
        with pytest.raises(UnknownLink, match=f"the rate {place} nodes is unknown"):
            cost.seconds()


def test_a_ring_over_pcie_takes_a_step_for_each_rank() -> None:
    """By hand: NCCL's LL for 1 KB (3.6 us and 1 us a step), its Simple for 1 GB (8.4 us and 5.7 us a step)."""
    host = describe("8xl40s")
    assert host.intra_node is not None
    rate = host.intra_node.bytes_per_second / 2
    small = {ranks: collective_seconds(host, "all_reduce", 1e3, Group(ranks, 1, 8)) for ranks in (2, 8)}
    for ranks, seconds in small.items():
        steps = 2 * (ranks - 1)
        assert seconds == pytest.approx(3.6e-6 + steps * 1e-6 + 4 * 1e3 * steps / ranks / rate)
    large = collective_seconds(host, "all_gather", 1e9, Group(8, 1, 8))
    assert large == pytest.approx(8.4e-6 + 7 * 5.7e-6 + 1e9 * 7 / 8 / rate)
    tokens = collective_seconds(host, "all_to_all", 1e3, Group(8, 1, 8))
    gathered = collective_seconds(host, "all_gather", 1e3, Group(8, 1, 8))
    assert tokens is not None and gathered is not None and tokens > 2 * gathered


# --- seconds, where a byte takes one ---------------------------------------------------------------------------------


@pytest.fixture
def a_byte_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds_of(host: object, operation: str, num_bytes: float, group: Group) -> float:
        return num_bytes if group.size > 1 else 0.0

    monkeypatch.setattr(communication, "collective_seconds", seconds_of)
    monkeypatch.setattr(communication, "hop_seconds", lambda host, num_bytes, group: (num_bytes,) * (group.size - 1))


def seconds_of(
    plan: Plan, compute: ComputeSeconds, *, profile: ModelProfile = PROFILE, stage: Stage | None = None,
    rows: RowShares = ALL_TRAINED,
) -> dict[str, float]:  # fmt: skip
    host = describe(f"{plan.num_processes}xh100")
    return ExchangeCost(host, profile, plan, stage or stage_of(profile, plan, 0), compute, Memo(), rows).seconds()


IDLE = ComputeSeconds(0.0, 0.0)
LONG = ComputeSeconds(1e15, 1e15)


def test_exchanges_that_ranks_wait_for(a_byte_a_second: None) -> None:
    """Tensor and expert parallelism wait in every micro-batch, however long the rank computes."""
    for compute in (IDLE, LONG):
        shared = seconds_of(plan_of(2, Layout(tensor_parallel=2), gradient_accumulation_steps=4), compute)
        assert shared == {"tensor parallel": 4 * BOTH_WAYS * STATES}
        plan = plan_of(4, Layout(expert_parallel=4), gradient_accumulation_steps=4)
        experts = seconds_of(plan, compute, profile=MIXTURE)["expert parallel"]
        assert experts == 4 * 4 * LAYERS * 2 * STATES
        heads = plan_of(4, Layout(context_parallel=4, context_kind="ulysses"), gradient_accumulation_steps=4)
        assert seconds_of(heads, compute)["context parallel"] == 4 * 2 * LAYERS * STATES


def test_fused_kernels_multiply_the_pieces_that_are_there(a_byte_a_second: None) -> None:
    """All but the first piece hides behind products: not behind attention, not without sequence parallelism or overlap."""
    layout = Layout(tensor_parallel=4, sequence_parallel=True)
    plain = plan_of(4, layout)
    fused = plain.changed(fused_kernels=True)
    all_of_it = seconds_of(plain, LONG)["tensor parallel"]
    products = ComputeSeconds(1e15, 1e15 - 0.5 * all_of_it)
    assert seconds_of(fused, IDLE)["tensor parallel"] == seconds_of(fused, LONG)["tensor parallel"] == all_of_it
    assert seconds_of(fused, ComputeSeconds(1e15, 0.0))["tensor parallel"] == pytest.approx(all_of_it / 4)
    assert seconds_of(fused, products)["tensor parallel"] == pytest.approx(all_of_it / 2)
    for other in (layout.changed(overlap=False), layout.changed(sequence_parallel=False)):
        apart = [seconds_of(plan.changed(layout=other), products)["tensor parallel"] for plan in (plain, fused)]
        assert apart[0] == apart[1]


def test_keys_go_round_while_attention_computes(a_byte_a_second: None) -> None:
    plan = plan_of(4, Layout(context_parallel=4), gradient_accumulation_steps=4)
    ring = 3 * 3 * LAYERS * STATES / 2
    assert seconds_of(plan, IDLE)["context parallel"] == 4 * ring
    assert seconds_of(plan, ComputeSeconds(1e15, ring / 3))["context parallel"] == pytest.approx(4 * ring * 2 / 3)
    assert "context parallel" not in seconds_of(plan, LONG)


GATHERED = 2.0 * LAYERS * LAYER
DIVIDED = 4.0 * LAYERS * LAYER
AROUND = (2.0 + 4.0) * 2 * OUTSIDE  # of embedding and head: gathered, and divided


@pytest.mark.parametrize(
    ("stage", "count", "seconds", "expected"),
    [
        # Nothing is hidden: forward and backward each gather, and gradients are divided, in every micro-batch.
        ("weights", 1, 0.0, 2 * GATHERED + DIVIDED + AROUND),
        ("weights", 3, 0.0, 3 * (2 * GATHERED + DIVIDED + AROUND)),
        # All is hidden but the first layer's weights, and what is outside the layers.
        ("weights", 1, 1e15, GATHERED / LAYERS + AROUND),
        # A third of the computation is forward: it hides so much of the gathers; two thirds are backward.
        ("weights", 1, 0.3 * GATHERED, (1 - 0.1) * GATHERED + (1 - 0.2) * GATHERED + DIVIDED + AROUND),
        ("weights", 1, 6.0 * GATHERED, GATHERED / LAYERS + AROUND),
        # The weights are gathered once for all three micro-batches, and those outside the layers, too.
        ("gradients", 3, 0.0, GATHERED + 2.0 * 2 * OUTSIDE + 3 * (DIVIDED + 4.0 * 2 * OUTSIDE)),
        ("gradients", 3, 1e15, GATHERED / LAYERS + 2.0 * 2 * OUTSIDE + 3 * 4.0 * 2 * OUTSIDE),
        ("gradients", 3, DIVIDED / 4, GATHERED - DIVIDED / 4 + 2.5 * DIVIDED + 2.0 * 2 * OUTSIDE + 3 * 4.0 * 2 * OUTSIDE),
    ],
)
def test_weights_are_gathered_while_layers_compute(
    a_byte_a_second: None, stage: str, count: int, seconds: float, expected: float
) -> None:
    layout = Layout(fully_shard=stage, shard_size=4)  # type: ignore[arg-type]
    plan = plan_of(4, layout, gradient_accumulation_steps=count)
    found = seconds_of(plan, ComputeSeconds(seconds, 0.0))
    assert found == {"gathering weights, reducing gradients": pytest.approx(expected)}
    alone = seconds_of(plan.changed(layout=layout.changed(overlap=False)), ComputeSeconds(seconds, 0.0))
    assert sum(alone.values()) == pytest.approx(sum(seconds_of(plan, IDLE).values()))


@pytest.mark.parametrize(("stage", "times"), [("weights", 3), ("gradients", 1)])
def test_passes_without_gradients_gather_weights_once_more(a_byte_a_second: None, stage: str, times: int) -> None:
    """KTO's mismatched answers run before those that are trained, and hide only their own gathers."""
    plan = plan_of(4, Layout(fully_shard=stage, shard_size=4), gradient_accumulation_steps=3)  # type: ignore[arg-type]
    name = "gathering weights, reducing gradients"
    both = RowShares(0.5, 0.5)
    without = RowShares(0.5, 0.0)
    outside = times * 2.0 * 2 * OUTSIDE
    for seconds in (0.0, 0.1 * GATHERED / 3, 1e15):
        trained = ComputeSeconds(1e3, 0.0)
        compute = ComputeSeconds(trained.total + seconds, 0.0, forward=seconds)
        shown = seconds_of(plan, compute, rows=both)[name] - seconds_of(plan, trained, rows=without)[name]
        first = times * GATHERED / LAYERS
        assert shown == pytest.approx(outside + first + max(times * GATHERED - first - 3 * seconds, 0.0))
    moved = []
    for rows in (without, both):
        volumes = Volumes(PROFILE, plan, stage_of(PROFILE, plan, 0), Memo(), rows)
        moved.append(sum(transfer.times * transfer.num_bytes for transfer in volumes.step_transfers()))
    assert moved[1] - moved[0] == pytest.approx(outside + times * GATHERED)


def test_rows_with_a_forward_pass_alone_exchange_one_way(a_byte_a_second: None) -> None:
    plan = plan_of(2, Layout(tensor_parallel=2), gradient_accumulation_steps=4)
    shares = {RowShares(): 1.0, RowShares(0.5, 0.0): 0.5, RowShares(0.5, 0.5): 0.75}
    for rows, share in shares.items():
        assert seconds_of(plan, IDLE, rows=rows) == {"tensor parallel": pytest.approx(share * 4 * BOTH_WAYS * STATES)}


def test_gradients_are_summed_while_the_backward_pass_computes(a_byte_a_second: None) -> None:
    """Two thirds of a micro-batch are its backward pass. ZeRO 1 sends weights back when nothing computes."""
    size = 4.0 * PROFILE.parameters.total
    copies = plan_of(4, Layout())
    assert seconds_of(copies, ComputeSeconds(0.3 * size, 0.0)) == {"gradient exchange": pytest.approx(0.8 * size)}
    assert seconds_of(copies, LONG) == {}
    assert seconds_of(copies.changed(device="cpu"), LONG) == {"gradient exchange": size}
    zero = plan_of(4, Layout(fully_shard="optimizer", shard_size=4))
    assert seconds_of(zero, ComputeSeconds(0.3 * size, 0.0)) == {"gradient exchange": pytest.approx(1.8 * size)}
    assert seconds_of(zero, LONG) == {"gradient exchange": pytest.approx(size)}
    halves = plan_of(4, Layout(fully_shard="optimizer", shard_size=2))
    assert seconds_of(halves, LONG) == {"gradient exchange": pytest.approx(size + size / 2)}


@pytest.mark.parametrize(
    ("schedule", "stages", "waits"), [("1f1b", 1, 6 + 7 * 1.5), ("gpipe", 1, 6), ("interleaved_1f1b", 2, 14)]
)
def test_a_pipeline_waits_while_it_fills_and_drains(a_byte_a_second: None, schedule: str, stages: int, waits: float) -> None:
    """Four ranks: three hops there and back, seven with two stages a rank; 1F1B waits between eight micro-batches, too."""
    layout = Layout(pipeline_parallel=4, pipeline_schedule=schedule, virtual_stages=stages)  # type: ignore[arg-type]
    found = seconds_of(plan_of(4, layout, gradient_accumulation_steps=8), LONG)
    assert found == {"pipeline transfers": pytest.approx(waits * STATES)}
