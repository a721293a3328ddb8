"""Predict the seconds of collectives from latency and bandwidth inside a node and between nodes.

A collective that leaves a node moves each node's missing part through that node's ports once, whatever the ranks inside do
(hierarchical or rail-aligned rings). Groups side by side on a node share its ports (COSTS.md D5: contention as in SimuMax). The
part inside a node and the part between nodes overlap, so the slower one counts.

Processes on CPUs use gloo, whose rings ignore nodes: in each of their steps every rank sends to the next one. gloo's
reduce_scatter sums the whole tensor and keeps a part, so it moves as much as an all_reduce (counted on the loopback device, torch
2.13; docs/log.md). Inside a node the time is scaled from what two processes were measured to need there. More processes than
cores take turns. Computation hides nothing, because the cores that would compute move the bytes.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from upshift.hardware import collective
from upshift.hardware.spec import Collective, Exchange, Host, Link

FITTED_RANKS = 8  # the measured fits are of 8 GPUs of one node
NODE_LATENCY = {"nvlink": 15e-6, "other": 30e-6}  # seconds; where no fit is known (the fits: 11 to 29 us)
NODE_EFFICIENCY = 0.75  # of a link's specified rate, where no fit is known: A100 to B200's fits have 0.7 to 0.77
# Without NVLink hosts differ: one with L40S reached 2 of 32 GB/s over 8 GPUs, through the host's memory (COSTS.md D5), while
# TensorRT-LLM's rows of 4 and 8 L40S (benchmarks/published) are met with half of the specified rate. Only a measurement tells.
PCIE_EFFICIENCY = 0.5
# GeForce cards copy through the host's memory, at 0.41 to 0.55 of the specified rate. The lowest figure is copies between three
# 4090, 12.9 of 31.5 GB/s each way (p2pBandwidthLatencyTest with P2P disabled, tinygrad/open-gpu-kernel-modules#6). NCCL sums at
# 0.44 on eight 5090, and at 0.55 on four (NVIDIA/nccl#1639). Published rows that gather weights without offload
# (AnswerDotAI/fsdp_qlora) are predicted 2 to 5 % too fast on two 4090, and 1.1 to 2.8 times too fast on two 3090 on an older
# board. The lanes of a described host are not known: two cards on a desktop's board often have 8 each.
GEFORCE_PCIE_EFFICIENCY = 0.41
# NCCL's own model of rings over PCIe (baseLat, hwLat and busBw of src/graph/tuning.cc, commit 01afd20a): seconds at the start,
# seconds a step, and the part of the bandwidth that is left. LL sends a flag with each word, so it starts fast and streams
# slowly. NCCL takes the protocol that is faster for the size.
SIMPLE = (8.4e-6, 5.7e-6, 1.0)
LL = {"all_reduce": (3.6e-6, 1.0e-6, 1 / 4), "other": (3.6e-6, 1.0e-6, 1 / 3)}
HOP_SECONDS = 10e-6  # between two nodes, each way (NCCL's model: 2.7 to 14 us a network hop)
NETWORK_EFFICIENCY = 0.85  # of the ports' specified rate

MEASURED_PROCESSES = 2
GLOO_SUMS = ("all_reduce", "reduce_scatter")  # gloo's reduce_scatter is an all_reduce of which a rank keeps a part
# Of two processes that were not measured; a sum on a 2-core Zen 4 takes 0.3 ms, and goes at 1 to 2 GB/s.
GLOO_LATENCY = 300e-6
GLOO_BYTES_PER_SECOND = 2.5e9
GLOO_NETWORK_LATENCY = 50e-6  # of a TCP message between two hosts, where not measured
TCP_EFFICIENCY = 0.9  # of the port's specified rate, where not measured: headers and acknowledgements take 5 to 10 %


class Group(NamedTuple):
    """The ranks of one collective: ``size`` of them, ``stride`` apart, on nodes of ``node_ranks``.

    All ranks of the job are in such groups, ``stride`` of them side by side. The slowest group counts.
    """

    size: int
    stride: int
    node_ranks: int

    @property
    def per_node(self) -> int:
        """Return the largest number of ranks of a group on one node."""
        return place_group(self).per_node

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of the group that is on most nodes."""
        return place_group(self).num_nodes

    @property
    def side_by_side(self) -> int:
        """Return the number of groups that share a node's ports."""
        return place_group(self).side_by_side

    @property
    def hops_between_nodes(self) -> tuple[bool, ...]:
        """Return for each member but the last whether any rank in its place sends to another node to reach the next member."""
        return place_group(self).hops_between_nodes


class Placement(NamedTuple):
    """The nodes of all groups of one size and stride. See the properties of Group."""

    per_node: int
    num_nodes: int
    side_by_side: int
    hops_between_nodes: tuple[bool, ...]


