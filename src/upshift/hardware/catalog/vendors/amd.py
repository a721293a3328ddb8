"""List AMD's data centre accelerators under ROCm.

Rates are dense rates of the matrix cores. `memory_bytes` is the total that rocm-smi reports. An MI250 appears as two devices, its
graphics compute dies (GCDs), and the row describes one of them. MI300X also multiplies in TF32 (653.7 TFLOP/s, data sheet), but
PyTorch uses it only if HIPBLASLT_ALLOW_TF32 is set, so fp32_medium stays unknown.
"""

from __future__ import annotations

from upshift.hardware.catalog.row import Fabric, GpuFacts, ReferenceSystem, Tera, rates
from upshift.hardware.spec import Gpu
from upshift.units import GIB, GIGA

MI250 = "AMD Instinct MI250 data sheet (2021), halved: one of its two dies; memory: ROCm documentation, MI250 (2025)"
MI300X = "AMD Instinct MI300X data sheet (2023)"
# To dies of other packages a GCD has up to three links of 50 GB/s, unevenly, so there is no single rate (ROCm documentation).
MI250_PACKAGE = Fabric(
    name="Infinity Fabric",
    topology="switch",
    link_bytes_per_second=50 * GIGA,
    links=4,
    largest=2,
    source="ROCm documentation, MI250 microarchitecture (2025), and AMD at Hot Chips 34 (2022): 4 links inside the package",
)
MI300X_PLATFORM = Fabric(
    name="Infinity Fabric",
    topology="mesh",
    link_bytes_per_second=64 * GIGA,
    links=1,
    largest=8,
    source="AMD Instinct MI300X platform data sheet (2023): 128 GB/s in both directions to each of seven peers",
)
MI300_CLUSTER = ReferenceSystem(
    name="MI300 series cluster",
    port="roce-400",
    ports_per_gpu=1,
    source="AMD Instinct MI300 Series Cluster Reference Architecture Guide 63916 v1.00 (2024)",
)

# What the rates are made of: 104 units x 1024 bf16 operations x 1.7 GHz; those of MI300X; 256 units x 4096 x 2.2 or 2.4 GHz.
MI210 = "AMD Instinct MI210 data sheet (2022); cores, clock, bandwidth and power also in TechPowerUp's GPU database"
MI325X = "AMD Instinct MI325X data sheet (2024), also at awesomeagents.ai; memory: ROCm documentation, GPU specifications (2026)"
MI350 = "AMD Instinct MI350 series at Hot Chips 2025 and ISSCC 2026: clocks, power, 8192 FP8 operations a unit; memory: ROCm docs"
MI3XX_CLUSTER = ReferenceSystem(
    name="MI3XX reference design",
    port="roce-400",
    ports_per_gpu=1,
    source="AMD Instinct MI3XX Reference Design, and ROCm documentation, SGLang with MoRI (2026): 8 NICs of 400 Gb/s for 8 GPUs",
)
MI350X_PLATFORM = Fabric(
    name="Infinity Fabric", topology="mesh", link_bytes_per_second=76.8 * GIGA, links=1, largest=8,
    source="AMD Instinct MI350X platform (2025), as multiplanar.agentic24x7.net has it: 1075 GB/s in both directions, 7 links",
)  # fmt: skip


def _row(
    key: str, source: str, tera: Tera, *, gib: int, gb_s: float, watts: float, pcie: int, fabric: Fabric | None = None
) -> tuple[str, GpuFacts]:
    """Return a key and its row. `gib` and `gb_s`: of the memory, of which drivers report some MiB less."""
    gpu = Gpu(
        name=f"AMD Instinct {key.upper()}", backend="rocm", table_key=key, memory_bytes=gib * GIB, pcie_generation=pcie,
        pcie_width=16, tdp_watts=watts, peak=rates(tera, gb_s),
    )  # fmt: skip
    reference = None if fabric is None else MI3XX_CLUSTER
    return key, GpuFacts(gpu=gpu, source=source, fabric=fabric, max_per_node=8, reference=reference)


CHIPS: dict[str, GpuFacts] = {
    "mi250-gcd": GpuFacts(
        gpu=Gpu(
            name="AMD Instinct MI250, one GCD",
            backend="rocm",
            table_key="mi250-gcd",
            memory_bytes=68_702_699_520,
            tdp_watts=250,
            peak=rates((45.25, None, 181.05, 181.05, None, 181.05), gb_s=1638.4),
        ),
        source=MI250,
        fabric=MI250_PACKAGE,
        max_per_node=16,
    ),
    "mi300x": GpuFacts(
        gpu=Gpu(
            name="AMD Instinct MI300X",
            backend="rocm",
            table_key="mi300x",
            memory_bytes=206_141_652_992,
            pcie_generation=5,
            pcie_width=16,
            tdp_watts=750,
            peak=rates((163.4, None, 1307.4, 1307.4, 2614.9, 2614.9), gb_s=5300),
        ),
        source=MI300X,
        fabric=MI300X_PLATFORM,
        max_per_node=8,
        reference=MI300_CLUSTER,
    ),
} | dict(
    [
        _row("mi210", MI210, (45.3, None, 181.0, 181.0, None, 181.0), gib=64, gb_s=1638.4, watts=300, pcie=4),
        _row("mi325x", MI325X, (163.4, None, 1307.4, 1307.4, 2614.9, 2614.9), gib=256, gb_s=6000, watts=1000, pcie=5,
             fabric=MI300X_PLATFORM),
        _row("mi350x", MI350, (144.2, None, 2306.9, 2306.9, 4613.7, 4613.7), gib=288, gb_s=8000, watts=1000, pcie=5,
             fabric=MI350X_PLATFORM),
        _row("mi355x", MI350, (157.3, None, 2516.6, 2516.6, 5033.2, 5033.2), gib=288, gb_s=8000, watts=1400, pcie=5,
             fabric=MI350X_PLATFORM),
    ]
)  # fmt: skip
FAMILIES = {"mi250": ("mi250-gcd",)}
