"""Compute the links from host to GPU, between the GPUs of a node, and between nodes, from their specifications.

Rates are specified data rates in one direction, before protocol headers, so they are upper bounds. Latencies are not specified
and stay unknown. ``PORTS`` lists the network ports that a described host may have.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from upshift.errors import RequestError
from upshift.hardware.catalog.row import GpuFacts
from upshift.hardware.spec import Count, Gpu, Link, Rate
from upshift.units import GIGA
from upshift.value import Value

# Bytes per second of one lane in one direction, after line coding: PCI Express base specification 1.0, 2.0 (8b/10b), 3.0, 4.0,
# 5.0 (128b/130b), and 6.0, 7.0 (242 of the 256 bytes of a flit; 14 are for the correction of errors).
PCIE_LANE_BYTES_PER_SECOND = {
    1: 0.25 * GIGA,
    2: 0.5 * GIGA,
    3: 0.985 * GIGA,
    4: 1.969 * GIGA,
    5: 3.938 * GIGA,
    6: 7.563 * GIGA,
    7: 15.125 * GIGA,
}


def pcie_link(gpu: Gpu) -> Link | None:
    """Return the PCIe connection of a GPU at its specified rate, an upper bound."""
    bytes_per_lane = PCIE_LANE_BYTES_PER_SECOND.get(gpu.pcie_generation or 0)
    if bytes_per_lane is None or gpu.pcie_width is None:
        return None
    return Link(name=f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}", bytes_per_second=bytes_per_lane * gpu.pcie_width)


def gpu_link(gpu: Gpu) -> Link | None:
    """Return the connection between the GPUs of a node at its specified rate: NVLink if there is one, else PCIe."""
    if gpu.nvlink_bytes_per_second is not None:
        return Link(name=f"NVLink x{gpu.nvlink_links}", bytes_per_second=gpu.nvlink_bytes_per_second)
    return pcie_link(gpu) if gpu.nvlink_links == 0 else None


INFINIBAND = "InfiniBand Trade Association roadmap, 4 lanes"
ETHERNET = "IEEE 802.3"


class PortFacts(Value):
    name: str
    bytes_per_second: Rate
    source: str
    # The number of ports of a node if the user writes no count. None: one for each accelerator. Above 1: a count is refused.
    per_node: Count | None = None


def _port(name: str, gigabits: float, source: str, *, per_node: int | None = None) -> PortFacts:
    return PortFacts(name=name, bytes_per_second=gigabits / 8 * GIGA, source=source, per_node=per_node)


PORTS: dict[str, PortFacts] = {
    "ib-edr": _port("InfiniBand EDR", 100, INFINIBAND),
    "ib-hdr": _port("InfiniBand HDR", 200, INFINIBAND),
    "ib-ndr": _port("InfiniBand NDR", 400, INFINIBAND),
    "ib-xdr": _port("InfiniBand XDR", 800, INFINIBAND),
    **{f"roce-{rate}": _port(f"RoCE {rate}", rate, f"{ETHERNET}, carrying RoCE v2") for rate in (100, 200, 400)},
    # One port joins the machine to a network. GPUs with a port each are described with RoCE.
    **{f"ethernet-{rate}": _port(f"Ethernet {rate}", rate, ETHERNET, per_node=1) for rate in (10, 25, 100, 200, 400)},
    "opa-100": _port("Omni-Path 100", 100, "Intel Omni-Path Architecture, 100 series"),
    "efa-p4d": _port("EFA", 100, "AWS EC2 P4d instance page: 400 Gb/s a node", per_node=4),
    "efa-p5": _port("EFA", 100, "AWS EC2 P5 instance page: 3200 Gb/s a node", per_node=32),
}
STATES_ANOTHER = "@ and a port, such as @ib-ndr or @4xib-hdr (ports per node), states another"
UNKNOWN = "unknown: @ and a port, such as @ethernet-25 or @4xib-hdr (ports per node), states it"


class Connection(NamedTuple):
    link: Link | None
    origin: str


def stated_connection(port: str, *, per_node: int) -> Connection:
    """Return the link that a user states after `@`. Raise RequestError for an unknown port or a wrong count.

    ib-ndr is one port for each of the `per_node` devices of a node; 4xib-hdr is four ports for each node."""
    match = re.fullmatch(r"(?:([0-9]{1,6})x)?([a-z].*)", port)
    count, name = match.groups() if match else (None, port)
    if name not in PORTS:
        forms = f"use one of {', '.join(PORTS)} after @, as in 2x8xh100@ib-ndr or 2x8xh100@4xib-hdr"
        raise RequestError(f"unknown link {port[:60]!r}; {forms}, or write inter_node into a Host JSON file")
    facts = PORTS[name]
    if count is not None and int(count) == 0:
        raise RequestError(f"link {port!r} counts 0 ports; use 1 or more, such as 4x{name}")
    if count is not None and (facts.per_node or 1) > 1:
        raise RequestError(f"link {port!r} counts ports, but {name} is the network of a whole node; write @{name}")
    num_ports = int(count) if count else facts.per_node or per_node
    is_default = count is None and facts.per_node == 1
    note = f"; one port per node, as none are counted: @2x{name} states two" if is_default else ""
    return Connection(_bundle(facts, num_ports), f"described; {facts.source}{note}")


def default_connection(facts: GpuFacts, *, num_nodes: int, per_node: int) -> Connection:
    """Return the link of a host that is described without `@`.

    It is the accelerators' own fabric if that joins all nodes, else the ports of the vendor's reference system."""
    fabric = facts.fabric
    system = facts.reference
    if fabric is not None and fabric.spans_nodes and num_nodes * per_node <= fabric.largest:
        device_link = fabric.link(num_nodes * per_node)
        rate = device_link.bytes_per_second * per_node
        link = Link(name=f"{per_node} x {device_link.name}", bytes_per_second=rate, num_ports=per_node)
        return Connection(link, f"{fabric.name} joins up to {fabric.largest}: {fabric.source}; {STATES_ANOTHER}")
    if system is None:
        return Connection(None, UNKNOWN)
    link = _bundle(PORTS[system.port], per_node * system.ports_per_gpu)
    return Connection(link, f"reference system {system.name}: {system.source}; {STATES_ANOTHER}")


def _bundle(facts: PortFacts, count: float) -> Link:
    """Return `count` ports as one link."""
    return Link(name=f"{count:g}x {facts.name}", bytes_per_second=facts.bytes_per_second * count, num_ports=count)
