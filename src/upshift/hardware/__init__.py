"""Describe this machine, or a machine to rent. Nothing here needs torch, except `upshift.hardware.probe`: import it by name."""

from upshift.hardware.catalog.cpus import CPUS
from upshift.hardware.catalog.efficiency import (
    AttentionKernel,
    attention_efficiency,
    collective,
    efficiency_row,
    gemm_efficiency,
    memory_efficiency,
)
from upshift.hardware.catalog.interconnect import PORTS
from upshift.hardware.catalog.lookup import GPUS, describe
from upshift.hardware.catalog.row import CpuFacts, GpuFacts
from upshift.hardware.detect import detect
from upshift.hardware.spec import Cpu, Gpu, Host, Isa, Link, Measured, Precision, Rates

__all__ = [
    "CPUS",
    "GPUS",
    "PORTS",
    "AttentionKernel",
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
    "attention_efficiency",
    "collective",
    "describe",
    "detect",
    "efficiency_row",
    "gemm_efficiency",
    "memory_efficiency",
]
