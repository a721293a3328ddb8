"""Compare the rates that this machine reaches with what the table of products says it should reach. Takes ten seconds."""

from __future__ import annotations

from collections.abc import Iterator

from upshift.debugging.finding import Finding, ok, unknown, warning
from upshift.hardware.catalog.efficiency import gemm_efficiency, memory_efficiency
from upshift.hardware.spec import Gpu, Host, Measured
from upshift.units import GIGA, TERA

PROBED_FLOPS = 2 * 8192**3  # of the matrix product that the probe times on a GPU
# of the datasheet's peaks, where no fit for the product is known
USUAL_SHARE = 0.6
USUAL_MEMORY = 0.7
USUAL_COPY = 0.75  # of PCIe's rate, from pinned memory
TOLERATED = 0.75  # of what is expected


def examine_rates(host: Host, measured: Measured) -> Iterator[Finding]:
    yield from _cpu(measured)
    if measured.compiler is False:
        yield warning(
            "compiler",
            what="torch.compile cannot make code for the CPU: a C++ compiler or headers are missing",
            evidence="a compiled function was tried",
            fix="sudo apt install g++ python3-dev",
        )
    gpu = host.gpu
    if gpu is None or measured.gpu is None:
        return
    if gpu.peak is None:
        yield unknown(
            "GPU rates", what=f"{gpu.name} is not in the table; measured {_gpu_words(measured)}", evidence="measured here"
        )
        return
    share = gemm_efficiency(gpu.table_key or "", PROBED_FLOPS) or USUAL_SHARE
    fix = "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER while it runs; end what else uses the GPU; then upshift doctor again"
    bf16 = gpu.peak.bf16 if measured.gpu.bf16 and gpu.supports("bf16") else None
    yield from _against("GPU matrix products", "bf16", measured.gpu.bf16, bf16, share, TERA, "TFLOP/s", fix)
    memory = memory_efficiency(gpu.table_key or "") or USUAL_MEMORY
    yield from _against(
        "GPU memory", "", measured.gpu.memory_bytes_per_second, gpu.peak.memory_bytes_per_second, memory, GIGA, "GB/s", fix
    )
    yield from _copies(host, gpu, measured)


def _copies(host: Host, gpu: Gpu, measured: Measured) -> Iterator[Finding]:
    link = host.host_to_device
    fix = "look at PCIe lanes above; bind the process to the GPU's own socket: numactl --cpunodebind=N --membind=N"
    if link is not None:
        yield from _against(
            f"copies to the GPU over {link.name}",
            "",
            measured.host_to_device_bytes_per_second,
            link.bytes_per_second,
            USUAL_COPY,
            GIGA,
            "GB/s",
            fix,
        )


def _cpu(measured: Measured) -> Iterator[Finding]:
    """Yield the measured rates of the CPU.

    No table row names the processor of this very machine with its clock, so there is nothing to compare the rates with.
    """
    rates = measured.cpu
    words = [
        f"{name} {rate / GIGA:,.0f} GFLOP/s"
        for name in ("fp32", "fp32_medium", "bf16")
        if (rate := rates.matrix(name)) is not None
    ]
    memory = f", memory {rates.memory_bytes_per_second / GIGA:.1f} GB/s" if rates.memory_bytes_per_second else ""
    yield ok(
        "CPU rates",
        what=f"{', '.join(words)}{memory}",
        evidence=f"measured on {measured.num_threads} cores; the table has no peak of this CPU",
    )


def _against(
    subject: str, precision: str, rate: float | None, peak: float | None, share: float, unit: float, name: str, fix: str
) -> Iterator[Finding]:
    if rate is None or peak is None:
        return
    what = f"{precision} {rate / unit:,.0f} {name}".strip()
    expected = share * peak
    evidence = f"measured; {expected / unit:,.0f} {name} expected, {share:.0%} of the datasheet's {peak / unit:,.0f}"
    if rate < TOLERATED * expected:
        yield warning(subject, what=f"{what}: {rate / expected:.0%} of what such a part reaches", evidence=evidence, fix=fix)
    else:
        yield ok(subject, what=what, evidence=evidence)


def _gpu_words(measured: Measured) -> str:
    rates = measured.gpu
    assert rates is not None
    bf16 = f"bf16 {rates.bf16 / TERA:,.0f} TFLOP/s" if rates.bf16 else "no bf16"
    return f"{bf16}, memory {rates.memory_bytes_per_second / GIGA:,.0f} GB/s" if rates.memory_bytes_per_second else bf16