@cache
def place_group(group: Group) -> Placement:
    """Return where the ranks of all groups are, from the number of each rank. Nodes hold ranks that follow each other.

    The places repeat after the least common multiple of a node's ranks and the ranks of neighbouring groups.
    """
    neighbours = group.size * group.stride  # ranks of the groups that are side by side
    per_node = 1
    num_nodes = 1
    groups_at_ports: Counter[int] = Counter()  # groups that leave a node, by node
    between_nodes = [False] * (group.size - 1)
    for first in range(0, lcm(neighbours, group.node_ranks), neighbours):
        for offset in range(group.stride):
            nodes = [(first + offset + member * group.stride) // group.node_ranks for member in range(group.size)]
            members_by_node = Counter(nodes)
            per_node = max(per_node, *members_by_node.values())
            num_nodes = max(num_nodes, len(members_by_node))
            if len(members_by_node) > 1:
                groups_at_ports.update(members_by_node.keys())
            for hop, (node, next_node) in enumerate(pairwise(nodes)):
                between_nodes[hop] = between_nodes[hop] or node != next_node
    return Placement(per_node, num_nodes, max(groups_at_ports.values(), default=1), tuple(between_nodes))


def collective_seconds(host: Host, operation: Collective, num_bytes: float, group: Group) -> float | None:
    """Return the seconds of a collective; None where a link is unknown.

    ``num_bytes``: the bytes of the whole tensor, as it is when gathered or before it is reduced. For all_to_all: of one rank's
    tensor.
    """
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    if host.device == "cpu":
        return _gloo_collective_seconds(host, operation, num_bytes, group)
    inside = _inside_node(host, operation, num_bytes, group.per_node)
    between = _between_nodes(host, operation, num_bytes, group)
    return None if inside is None or between is None else max(inside, between)


def point_to_point_seconds(
    host: Host, num_bytes: float, *, between_nodes: bool, node_ranks: int, num_senders: int
) -> float | None:
    """Return the seconds to send to one other rank; None where a link is unknown.

    The ranks that send at once share the node's ports. On GPUs one rank uses no more than the ports next to its GPU: its equal
    share of them, and at least one. Processes on CPUs share all ports.

    Args:
        between_nodes: the receiver is on another node.
        node_ranks: ranks on each node.
        num_senders: ranks of a node that send to another node at once.
    """
    if host.device == "cpu":
        if between_nodes:
            return _gloo_network_seconds(host, num_bytes * num_senders)
        return _gloo_between_processes(host, "send", num_bytes, node_ranks)
    if not between_nodes:
        here = _measured_here(host, "send")
        if here is not None:
            return (here[0].latency_seconds or 0.0) + num_bytes / here[0].bytes_per_second
        rate = _node_rate(host)
        return None if rate is None else NODE_LATENCY["nvlink"] + num_bytes / rate
    if host.inter_node is None:
        return None
    rate = host.inter_node.bytes_per_second * NETWORK_EFFICIENCY
    return HOP_SECONDS + num_bytes / min(rate / num_senders, rate * _own_ports(host.inter_node, node_ranks))


def _own_ports(link: Link, node_ranks: int) -> float:
    """Return the share of a node's ports that one rank can use alone."""
    if link.measured:  # between two ranks
        return 1.0
    return max(1 / node_ranks, min(1 / (link.num_ports or node_ranks), 1.0))


def hop_seconds(host: Host, num_bytes: float, group: Group) -> tuple[float | None, ...]:
    """Return for each member of the group but the last the seconds to send to the next one; None where a link is unknown.

    The ranks of all groups send at once.
    """
    num_senders = min(group.stride, group.node_ranks)
    return tuple(
        point_to_point_seconds(host, num_bytes, between_nodes=between_nodes, node_ranks=group.node_ranks, num_senders=num_senders)
        for between_nodes in group.hops_between_nodes
    )


def _ring_volume(operation: Collective, ranks: int) -> float:
    """Return the part of the tensor that one rank sends (or receives) over its own link."""
    return (2.0 if operation == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _inside_node(host: Host, operation: Collective, num_bytes: float, ranks: int) -> float | None:
    if ranks == 1:
        return 0.0
    here = _measured_here(host, operation)
    if here is not None:
        link, measured_ranks = here
        wire = link.bytes_per_second * _ring_volume(operation, measured_ranks)
        return (link.latency_seconds or 0.0) + num_bytes * _ring_volume(operation, ranks) / wire
    measured_fit = collective(host.gpu.table_key or "", operation) if host.gpu else None
    if measured_fit is not None:
        wire = measured_fit.bytes_per_second * _ring_volume(operation, FITTED_RANKS) * _link_share(host)
        return (measured_fit.latency_seconds or 0.0) + num_bytes * _ring_volume(operation, ranks) / wire
    rate = _node_rate(host)
    if rate is None:
        return None
    stream = num_bytes * _ring_volume(operation, ranks) / rate
    if host.has_pcie_peers:
        return _pcie_seconds(operation, stream, ranks)
    return NODE_LATENCY["other"] + stream


def _pcie_seconds(operation: Collective, stream: float, ranks: int) -> float:
    """Return the seconds of a collective over PCIe. Its ring takes one step for each other rank, a sum twice as many.

    ``stream``: the seconds that its bytes take at the whole bandwidth.
    """
    steps = (2 if operation == "all_reduce" else 1) * (ranks - 1)
    protocols = [SIMPLE]
    if operation != "all_to_all":  # NCCL's sends and receives have no such protocol for more than a few kB
        protocols.append(LL.get(operation, LL["other"]))
    return min(start + steps * step + stream / share for start, step, share in protocols)


def _measured_here(host: Host, operation: Exchange) -> tuple[Link, int] | None:
    """Return what the probe measured between this host's GPUs, and between how many."""
    measured = host.measured
    if measured is None or measured.gpu_exchange_ranks is None or operation not in measured.gpu_exchanges:
        return None
    return measured.gpu_exchanges[operation], measured.gpu_exchange_ranks


def _link_share(host: Host) -> float:
    """Return the rate of the host's own link over the rate that its GPU is listed with.

    The fit is of the listed link. Faster links count in proportion.
    """
    if host.gpu is None or host.intra_node is None or host.gpu.nvlink_bytes_per_second is None:
        return 1.0
    return host.intra_node.bytes_per_second / host.gpu.nvlink_bytes_per_second


def _node_rate(host: Host) -> float | None:
    link = host.intra_node
    if link is None:
        return None
    if link.measured:
        return link.bytes_per_second
    if not host.has_pcie_peers:
        return link.bytes_per_second * NODE_EFFICIENCY
    is_geforce = host.gpu is not None and host.gpu.is_geforce
    return link.bytes_per_second * (GEFORCE_PCIE_EFFICIENCY if is_geforce else PCIE_EFFICIENCY)


def has_slow_link(host: Host) -> bool:
    """Return whether the GPUs of a node exchange over PCIe."""
    return host.device != "cpu" and host.has_pcie_peers


def _between_nodes(host: Host, operation: Collective, num_bytes: float, group: Group) -> float | None:
    nodes = group.num_nodes
    if nodes == 1:
        return 0.0
    if host.inter_node is None:
        return None
    rate = host.inter_node.bytes_per_second * NETWORK_EFFICIENCY / group.side_by_side
    if operation == "all_to_all":
        volume = group.per_node * (nodes - 1) / nodes
    else:
        volume = (2.0 if operation == "all_reduce" else 1.0) * (nodes - 1) / nodes
    # Latency grows with the depth of a tree over the nodes for small tensors, and is hidden by the stream of large ones.
    hops = (nodes - 1).bit_length() * (2 if operation == "all_reduce" else 1)
    return hops * HOP_SECONDS + num_bytes * volume / rate


def _gloo_collective_seconds(host: Host, operation: Collective, num_bytes: float, group: Group) -> float | None:
    """Return the seconds of a collective of several ranks on CPUs; None where the link between nodes is unknown."""
    inside = 0.0
    if group.per_node > 1:
        scale = _gloo_volume(operation, group.size) / _gloo_volume(operation, MEASURED_PROCESSES)
        inside = _gloo_between_processes(host, operation, num_bytes * scale, group.node_ranks, steps=group.size - 1)
    if group.num_nodes == 1:
        return inside
    if host.inter_node is None:
        return None
    if operation == "all_to_all":
        sent_share = group.per_node * (group.size - group.per_node) / group.size
    else:
        sent_share = _gloo_volume(operation, group.size)
    sent_bytes = num_bytes * sent_share * group.side_by_side
    rounds = 2 if operation in GLOO_SUMS else 1  # a ring sums, and then gathers
    return max(inside, _gloo_network_seconds(host, sent_bytes, steps=rounds * (group.size - 1)) or 0.0)


def _gloo_volume(operation: Collective, ranks: int) -> float:
    """Return the part of the tensor that one rank sends."""
    return (2.0 if operation in GLOO_SUMS else 1.0) * (ranks - 1) / ranks


def _gloo_between_processes(host: Host, operation: Exchange, num_bytes: float, processes: int, *, steps: int = 1) -> float:
    """Return the seconds of an exchange inside a node.

    ``num_bytes``: the bytes of a tensor that two processes exchange in the same time.
    """
    latency = GLOO_LATENCY
    rate = GLOO_BYTES_PER_SECOND
    measured_link = host.measured.exchanges.get(operation) if host.measured else None
    if measured_link is not None:
        rate = measured_link.bytes_per_second
        if measured_link.latency_seconds is not None:
            latency = measured_link.latency_seconds
    cores = host.cpu.usable_cores if host.cpu else 1
    processes_per_core = max(processes / cores, 1.0) / max(MEASURED_PROCESSES / cores, 1.0)
    return latency * steps + num_bytes * max(processes_per_core, 1.0) / rate


def _gloo_network_seconds(host: Host, num_bytes: float, *, steps: int = 1) -> float | None:
    """Return the seconds to send ``num_bytes`` through a node's port; None where the link is unknown."""
    link = host.inter_node
    if link is None:
        return None
    latency = GLOO_NETWORK_LATENCY if link.latency_seconds is None else link.latency_seconds
    return latency * steps + num_bytes / (link.bytes_per_second * (1.0 if link.measured else TCP_EFFICIENCY))
