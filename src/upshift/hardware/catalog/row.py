"""Define the rows of the catalog: the figures of a product and their source. Figures are of one device or one socket."""

from __future__ import annotations

import math
from typing import Literal, get_args

from upshift.hardware.spec import Count, Cpu, Gpu, Link, Precision, Rate, Rates
from upshift.units import GIGA, MIB, TERA
from upshift.value import Value

# 10**12 per second in fp32, fp32_medium (TF32), bf16, fp16, fp8, int8.
Tera = tuple[float | None, float | None, float | None, float | None, float | None, float | None]


class Fabric(Value):
    """Describe direct connections between accelerators. The rate is of one link in one direction.

    switch: any device reaches any other over all its links. mesh: `links` go to each peer, so few devices use few links.
    torus: each device has a link to each neighbour in a grid. `spans_nodes`: the fabric also joins devices of several nodes.
    """

    name: str
    topology: Literal["switch", "mesh", "torus"]
    link_bytes_per_second: Rate
    links: Count  # the links of one device; in a mesh, between two devices
    largest: Count  # the most devices that it joins
    spans_nodes: bool = False
    source: str

    def link(self, num_devices: int) -> Link:
        """Return the link of one of `num_devices` devices: all that it can send to the others over all its links."""
        used = self.links
        if self.topology == "mesh":
            used = self.links * (num_devices - 1)
        elif self.topology == "torus":
            # A device's neighbours in the most compact grid (2, 2x2, 2x2x2, 2x4x4 ...): one for each halving of the grid.
            used = min(self.links, math.ceil(math.log2(num_devices)))
        return Link(name=f"{self.name} x{used}", bytes_per_second=self.link_bytes_per_second * used)


class ReferenceSystem(Value):
    """Describe how the vendor connects nodes in its own system. `port`: a name in interconnect.PORTS."""

    name: str
    port: str
    ports_per_gpu: Rate  # below 1: several GPUs share a port
    source: str


class GpuFacts(Value):
    """Hold the facts of an accelerator."""

    gpu: Gpu
    source: str
    fabric: Fabric | None = None  # None: PCIe, or nothing
    max_per_node: Count | None = None  # None: limited by the server's slots only
    reference: ReferenceSystem | None = None


class CpuFacts(Value):
    """Hold the facts of a CPU. `cpu`: one socket, without memory modules."""

    cpu: Cpu
    max_sockets: Count
    source: str


def rates(tera: Tera, gb_s: float) -> Rates:
    """Return the rates of a row. `gb_s`: of the memory."""
    figures = [None if rate is None else rate * TERA for rate in tera]
    return Rates(**dict(zip(get_args(Precision), figures, strict=True)), memory_bytes_per_second=gb_s * GIGA)


def cuda_row(
    key: str, name: str, source: str, tera: Tera, *, mib: int, gb_s: float, cc: tuple[int, int], pcie: int | None,
    watts: float | None, nvlink: Fabric | None = None, system: ReferenceSystem | None = None, lanes: int = 16,
    shares_host_memory: bool = False,
) -> tuple[str, GpuFacts]:  # fmt: skip
    """Return a key and the row of an NVIDIA GPU. `mib`, `gb_s`: of the memory. `cc`: the compute capability. `lanes`: of PCIe."""
    gpu = Gpu(
        name=name,
        table_key=key,
        memory_bytes=mib * MIB,
        shares_host_memory=shares_host_memory,
        compute_capability=cc,
        pcie_generation=pcie,
        pcie_width=lanes if pcie else None,
        nvlink_links=nvlink.links if nvlink else 0,
        nvlink_bytes_per_second=nvlink.links * nvlink.link_bytes_per_second if nvlink else None,
        tdp_watts=watts,
        peak=rates(tera, gb_s),
    )
    largest = nvlink.largest if nvlink else None
    return key, GpuFacts(gpu=gpu, source=source, fabric=nvlink, max_per_node=largest, reference=system)
