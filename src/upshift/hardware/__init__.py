"""What machine is here, or about to be rented. Light; `upshift.hardware.probe` needs torch: import it by name."""

from upshift.hardware.detect import detect
from upshift.hardware.spec import Cpu, Gpu, Host, Isa, Link, Measured, Precision, Rates
from upshift.hardware.table import GPUS, collective, describe, gemm_efficiency, memory_efficiency

__all__ = [
    "GPUS",
    "Cpu",
    "Gpu",
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
