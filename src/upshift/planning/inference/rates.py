"""Compute the rates of one device: matrix products by size, memory, launches.

Rates are measured where the host was probed, else the datasheet's times the share that such parts reach.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from math import log
from typing import Literal

from upshift.hardware import memory_efficiency
from upshift.hardware.efficiency import GEMM_CLASSES, GEMM_EFFICIENCY
from upshift.hardware.spec import Host, Rates
from upshift.hardware.spec import Precision as MatrixPrecision
from upshift.planning.cost.rates import (
    CPU_ATTENTION_SHARE,
    CPU_DISPATCH_SECONDS,
    DEFAULT_GEMM_EFFICIENCY,
    DEFAULT_MEMORY_EFFICIENCY,
)
from upshift.planning.inference.formats import WeightPrecision
from upshift.planning.inference.plan import Execution

GPU_ATTENTION_SHARE = 0.6  # of the matrix rate: forward FlashAttention 2 against GEMM on A100, Dao 2023, figure 4
# Reading the cache, of the bandwidth: split over the sequence, as FlashDecoding and paged attention do, it is a plain stream.
CACHE_READ_SHARE = 0.8
# Reading weights for few tokens, likewise: gpt-fast's Llama-2-7B on an A100 (batch 1, bf16) and TensorRT-LLM's Llama 3.1 8B on
# an H100 (2 requests/s, bf16) leave 7.8 and 5.3 ms for 13.2 and 15.0 GB, launches taken off: 0.83 and 0.85.
WEIGHT_READ_SHARE = 0.84
# Seconds a layer. Replayed, gaps between some ten kernels that the device cannot fill; eagerly, what Python takes to queue them
# (LitGPT's Llama 2 7B at batch 1 on an A100: 32 ms for 32 layers).
LAYER_SECONDS: dict[Execution, float] = {"graphs": 2.2e-5, "eager": 1.0e-3}
CPU_DISPATCHES_PER_LAYER = 180.0  # eager modules and operators of a layer, over one bare operator
CPU_GRAPH_SHARE = 0.3  # of these dispatches, those that compiling leaves: COMPILED_KERNEL_SHARE of planning.cost.time
LOG_CENTRES = tuple(log(bound * 10**0.5) for bound in GEMM_CLASSES)  # of the classes, each a decade


@dataclass(frozen=True)
class DeviceRates:
    """The rates of one device. ``efficiencies``: shares of ``matrix``, at the centres of GEMM_CLASSES; empty: the same at every
    size."""

    matrix: float
    outside: float  # of products with embedding and head, which are not quantized
    attention: float
    memory: float
    weights: float  # bytes of weights a second, where few tokens use them
    cache: float
    layer_seconds: float
    efficiencies: tuple[float, ...] = ()

    def efficiency(self, flops: float) -> float:
        """Return the efficiency of one product.

        It lies between the classes' centres on a logarithmic scale, so that more work never takes less time.
        """
        shares = self.efficiencies
        if not shares:
            return 1.0
        place = log(flops) if flops > 1.0 else 0.0
        if place <= LOG_CENTRES[0]:
            return shares[0]
        if place >= LOG_CENTRES[-1]:
            return shares[-1]
        above = bisect(LOG_CENTRES, place)
        low, high = LOG_CENTRES[above - 1], LOG_CENTRES[above]
        return shares[above - 1] + (shares[above] - shares[above - 1]) * (place - low) / (high - low)


def device_rates(host: Host, weights: WeightPrecision, computes: MatrixPrecision, execution: Execution) -> DeviceRates | None:
    """Return the device's rates; None where the rate in this precision is unknown: such a plan cannot be ranked."""
    beside: MatrixPrecision = weights if weights in ("fp32", "fp16") else beside_rounded(host)
    if computes == "bf16":
        computes = beside
    return _cpu(host, computes, beside, execution) if host.device == "cpu" else _accelerator(host, computes, beside, execution)


def beside_rounded(host: Host) -> Literal["bf16", "fp16", "fp32"]:
    """Return the precision that is computed in beside weights of fewer bits. CPUs without bf16 compute in fp32."""
    if host.supports("bf16") is not False:
        return "bf16"
    return "fp32" if host.device == "cpu" else "fp16"


def _accelerator(host: Host, computes: MatrixPrecision, beside: MatrixPrecision, execution: Execution) -> DeviceRates | None:
    gpu, measured = host.gpu, host.measured_gpu
    if gpu is None or (gpu.peak is None and measured is None):
        return None
    key, rates = gpu.table_key or "", measured or gpu.peak
    assert rates is not None
    matrix, outside, bandwidth = rates.matrix(computes), rates.matrix(beside), rates.memory_bytes_per_second
    if matrix is None or outside is None or bandwidth is None:
        return None
    shares = _shares(key)
    if measured is not None:  # large products were measured, so only the loss of smaller ones counts
        shares = tuple(min(share / max(shares), 1.0) for share in shares) if shares else ()
        memory = bandwidth
    else:
        shares = shares or (DEFAULT_GEMM_EFFICIENCY,) * len(GEMM_CLASSES)
        memory = bandwidth * (memory_efficiency(key) or DEFAULT_MEMORY_EFFICIENCY)
    return DeviceRates(
        matrix=matrix,
        outside=outside,
        attention=outside * GPU_ATTENTION_SHARE * (max(shares) if shares else 1.0),
        memory=memory,
        weights=max(bandwidth * WEIGHT_READ_SHARE, memory),
        cache=max(bandwidth * CACHE_READ_SHARE, memory),
        layer_seconds=LAYER_SECONDS[execution],
        efficiencies=shares,
    )


def _shares(key: str) -> tuple[float, ...]:
    """Return the efficiencies by class. Where the largest was not measured, the one below stands for it."""
    known = GEMM_EFFICIENCY.get(key, ())
    shares: list[float] = []
    for share in known:
        shares.append(share if share is not None else shares[-1])
    return tuple(shares)


def _cpu(host: Host, computes: MatrixPrecision, beside: MatrixPrecision, execution: Execution) -> DeviceRates | None:
    measured, cpu = host.measured, host.cpu
    rates: Rates | None = measured.cpu if measured else cpu.peak if cpu else None
    if rates is None:
        return None
    matrix, outside, bandwidth = rates.matrix(computes), rates.matrix(beside), rates.memory_bytes_per_second
    fp32 = rates.matrix("fp32")
    if matrix is None or outside is None or bandwidth is None or fp32 is None:
        return None
    share = 1.0 if measured else DEFAULT_GEMM_EFFICIENCY
    memory = bandwidth * (1.0 if measured else DEFAULT_MEMORY_EFFICIENCY)
    dispatch = measured.dispatch_seconds if measured else CPU_DISPATCH_SECONDS
    left = CPU_GRAPH_SHARE if execution == "graphs" else 1.0
    return DeviceRates(
        matrix=matrix * share,
        outside=outside * share,
        attention=CPU_ATTENTION_SHARE * fp32 * share,
        memory=memory,
        weights=memory,
        cache=memory,
        layer_seconds=dispatch * CPU_DISPATCHES_PER_LAYER * left,
    )
