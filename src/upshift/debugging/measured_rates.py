"""Compare the measured rates of this machine with the rates that its products should reach according to the catalog."""

from __future__ import annotations

from collections.abc import Iterator

from upshift.debugging.finding import Finding, ok, unknown, warning
from upshift.hardware.catalog.efficiency import efficiency_row, gemm_efficiency, memory_efficiency
from upshift.hardware.spec import Gpu, Host, Measured, Precision
from upshift.units import GIGA, TERA

PROBED_FLOPS = 2 * 8192**3  # FLOPs of the matrix product that the probe times on a GPU
# Shares of the datasheet's peaks, for products without published measurements.
USUAL_SHARE = 0.6
USUAL_MEMORY = 0.7
USUAL_COPY = 0.75  # share of PCIe's rate, from pinned memory
TOLERATED = 0.75  # share of the expected rate


def examine_rates(host: Host, measured: Measured, *, limit_watts: float | None = None) -> Iterator[Finding]:
    """Yield findings about the measured rates.

    ``limit_watts``: the power limit that the driver enforces on the GPU; None: the driver does not say.
    """
    yield from _cpu(measured)
    if measured.compiler is False:
        yield warning(
            "compiler",
            what="torch.compile cannot make code for the CPU: a C++ compiler or headers are missing",
            evidence="the compiler of torch.compile did not accept a file that includes Python.h, cmath and omp.h",
            fix="sudo apt install g++ python3-dev",
        )
    gpu = host.gpu
    if gpu is None or measured.gpu is None:
        return
    if gpu.peak is None:
        yield unknown(
            "GPU rates", what=f"{gpu.name} is not in the table; measured {_describe_gpu(measured)}", evidence="measured here"
        )
        return
    share = _expected_share(gpu, limit_watts)
    fix = "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER while it runs; end what else uses the GPU; then upshift doctor again"
    bf16 = gpu.peak.bf16 if measured.gpu.bf16 and gpu.supports("bf16") else None
    yield from _compare_rate("GPU matrix products", "bf16", measured.gpu.bf16, bf16, share, TERA, "TFLOP/s", fix)
    memory = memory_efficiency(gpu.table_key or "") or USUAL_MEMORY
    yield from _compare_rate(
        "GPU memory", "", measured.gpu.memory_bytes_per_second, gpu.peak.memory_bytes_per_second, memory, GIGA, "GB/s", fix
    )
    yield from _copies(host, gpu, measured)


def _expected_share(gpu: Gpu, limit_watts: float | None) -> float:
    """Return the share of the bf16 peak that the probed product should reach.

    The datasheet's peak is at the boost clock. A GPU whose power limit is below the listed power has a lower clock; it needs at
    least as large a share of the power as of the clock. Drivers of laptops often hide the limit.
    """
    share = gemm_efficiency(efficiency_row(gpu, "bf16"), PROBED_FLOPS) or USUAL_SHARE
    if limit_watts is not None and gpu.tdp_watts is not None:
        return share * min(limit_watts / gpu.tdp_watts, 1.0)
    return min(share, USUAL_SHARE) if gpu.is_geforce and not gpu.is_desktop_geforce else share


def _copies(host: Host, gpu: Gpu, measured: Measured) -> Iterator[Finding]:
    link = host.host_to_device
    fix = "look at PCIe lanes above; bind the process to the GPU's own socket: numactl --cpunodebind=N --membind=N"
    if link is not None:
        yield from _compare_rate(
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
    """Yield the measured rates of the CPU. The catalog has no row for this machine's processor and clock to compare with."""
    rates = measured.cpu
    precisions: tuple[Precision, ...] = ("fp32", "fp32_medium", "bf16")
    descriptions = []
    for name in precisions:
        rate = rates.matrix(name)
        if rate is not None:
            descriptions.append(f"{name} {rate / GIGA:,.0f} GFLOP/s")
    memory = f", memory {rates.memory_bytes_per_second / GIGA:.1f} GB/s" if rates.memory_bytes_per_second else ""
    yield ok(
        "CPU rates",
        what=f"{', '.join(descriptions)}{memory}",
        evidence=f"measured on {measured.num_threads} cores; the table has no peak of this CPU",
    )


def _compare_rate(
    subject: str, precision: str, rate: float | None, peak: float | None, share: float, unit: float, name: str, fix: str
) -> Iterator[Finding]:
    if rate is None or peak is None:
        return
    measured_rate = f"{precision} {rate / unit:,.0f} {name}".strip()
    expected = share * peak
    evidence = f"measured; {expected / unit:,.0f} {name} expected, {share:.0%} of the datasheet's {peak / unit:,.0f}"
    if rate < TOLERATED * expected:
        yield warning(
            subject, what=f"{measured_rate}: {rate / expected:.0%} of what such a part reaches", evidence=evidence, fix=fix
        )
    else:
        yield ok(subject, what=measured_rate, evidence=evidence)


def _describe_gpu(measured: Measured) -> str:
    rates = measured.gpu
    assert rates is not None
    bf16 = f"bf16 {rates.bf16 / TERA:,.0f} TFLOP/s" if rates.bf16 else "no bf16"
    if rates.memory_bytes_per_second:
        return f"{bf16}, memory {rates.memory_bytes_per_second / GIGA:,.0f} GB/s"
    return bf16
