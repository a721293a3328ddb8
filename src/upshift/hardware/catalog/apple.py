"""List the GPUs of Apple's M chips, one in each Mac, with a row for each size of the unified memory.

Apple publishes bandwidths, and for some chips the FP32 rate of the largest GPU, but no other rates and no power. An M3 Max or an
M4 Max may have one of two bandwidths. The size of the memory tells which.
"""

from __future__ import annotations

from upshift.hardware.catalog.row import GpuFacts, rates
from upshift.hardware.spec import Gpu
from upshift.units import GIB

NEWSROOM = "Apple newsroom and Mac technical specifications"
M1 = "Apple newsroom, M1 (2020); bandwidth: LPDDR4X-4266 on 128 bits"
# Source, FP32 in 10**12 per second, and for each bandwidth in GB/s the memory sizes in GB that have it.
Chip = tuple[str, float | None, dict[float, tuple[int, ...]]]
CHIPS: dict[str, Chip] = {
    "M1": (M1, 2.6, {68.25: (8, 16)}),
    "M1 Pro": ("Apple event and newsroom, October 2021", 5.2, {200: (16, 32)}),
    "M1 Max": ("Apple event and newsroom, October 2021", 10.4, {400: (32, 64)}),
    "M1 Ultra": (f"{NEWSROOM} (2022)", None, {800: (64, 128)}),
    "M2": ("Apple keynote and newsroom, June 2022", 3.6, {100: (8, 16, 24)}),
    "M2 Pro": (f"{NEWSROOM} (2023)", None, {200: (16, 32)}),
    "M2 Max": (f"{NEWSROOM} (2023)", None, {400: (32, 64, 96)}),
    "M2 Ultra": (f"{NEWSROOM} (2023)", None, {800: (64, 128, 192)}),
    "M3": (f"{NEWSROOM} (2023)", None, {100: (8, 16, 24)}),
    "M3 Pro": (f"{NEWSROOM} (2023)", None, {150: (18, 36)}),
    "M3 Max": (f"{NEWSROOM} (2023)", None, {300: (36, 96), 400: (48, 64, 128)}),
    "M3 Ultra": (f"{NEWSROOM} (2025)", None, {819: (96, 256, 512)}),
    "M4": (f"{NEWSROOM} (2024)", None, {120: (16, 24, 32)}),
    "M4 Pro": (f"{NEWSROOM} (2024)", None, {273: (24, 48, 64)}),
    "M4 Max": (f"{NEWSROOM} (2024)", None, {410: (36,), 546: (48, 64, 128)}),
}


def _rows(chip: str, source: str, fp32: float | None, sizes: dict[float, tuple[int, ...]]) -> dict[str, GpuFacts]:
    rows = {}
    for gb_s, memories in sizes.items():
        peak = rates((fp32, None, None, None, None, None), gb_s)
        for gib in memories:  # Apple writes GB for GiB of memory
            key = f"{chip.lower().replace(' ', '-')}-{gib}gb"
            gpu = Gpu(
                name=f"Apple {chip} {gib}GB",
                backend="mps",
                table_key=key,
                memory_bytes=gib * GIB,
                shares_host_memory=True,
                peak=peak,
            )
            rows[key] = GpuFacts(gpu=gpu, source=source, max_per_node=1)
    return rows


BY_CHIP = {chip.lower().replace(" ", "-"): _rows(chip, *row) for chip, row in CHIPS.items()}
APPLE_GPUS: dict[str, GpuFacts] = {key: facts for rows in BY_CHIP.values() for key, facts in rows.items()}
APPLE_CHOICES: dict[str, tuple[str, ...]] = {chip: tuple(rows) for chip, rows in BY_CHIP.items()}
