"""List Google's Cloud TPUs, one chip each. Google publishes no fp32 rate (XLA adds up several bf16 products) and no power limit.

`memory_bytes` is the memory that XLA leaves to a program, according to its out-of-memory messages; the documentation's figure is
larger. The chips of a pod are connected by a grid of links (ICI) that spans its hosts. Pods are connected by the data centre's
network.
"""

from __future__ import annotations

from upshift.hardware.catalog.row import Fabric, GpuFacts, ReferenceSystem, Tera, rates
from upshift.hardware.spec import Gpu
from upshift.units import GIB, GIGA

V4_LINKS = "Jouppi et al., TPU v4, ISCA 2023, table 4: 6 links of 50 GB/s"


def _row(
    version: str,
    tera: Tera,
    *,
    gib: float,
    gb_s: float,
    links: int,
    link_gb_s: float,
    pod: int,
    link_source: str = "",
    ethernet_per_chip: float | None = None,
) -> tuple[str, GpuFacts]:
    """Return a key and its row.

    `gib` and `gb_s`: of the memory. `link_gb_s`: of one link in one direction. `ethernet_per_chip`: ports of 100 Gb/s that leave
    the pod.
    """
    key = f"tpu-{version}"
    source = f"Google Cloud TPU {version} documentation (2025)"
    gpu = Gpu(name=f"TPU {version}", backend="xla", table_key=key, memory_bytes=round(gib * GIB), peak=rates(tera, gb_s))
    torus = Fabric(
        name="ICI",
        topology="torus",
        link_bytes_per_second=link_gb_s * GIGA,
        links=links,
        largest=pod,
        spans_nodes=True,
        source=link_source or f"{source}: bandwidth of a chip in both directions, halved",
    )
    outside = None
    if ethernet_per_chip is not None:
        outside = ReferenceSystem(
            name=f"Cloud TPU {version} pods", port="ethernet-100", ports_per_gpu=ethernet_per_chip, source=source
        )
    return key, GpuFacts(gpu=gpu, source=source, fabric=torus, max_per_node=pod, reference=outside)


# fmt: off
TPUS: dict[str, GpuFacts] = dict([
    _row("v4", (None, None, 275, None, None, 275),
         gib=30.75, gb_s=1200, links=6, link_gb_s=50, pod=4096, link_source=V4_LINKS),
    # A host of 8 chips has two ports.
    _row("v5e", (None, None, 197, None, None, 393),
         gib=15.75, gb_s=819, links=4, link_gb_s=50, pod=256, ethernet_per_chip=0.25),
    # "DCN bandwidth per chip: 50 Gbps".
    _row("v5p", (None, None, 459, None, 459, 918),
         gib=95.74, gb_s=2765, links=6, link_gb_s=100, pod=8960, ethernet_per_chip=0.5),
    _row("v6e", (None, None, 918, None, None, 1836),
         gib=31.25, gb_s=1638, links=4, link_gb_s=100, pod=256),
])
# fmt: on
