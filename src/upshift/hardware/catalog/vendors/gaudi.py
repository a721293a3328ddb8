"""List Intel's Gaudi accelerators (OAM). Intel publishes the matrix engine's rates for BF16 and FP8 only.

Each accelerator has 24 Ethernet ports: three to each of seven peers in a server of eight, and three that leave the server.
"""

from __future__ import annotations

from upshift.hardware.catalog.row import Fabric, GpuFacts, ReferenceSystem, Tera, rates
from upshift.hardware.spec import Gpu
from upshift.units import GIB, GIGA

GAUDI2 = "Intel Gaudi 2 white paper (2022) and Intel at Hot Chips 36 (2024)"
GAUDI3 = "Intel at Hot Chips 36 (2024), Gaudi 3 OAM, cooled by air"
PORTS = "Intel Gaudi documentation, network configuration (2025)"


def _row(
    key: str, name: str, source: str, tera: Tera, *, gib: int, gb_s: float, watts: float, pcie: int, port_gbit: int, system: str
) -> tuple[str, GpuFacts]:
    """Return a key and its row. `gib` and `gb_s`: of the memory."""
    gpu = Gpu(
        name=name,
        backend="hpu",
        table_key=key,
        memory_bytes=gib * GIB,
        pcie_generation=pcie,
        pcie_width=16,
        tdp_watts=watts,
        peak=rates(tera, gb_s),
    )
    mesh = Fabric(
        name=f"RoCE {port_gbit}", topology="mesh", link_bytes_per_second=port_gbit / 8 * GIGA, links=3, largest=8, source=PORTS
    )
    outside = ReferenceSystem(name=system, port=f"roce-{port_gbit}", ports_per_gpu=3, source=PORTS)
    return key, GpuFacts(gpu=gpu, source=source, fabric=mesh, max_per_node=8, reference=outside)


# fmt: off
CHIPS: dict[str, GpuFacts] = dict([
    _row("gaudi-2", "Intel Gaudi 2", GAUDI2, (None, None, 432, None, 865, None),
         gib=96, gb_s=2460, watts=600, pcie=4, port_gbit=100, system="HLS-2"),
    _row("gaudi-3", "Intel Gaudi 3", GAUDI3, (None, None, 1835, None, 1835, None),
         gib=128, gb_s=3670, watts=900, pcie=5, port_gbit=200, system="HLS-3"),
])
# fmt: on
FAMILIES = {"gaudi": tuple(CHIPS)}
