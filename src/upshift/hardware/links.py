"""Compute links from their specifications, as upper bounds: from host to GPU, and between the GPUs of a node."""

from __future__ import annotations

from upshift.hardware.spec import Gpu, Link
from upshift.units import GIGA

# Bytes/s of one lane in one direction after line coding: PCI Express base specification 3.0, 4.0 (128b/130b), 5.0.
PCIE_LANE_BYTES_PER_SECOND = {3: 0.985 * GIGA, 4: 1.969 * GIGA, 5: 3.938 * GIGA}


def pcie_link(gpu: Gpu) -> Link | None:
    """Return the PCIe connection of a GPU at its specified rate, an upper bound."""
    lane = PCIE_LANE_BYTES_PER_SECOND.get(gpu.pcie_generation or 0)
    if lane is None or gpu.pcie_width is None:
        return None
    return Link(name=f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}", bytes_per_second=lane * gpu.pcie_width)


def gpu_link(gpu: Gpu) -> Link | None:
    """Return the connection between GPUs of one node at its specified rate: NVLink where there is one, else PCIe."""
    if gpu.nvlink_bytes_per_second is not None:
        return Link(name=f"NVLink x{gpu.nvlink_links}", bytes_per_second=gpu.nvlink_bytes_per_second)
    return pcie_link(gpu) if gpu.nvlink_links == 0 else None
