"""TOY's accelerators. Every figure from one datasheet, dense, and None where it is not printed.

Copy to src/upshift/hardware/catalog/vendors/NAME.py. A product of a vendor that has a file is a row in that file instead.
"""

from __future__ import annotations

from upshift.hardware.catalog.row import GpuFacts, rates
from upshift.hardware.spec import Gpu
from upshift.units import GIB

SOURCE = "Toy T1 datasheet (2026)"

CHIPS: dict[str, GpuFacts] = {
    "toy-t1": GpuFacts(
        source=SOURCE,
        max_per_node=8,
        gpu=Gpu(
            name="Toy T1", backend="rocm", table_key="toy-t1", memory_bytes=64 * GIB, tdp_watts=500,
            pcie_generation=5, pcie_width=16,
            peak=rates((50, None, 400, 400, 800, 800), 3200),  # tera/s in fp32, tf32, bf16, fp16, fp8, int8; GB/s of the memory
        ),
    )
}  # fmt: skip
