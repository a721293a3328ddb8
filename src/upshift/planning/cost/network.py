"""Predict the seconds of collectives: latency and bandwidth inside a node, and the node's share of the network between nodes.

A collective that leaves a node moves each node's missing part through that node's ports once, whatever the ranks inside do
(hierarchical or rail-aligned rings). Groups side by side on a node share its ports (COSTS.md D5: contention as in SimuMax). The
part inside a node and the part between nodes overlap: the slower one counts. gloo.py is for processes on CPUs.
"""

from __future__ import annotations

from typing import NamedTuple

from upshift.hardware import collective
from upshift.hardware.spec import Collective, Host
from upshift.planning.cost import gloo

FITTED_RANKS = 8  # the measured fits are of 8 GPUs of one node
NODE_LATENCY = {"nvlink": 15e-6, "other": 30e-6}  # seconds; where no fit is known (the fits: 11 to 29 us)
NODE_EFFICIENCY = 0.75  # of a link's specified rate, where no fit is known: A100 to B200's fits have 0.7 to 0.77
# Without NVLink hosts differ: one with L40S reached 2 of 32 GB/s over 8 GPUs, through the host's memory (COSTS.md D5), while
# TensorRT-LLM's rows of 4 and 8 L40S (benchmarks/published) are met with half of the specified rate. Only a measurement tells.
PCIE_EFFICIENCY = 0.5
HOP_SECONDS = 10e-6  # between two nodes, each way (NCCL's model: 2.7 to 14 us a network hop)
NETWORK_EFFICIENCY = 0.85  # of the ports' specified rate


class Group(NamedTuple):
    """The ranks of one collective: ``size`` of them, ``stride`` apart, on nodes of ``node_ranks``."""

    size: int
    stride: int
    node_ranks: int

    @property
    def per_node(self) -> int:
        """Return the number of ranks of the group on one node."""
        return max(min(self.size, self.node_ranks // self.stride), 1)

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.per_node)

    @property
    def side_by_side(self) -> int:
        """Return the number of groups that share a node's ports."""
        return max(self.node_ranks // self.per_node, 1)


def collective_seconds(host: Host, operation: Collective, num_bytes: float, group: Group) -> float | None:
    """Return the seconds of a collective. None: a link is unknown.

    ``num_bytes``: of the whole tensor, as it is when gathered or before it is reduced. For all_to_all: of one rank's own tensor.
    """
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    if host.device == "cpu":
        return gloo.collective_seconds(host, operation, num_bytes, group)
    inside = _inside_node(host, operation, num_bytes, group.per_node)
    between = _between_nodes(host, operation, num_bytes, group)
    return None if inside is None or between is None else max(inside, between)


def point_to_point_seconds(host: Host, num_bytes: float, *, stride: int, node_ranks: int) -> float | None:
    """Return the seconds to send to the rank that is ``stride`` further. None: a link is unknown.

    If the transfer leaves the node, all ranks of the node send at once.
    """
    if host.device == "cpu":
        return gloo.send_seconds(host, num_bytes, stride=stride, node_ranks=node_ranks)
    if stride < node_ranks:
        rate = _node_rate(host)
        return None if rate is None else NODE_LATENCY["nvlink"] + num_bytes / rate
    if host.inter_node is None:
        return None
    share = host.inter_node.bytes_per_second * NETWORK_EFFICIENCY / node_ranks
    return HOP_SECONDS + num_bytes / share


def _volume(operation: Collective, ranks: int) -> float:
    """Return the part of the tensor that one rank sends (or receives) over its own link."""
    return (2.0 if operation == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _inside_node(host: Host, operation: Collective, num_bytes: float, ranks: int) -> float | None:
    if ranks == 1:
        return 0.0
    fit = collective(host.gpu.table_key or "", operation) if host.gpu else None
    if fit is not None:
        wire = fit.bytes_per_second * _volume(operation, FITTED_RANKS) * _link_share(host)
        return (fit.latency_seconds or 0.0) + num_bytes * _volume(operation, ranks) / wire
    rate = _node_rate(host)
    if rate is None:
        return None
    return NODE_LATENCY["other"] + num_bytes * _volume(operation, ranks) / rate


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
    return link.bytes_per_second * (1.0 if link.measured else PCIE_EFFICIENCY if "PCIe" in link.name else NODE_EFFICIENCY)


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
