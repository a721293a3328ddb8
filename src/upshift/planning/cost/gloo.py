"""Predict the seconds of exchanges between processes on CPUs, which use gloo.

gloo's rings know no nodes: in each of their steps every rank sends to the next one. gloo's reduce_scatter sums the whole tensor
and keeps a part, so it moves as much as an all_reduce (counted on the loopback device, torch 2.13; docs/log.md). Inside a node
the time is scaled from what two processes were measured to need there. More processes than cores take turns. Computation hides
nothing, because the cores that would compute move the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from upshift.hardware.spec import Collective, Exchange, Host

if TYPE_CHECKING:
    from upshift.planning.cost.network import Group

MEASURED_PROCESSES = 2
SUMS = ("all_reduce", "reduce_scatter")  # gloo's reduce_scatter is an all_reduce of which a rank keeps a part
LATENCY, BYTES_PER_SECOND = 300e-6, 2.5e9  # of two processes that were not measured; a sum on a 2-core Zen 4: 0.3 ms, 1 to 2 GB/s
NETWORK_LATENCY = 50e-6  # of a TCP message between two hosts, where not measured
TCP_EFFICIENCY = 0.9  # of the port's specified rate, where not measured: headers and acknowledgements take 5 to 10 %


def collective_seconds(host: Host, operation: Collective, num_bytes: float, group: Group) -> float | None:
    """Return the same as network.collective_seconds, for a group of several ranks. None: the link between nodes is unknown."""
    inside = 0.0
    if group.per_node > 1:
        scale = _volume(operation, group.size) / _volume(operation, MEASURED_PROCESSES)
        inside = _between_processes(host, operation, num_bytes * scale, group.node_ranks, steps=group.size - 1)
    if group.num_nodes == 1:
        return inside
    if host.inter_node is None:
        return None
    if operation == "all_to_all":
        leaves = group.per_node * (group.size - group.per_node) / group.size
    else:
        leaves = _volume(operation, group.size)
    sent = num_bytes * leaves * group.side_by_side
    rounds = 2 if operation in SUMS else 1  # a ring sums, and then gathers
    return max(inside, _network_seconds(host, sent, steps=rounds * (group.size - 1)) or 0.0)


def send_seconds(host: Host, num_bytes: float, *, stride: int, node_ranks: int) -> float | None:
    """Return the seconds to send to the rank that is ``stride`` further.

    If the transfer leaves the node, all ranks of the node send at once.
    """
    if stride < node_ranks:
        return _between_processes(host, "send", num_bytes, node_ranks)
    return _network_seconds(host, num_bytes * node_ranks)


def _volume(operation: Collective, ranks: int) -> float:
    """Return the part of the tensor that one rank sends."""
    return (2.0 if operation in SUMS else 1.0) * (ranks - 1) / ranks


def _between_processes(host: Host, operation: Exchange, num_bytes: float, processes: int, *, steps: int = 1) -> float:
    """Return the seconds of an exchange inside a node. ``num_bytes``: of a tensor that two processes exchange in the same time.
    """
    found = host.measured.exchanges.get(operation) if host.measured else None
    latency = found.latency_seconds if found is not None and found.latency_seconds is not None else LATENCY
    rate = found.bytes_per_second if found is not None else BYTES_PER_SECOND
    cores = host.cpu.usable_cores if host.cpu else 1
    turns = max(processes / cores, 1.0) / max(MEASURED_PROCESSES / cores, 1.0)
    return latency * steps + num_bytes * max(turns, 1.0) / rate


def _network_seconds(host: Host, num_bytes: float, *, steps: int = 1) -> float | None:
    """Return the seconds to send ``num_bytes`` through a node's port. None: the link is unknown."""
    link = host.inter_node
    if link is None:
        return None
    latency = NETWORK_LATENCY if link.latency_seconds is None else link.latency_seconds
    return latency * steps + num_bytes / (link.bytes_per_second * (1.0 if link.measured else TCP_EFFICIENCY))
