"""Describe the machine that is here, or about to be rented. Light; `upshift.hardware.probe` needs torch: import it by name."""

from upshift.hardware.cpus import CPUS
from upshift.hardware.detect import detect
from upshift.hardware.efficiency import collective, gemm_efficiency, memory_efficiency
from upshift.hardware.facts import CpuFacts, GpuFacts
from upshift.hardware.network import PORTS
from upshift.hardware.spec import Cpu, Gpu, Host, Isa, Link, Measured, Precision, Rates
from upshift.hardware.table import GPUS, describe

__all__ = [
    "CPUS",
    "GPUS",
    "PORTS",
    "Cpu",
    "CpuFacts",
    "Gpu",
    "GpuFacts",
    "Host",
    "Isa",
    "Link",
    "Measured",
    "Precision",
    "Rates",
    "collective",
    "describe",
    "detect",
    "gemm_efficiency",
    "memory_efficiency",
]
