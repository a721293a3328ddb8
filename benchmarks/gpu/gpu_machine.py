"""Parts of the GPU check that look at the machine: its facts, its rates, and the tests of tests/gpu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_process import PartRequest
from gpu_rows import Answer

from upshift.debugging.doctor import examine
from upshift.hardware import detect
from upshift.hardware.probe_cache import measure
from upshift.hardware.spec import Host, Measured, Rates

ROOT = Path(__file__).parents[2]
MATRIX_PRECISIONS = ("fp32", "fp32_medium", "bf16", "fp16")
LEAST_SHARE = 0.5  # of the data sheet's 16-bit rate; a GPU that multiplies large matrices reaches 0.6 to 0.9 of it
FP8_CAPABILITY = (8, 9)
VARIABLES = (  # that change what the GPU computes, or how fast processes start
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTHONDONTWRITEBYTECODE", "NCCL_P2P_DISABLE",
)  # fmt: skip
QUICK_TESTS = "steps_are_those or fused_adamw"
TERA = 1e12
GIGA = 1e9


def read_facts(request: PartRequest) -> Answer:
    """Keep what torch and ``upshift doctor --quick`` say of the machine. Fail if the doctor finds an error."""
    import torch

    diagnosis = examine(quick=True, output=request.work)
    (request.part_folder / "doctor.json").write_text(diagnosis.to_json(indent=1), encoding="utf-8")
    errors = [finding for finding in diagnosis.findings if finding.severity == "error"]
    warnings = [finding.subject for finding in diagnosis.findings if finding.severity == "warning"]
    facts = torch_facts(len(request.names))
    if errors:
        first = errors[0]
        return Answer(reason=f"upshift doctor: {first.subject}: {first.what}", failed=True, details=facts)
    words = f"torch {torch.__version__}, CUDA {torch.version.cuda}, capability {facts['capabilities'][0]}"
    count = len(request.names)
    if count > 1:
        words += f"; {len(facts['peers'])} of {count * (count - 1)} pairs of GPUs copy directly"
    if warnings:
        words += f"; the doctor warns of {', '.join(warnings)}"
    return Answer(reason=words, details=facts)


def torch_facts(count: int) -> dict[str, Any]:
    import torch

    capabilities = [torch.cuda.get_device_capability(number) for number in range(count)]
    return {
        "capabilities": [f"{major}.{minor}" for major, minor in capabilities],
        "architectures": torch.cuda.get_arch_list(),
        "triton": find_spec("triton") is not None,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "tf32_is_allowed": tf32_is_allowed(),
        "c_compiler": any(shutil.which(name) for name in ("cc", "gcc", "clang")),
        "peers": [
            [first, second]
            for first in range(count) for second in range(count)
            if first != second and torch.cuda.can_device_access_peer(first, second)
        ],
    }  # fmt: skip


def tf32_is_allowed() -> bool:
    """Return whether torch allows TF32 after the setting that plans in tf32 make."""
    import torch

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    finally:
        torch.set_float32_matmul_precision(precision)


def probe_rates(request: PartRequest) -> Answer:
    """Measure the machine anew. Compare the rate of 16-bit products with the data sheet's."""
    here = detect()
    host = measure(here, refresh=not request.quick)
    if len(request.names) > 1:
        measure(here.one_device(), refresh=not request.quick)  # kept for the parts that see one GPU
    measured = host.measured
    if measured is None or measured.gpu is None:
        return Answer(reason="the probe measured no rate of the GPU", failed=True)
    fp8 = fp8_rate(request)
    peak = host.gpu.peak if host.gpu else None
    precision = "bf16" if measured.gpu.bf16 else "fp16"
    rate = measured.gpu.matrix(precision)  # type: ignore[arg-type]
    rated = peak.matrix(precision) if peak else None  # type: ignore[arg-type]
    share = rate / rated if rate and rated else None
    slower = share is not None and share < LEAST_SHARE
    words = rates_in_words(measured, fp8)
    if share is not None:
        words += f"; {precision} is {share:.2f} of the data sheet's {(rated or 0.0) / TERA:.0f}"
    return Answer(
        reason=words, unit="FLOP/s", predicted=rated, measured=rate, slower=slower,
        details={"measured": measured.model_dump(mode="json"), "fp8": fp8, "peers": peers_in_words(host)},
    )  # fmt: skip


def rates_in_words(measured: Measured, fp8: float | str) -> str:
    rates = measured.gpu or Rates()
    words = [f"{name} {rate / TERA:,.1f}" for name in MATRIX_PRECISIONS if (rate := rates.matrix(name))]  # type: ignore[arg-type]
    words += [f"fp8 {fp8 / TERA:,.1f}"] if isinstance(fp8, float) else []
    text = f"{', '.join(words)} TFLOP/s"
    if rates.memory_bytes_per_second:
        text += f", memory {rates.memory_bytes_per_second / GIGA:,.0f} GB/s"
    link = measured.gpu_exchanges.get("all_reduce")
    if link is not None:
        text += f", all_reduce of {measured.gpu_exchange_ranks} GPUs {link.bytes_per_second / GIGA:,.1f} GB/s"
    return text


def peers_in_words(host: Host) -> str | None:
    return host.intra_node.name if host.intra_node else None


def fp8_rate(request: PartRequest) -> float | str:
    """Return the FLOP/s of fp8 products, by the operator that torchao's training uses, or why there is none."""
    import torch

    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        return "the GPU has no fp8"
    size = 256 if request.quick else 8192
    left = torch.ones(size, size, device="cuda").to(torch.float8_e4m3fn)
    right = torch.ones(size, size, device="cuda").to(torch.float8_e4m3fn).t()
    scale = torch.ones((), device="cuda")
    try:
        seconds = seconds_of(lambda: torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return 2 * float(size) ** 3 / seconds


def seconds_of(call: Callable[[], object], repeats: int = 10) -> float:
    """Return the seconds of one call on the GPU, the mean of several after a first one."""
    import torch

    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def run_tests(request: PartRequest) -> Answer:
    """Run tests/gpu by pytest, and name the tests that fail."""
    if find_spec("pytest") is None or find_spec("hypothesis") is None:
        return Answer(reason="the tests need pytest and hypothesis: pip install pytest hypothesis", skipped=True)
    report = request.part_folder / "junit.xml"
    report.unlink(missing_ok=True)
    chosen = ["-k", QUICK_TESTS] if request.quick else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", f"--junit-xml={report}", *chosen],
        cwd=ROOT, stdout=sys.stderr, check=False,
    )  # fmt: skip
    if not report.is_file():
        return Answer(reason=f"pytest ended with exit code {done.returncode} and without a report", failed=True)
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case.get("name") or "" for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    counts = f"{passed} passed, {skipped} skipped"
    if failed:
        return Answer(reason=f"{len(failed)} failed, {counts}: {', '.join(failed)}", failed=True)
    if not passed:
        return Answer(reason=f"no test ran ({counts}), pytest's exit code is {done.returncode}", failed=True)
    return Answer(reason=counts)
