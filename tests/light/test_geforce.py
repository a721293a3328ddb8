"""Cards whose tensor cores accumulate in FP32 at half of their rate: GeForce cards, and A10G and L40."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_requests import model_of
from test_hardware import FakeNvml

from upshift.debugging.measured_rates import examine_rates
from upshift.hardware import GPUS, describe, detect, efficiency_row, gemm_efficiency
from upshift.hardware.spec import Gpu, Host, Measured, Precision, Rates
from upshift.planning.cost.network import _node_rate
from upshift.planning.cost.rates import DEFAULT_GEMM_EFFICIENCY, predict_rates
from upshift.planning.inference.time import DeviceRates, device_rates
from upshift.planning.plan import Plan
from upshift.units import GIB

PROFILE = model_of("full", "causal-lm", longest=4096)
LARGE, SMALL = 1e12, 1e9  # FLOP of a matrix product


def training_rates(host: Host, precision: str = "bf16") -> Any:
    plan = Plan(
        device="cuda", host="h", model="m", sequence_length=4096, precision=precision, per_device_train_batch_size=8
    )  # fmt: skip
    found = predict_rates(host, PROFILE, plan)
    assert found is not None
    return found


def serving_rates(host: Host, weights: Any, computes: Precision) -> DeviceRates:
    found = device_rates(host, weights, computes, "graphs")
    assert found is not None
    return found


def detected(name: str, listed: Gpu, *, count: int = 1) -> Host:
    """Return the machine that the driver describes as this card, with the memory and the capability of a listed one."""
    nvml: Any = FakeNvml(*((name, 20 * GIB) for _ in range(count)))
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=listed.memory_bytes, free=20 * GIB)
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: listed.compute_capability
    nvml.nvmlDeviceGetMaxPcieLinkGeneration = lambda handle: listed.pcie_generation
    nvml.nvmlDeviceGetMaxPcieLinkWidth = lambda handle: listed.pcie_width
    nvml.nvmlDeviceGetNumGpuCores = lambda handle: 16384
    nvml.nvmlDeviceGetMaxClockInfo = lambda handle, kind: 10501 if kind == 2 else 2520
    nvml.nvmlDeviceGetMemoryBusWidth = lambda handle: 384
    return detect(Path("/nonexistent"), nvml=nvml)


def test_a_card_has_the_same_rates_however_the_host_came_about() -> None:
    """Described, detected by the driver, read from a JSON file, and written in Python."""
    described = describe("2xrtx-4090")
    assert described.gpu is not None
    document = json.loads(described.model_dump_json())
    assert "is_geforce" not in document["gpu"]  # as in files that were saved before there was such a field
    by_hand = Gpu(
        name="NVIDIA GeForce RTX 4090", memory_bytes=described.gpu.memory_bytes, compute_capability=(8, 9), nvlink_links=0,
        pcie_generation=4, pcie_width=16, peak=described.gpu.peak,
    )  # fmt: skip
    hosts = (
        detected("NVIDIA GeForce RTX 4090", described.gpu, count=2),
        Host.model_validate(document),
        described.changed(gpu=by_hand),
    )
    for host in hosts:
        assert training_rates(host) == training_rates(described)
        assert serving_rates(host, "bf16", "bf16") == serving_rates(described, "bf16", "bf16")
        assert _node_rate(host) == _node_rate(described)
    assert _node_rate(described) != _node_rate(described.changed(gpu=described.gpu.changed(name="NVIDIA RTX X")))


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 5090 D v2", "NVIDIA GeForce RTX 5090 Laptop GPU"])
def test_an_unlisted_card_has_the_efficiency_of_the_listed_ones(name: str) -> None:
    listed = GPUS["rtx-4090"].gpu
    gpu = detected(name, listed).gpu
    assert gpu is not None and gpu.table_key is None and gpu.peak is not None and gpu.halves_tensor_cores
    assert gemm_efficiency(efficiency_row(gpu, "bf16"), LARGE) == gemm_efficiency(efficiency_row(listed, "bf16"), LARGE) == 0.95


def test_only_products_of_tensor_cores_are_halved() -> None:
    """Public measurements of a 4090: 165 of 165 TFLOP/s in fp16 and 47 with n = 512; 51.6 of 82.6 in fp32."""
    gpu = GPUS["rtx-4090"].gpu
    shares = {name: gemm_efficiency(efficiency_row(gpu, name), LARGE) for name in ("bf16", "fp16", "fp8", "fp32_medium")}  # type: ignore[arg-type]
    assert set(shares.values()) == {0.95}
    assert gemm_efficiency(efficiency_row(gpu, "fp32"), LARGE) is gemm_efficiency(efficiency_row(gpu, "int8"), LARGE) is None
    assert gemm_efficiency(efficiency_row(gpu, "bf16"), SMALL) == 0.5
    host = describe("rtx-4090")
    peak = gpu.peak
    assert peak is not None and peak.fp32 and peak.int8 and peak.bf16
    assert training_rates(host, "fp32").matrix == pytest.approx(DEFAULT_GEMM_EFFICIENCY * peak.fp32)
    assert training_rates(host, "bf16").matrix > 0.9 * peak.bf16
    in_int8, in_fp32 = serving_rates(host, "int8", "int8"), serving_rates(host, "fp32", "fp32")
    assert in_int8.matrix * max(in_int8.efficiencies) == pytest.approx(DEFAULT_GEMM_EFFICIENCY * peak.int8)
    assert in_int8.outside * max(in_int8.efficiencies) == pytest.approx(0.95 * peak.bf16)
    assert in_fp32.matrix * max(in_fp32.efficiencies) == pytest.approx(DEFAULT_GEMM_EFFICIENCY * peak.fp32)


def test_the_rates_tell_which_cards_are_halved() -> None:
    others = {key for key, facts in GPUS.items() if facts.gpu.halves_tensor_cores and not facts.gpu.is_geforce}
    assert others == {"a10g", "l40"}
    assert all(facts.gpu.halves_tensor_cores for facts in GPUS.values() if facts.gpu.is_geforce)
    plain = Gpu(
        name="NVIDIA GeForce GTX 1660 Ti", memory_bytes=6 * GIB, compute_capability=(7, 5), peak=Rates(fp32=5e12, fp16=1e13)
    )
    assert not plain.halves_tensor_cores  # it has no tensor cores


def test_a_laptop_keeps_less_of_its_rates_than_a_desktop() -> None:
    """The four published rows are of desktops."""
    desktop = describe("rtx-4090")
    assert desktop.gpu is not None
    laptop = desktop.changed(gpu=desktop.gpu.changed(name="NVIDIA GeForce RTX 4090 Laptop GPU"))
    assert training_rates(laptop).matrix < 0.8 * training_rates(desktop).matrix


def measured(bf16: float) -> Measured:
    return Measured(
        torch_version="2", transformers_version=None, num_threads=4, cpu=Rates(fp32=1e11),
        gpu=Rates(fp32=50e12, bf16=bf16, memory_bytes_per_second=9e11), dispatch_seconds=1e-6, first_touch_seconds_per_byte=None,
        base_resident_bytes=None, compiler=None, probe_seconds=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "bf16", "limit_watts", "severity"),
    [
        ("rtx-4090", 160e12, 450.0, "ok"),
        ("rtx-4090", 110e12, 450.0, "warning"),
        ("rtx-4090", 110e12, 300.0, "ok"),
        ("rtx-4090", 70e12, 300.0, "warning"),
        ("rtx-4090-laptop", 40e12, None, "ok"),
        ("rtx-4090-laptop", 25e12, None, "warning"),
        ("l40", 160e12, 300.0, "ok"),
    ],
)
def test_a_card_with_less_power_is_not_warned_about(key: str, bf16: float, limit_watts: float | None, severity: str) -> None:
    found = {f.subject: f for f in examine_rates(describe(key), measured(bf16), limit_watts=limit_watts)}
    assert found["GPU matrix products"].severity == severity, found["GPU matrix products"].evidence
