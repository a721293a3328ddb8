"""Which links the exchanges of ranks cross: the prices against a count of every rank of every group, one by one."""

from __future__ import annotations

import itertools

import pytest
from made_profile import make_profile
from made_requests import measured_cpus, model_of

from upshift.hardware import describe
from upshift.hardware.spec import Host, Link
from upshift.planning.cost.communication import ComputeSeconds, ExchangeCost, rank_groups
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.network import HOP_SECONDS, NETWORK_EFFICIENCY, Group, collective_seconds, hop_seconds
from upshift.planning.cost.partition import stage_of
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.search.layouts import enumerate_layouts
from upshift.planning.workload import Workload

MIXTURE = model_of("mixture", "causal-lm", longest=8192)
WORKLOAD = Workload(sequence_length=16384, global_batch=48)


def plan_of(host: Host, layout: Layout, ranks: int, *, accumulation: int = 4) -> Plan:
    return Plan(
        device=host.device, host="h", model="m", sequence_length=1024, precision="bf16", per_device_train_batch_size=1,  # type: ignore[arg-type]
        gradient_accumulation_steps=accumulation, num_processes=ranks, layout=layout,
    )  # fmt: skip


def groups_by_hand(layout: Layout, data: int) -> dict[str, list[tuple[int, ...]]]:
    """Return the ranks of every group, from the coordinates of each rank: stages outermost, then data, context and tensor."""
    sizes = (layout.pipeline_parallel, data, layout.context_parallel, layout.tensor_parallel)
    places = list(itertools.product(*map(range, sizes)))
    shard = layout.shard_size if layout.fully_shard != "no" else 1

    def group(key: object) -> list[tuple[int, ...]]:
        groups: dict[object, list[int]] = {}
        for rank, place in enumerate(places):
            groups.setdefault(key(*place), []).append(rank)  # type: ignore[operator]
        return [tuple(ranks) for ranks in groups.values()]

    context = layout.context_parallel
    return {
        "tensor": group(lambda p, d, c, t: (p, d, c)), "context": group(lambda p, d, c, t: (p, d, t)),
        "pipeline": group(lambda p, d, c, t: (d, c, t)), "shard": group(lambda p, d, c, t: (p, (d * context + c) // shard, t)),
        "replicas": group(lambda p, d, c, t: (p, (d * context + c) % shard, t)),
        "experts": group(lambda p, d, c, t: (p, (d * context + c) // layout.expert_parallel)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["2x8xh100", "3x8xh100", "6x4xh100", "2x6xh100"])
def test_groups_are_on_the_nodes_on_which_their_ranks_are(name: str) -> None:
    host = describe(name)
    layouts = {layout: data for data, layout in enumerate_layouts(host, MIXTURE, WORKLOAD)}
    assert len(layouts) > 50 and any(layout.expert_parallel > 1 < layout.tensor_parallel for layout in layouts)
    for layout, data in layouts.items():
        groups = rank_groups(host, plan_of(host, layout, host.num_devices))
        for kind, expected in groups_by_hand(layout, data).items():
            group: Group = getattr(groups, kind)
            nodes = [[rank // host.gpus_per_node for rank in ranks] for ranks in expected]
            assert {len(ranks) for ranks in expected} == {group.size}, (layout, kind)
            assert group.num_nodes == max(len(set(each)) for each in nodes), (layout, kind)
            assert group.per_node == max(each.count(node) for each in nodes for node in each), (layout, kind)
            if group.num_nodes > 1:
                leaving = [node for each in nodes if len(set(each)) > 1 for node in set(each)]
                assert group.side_by_side == max(map(leaving.count, leaving)), (layout, kind)
            hops = [any(each[number] != each[number + 1] for each in nodes) for number in range(group.size - 1)]
            assert group.hops_between_nodes == tuple(hops), (layout, kind)


SLOW = Link(name="slow", bytes_per_second=1e6)
FAST = Link(name="fast", bytes_per_second=1e15)


@pytest.mark.parametrize("name", ["2x8xh100", "3x8xh100", "2x6xh100", "2xepyc-9654"])
def test_a_slow_network_makes_each_exchange_slower_whose_ranks_are_on_several_nodes(name: str) -> None:
    """And no other: what stays inside a node takes as long whatever joins the nodes."""
    host = describe(f"{name}@ethernet-100") if "epyc" not in name else measured_cpus()
    ranks = host.num_devices if host.device != "cpu" else 8
    slow = host.changed(inter_node=SLOW)
    fast = host.changed(inter_node=FAST)
    terms = {
        "tensor parallel": "tensor", "context parallel": "context", "expert parallel": "experts",
        "pipeline transfers": "pipeline", "gathering weights, reducing gradients": "shard",
    }  # fmt: skip
    seen = set()
    for data, layout in enumerate_layouts(host, MIXTURE, WORKLOAD, ranks=ranks):
        plan = plan_of(host, layout, ranks)
        stage = stage_of(MIXTURE, plan, 0)
        seconds = [ExchangeCost(each, MIXTURE, plan, stage, ComputeSeconds(0.0, 0.0), Memo()).seconds() for each in (slow, fast)]
        groups = groups_by_hand(layout, data)
        node_ranks = host.ranks_per_node(ranks)
        for term, kind in terms.items():
            if term in seconds[1]:
                leaves = any(len({rank // node_ranks for rank in members}) > 1 for members in groups[kind])
                assert (seconds[0][term] > 2 * seconds[1][term]) == leaves, (layout, term)
                assert leaves or seconds[0][term] == seconds[1][term], (layout, term)
                seen.add((term, leaves))
    assert ("pipeline transfers", True) in seen and {leaves for _, leaves in seen} == {True, False}


def test_a_stage_waits_for_the_hop_between_nodes_alone() -> None:
    """Four stages of two ranks on two nodes: of the three hops one is between nodes."""
    host = describe("2x4xh100").changed(inter_node=Link(name="a port each", bytes_per_second=4e9))
    profile = make_profile()
    plan = plan_of(host, Layout(pipeline_parallel=4), 8, accumulation=1)
    cost = ExchangeCost(host, profile, plan, stage_of(profile, plan, 0), ComputeSeconds(0.0, 0.0), Memo())
    hidden_bytes = 1024 * 2048 * 2
    between = hidden_bytes / (1e9 * 0.85)
    assert cost.seconds()["pipeline transfers"] == pytest.approx(2 * between, rel=0.1)
    assert host.intra_node is not None


@pytest.mark.parametrize(
    ("port", "gigabits"), [("ethernet-10", 10), ("ethernet-25", 25), ("2xethernet-100", 200), ("4xib-hdr", 800)]
)
def test_ethernet_is_the_network_of_a_machine(port: str, gigabits: float) -> None:
    """Without a count a machine has one Ethernet port, however many GPUs it has."""
    for machine in ("2x8xh100", "2x1xrtx-4090", "2x2xepyc-9654-768gb"):
        link = describe(f"{machine}@{port}").inter_node
        assert link is not None and link.bytes_per_second == pytest.approx(gigabits / 8 * 1e9)


@pytest.mark.parametrize(
    ("host", "lone", "eighth"),
    [
        ("2x8xh100@ethernet-100", 12.5e9, 12.5e9 / 8),
        ("2x8xh100@2xethernet-100", 12.5e9, 25e9 / 8),
        ("2x8xh100@ib-ndr", 50e9, 50e9),
        ("2x8xh100@4xib-hdr", 25e9, 100e9 / 8),
        ("2x8xh100@efa-p5", 50e9, 50e9),
    ],
)
def test_a_rank_that_sends_alone_has_a_whole_port(host: str, lone: float, eighth: float) -> None:
    """Bytes per second of the ports of a rank that sends alone, and of one of eight that send at once."""
    machines, size = describe(host), 1e9
    for pipeline, rate in ((Group(16, 1, 8), lone), (Group(2, 8, 8), eighth)):
        hops = hop_seconds(machines, size, pipeline)
        between = [found for found, leaves in zip(hops, pipeline.hops_between_nodes, strict=True) if leaves]
        assert between == [pytest.approx(HOP_SECONDS + size / (rate * NETWORK_EFFICIENCY))]
    ring = collective_seconds(machines, "all_gather", size, Group(2, 8, 8))
    assert ring == pytest.approx(HOP_SECONDS + size / 2 / (eighth * NETWORK_EFFICIENCY))


def test_a_ring_of_one_rank_a_node_has_the_nodes_port() -> None:
    machines = describe("4x1xrtx-4090@ethernet-25")
    rate = 25e9 / 8 * NETWORK_EFFICIENCY
    assert collective_seconds(machines, "all_gather", 1e9, Group(4, 1, 1)) == pytest.approx(2 * HOP_SECONDS + 0.75e9 / rate)
    assert hop_seconds(machines, 1e9, Group(4, 1, 1)) == (pytest.approx(HOP_SECONDS + 1e9 / rate),) * 3
    measured = describe("2x8xh100").changed(inter_node=Link(name="network", bytes_per_second=1e9, measured=True))
    assert hop_seconds(measured, 1e9, Group(16, 1, 8))[7] == pytest.approx(HOP_SECONDS + 1 / NETWORK_EFFICIENCY)


def test_a_described_port_says_how_many_are_counted() -> None:
    assert "one port per node" in describe("2x8xh100@ethernet-400").origin["inter_node"]
    assert "@2xethernet-400" in describe("2x8xh100@ethernet-400").origin["inter_node"]
    assert "one port" not in describe("2x8xh100@2xethernet-400").origin["inter_node"]
