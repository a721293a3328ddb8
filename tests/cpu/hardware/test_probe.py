"""The real probe on the machine of the test."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from upshift.errors import RequestError
from upshift.hardware import Host, describe, detect, probe_cache
from upshift.hardware import probe as probe_module
from upshift.hardware.probe import probe
from upshift.hardware.probe_cache import measure
from upshift.hardware.spec import Rates
from upshift.units import MIB


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UPSHIFT_CACHE", str(folder))
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as torchrun's ranks have it
        yield folder


@pytest.fixture(scope="module")
def probed(cache: Path) -> Host:
    return measure(detect())


def test_everything_is_measured_in_time(probed: Host) -> None:
    measured = probed.measured
    assert measured is not None
    assert measured.probe_seconds < 250  # 6 s alone on two cores; 300 s where one process waited in vain for the other
    assert measured.exchanges.keys() == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"}
    for rate in (measured.cpu.fp32, measured.cpu.fp32_medium, measured.cpu.bf16, measured.cpu.fp16):
        assert rate is not None
        assert 1e8 < rate < 1e15
    assert 1e8 < (measured.cpu.memory_bytes_per_second or 0) < 1e13
    assert 1e-8 < measured.dispatch_seconds < 1e-3
    assert 0 <= (measured.first_touch_seconds_per_byte or 0) < 1e-7
    assert 100 * MIB < (measured.base_resident_bytes or 0) < 2048 * MIB
    assert measured.compiler is not None
    assert 0 < (measured.core_share or 0) <= 1.01
    assert measured.torch_version == torch.__version__
    assert probed.cpu is not None
    assert measured.num_threads == probed.cpu.usable_cores
    assert probed.origin["measured"] == "probe"
    assert probed.fingerprint == detect().fingerprint
    assert Host.from_json(probed.to_json()) == probed


def test_the_cache_is_used_and_mended(probed: Host, cache: Path, monkeypatch: pytest.MonkeyPatch,
                                      caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    (path,) = (cache / "probe").iterdir()
    assert probed.fingerprint in path.name
    calls = []

    def counted(host: Host, *, budget_seconds: float) -> Host:
        calls.append(host)
        return probed

    monkeypatch.setattr(probe_cache, "probe", counted)
    assert measure(detect()).measured == probed.measured
    assert not calls
    measure(detect(), refresh=True)
    assert len(calls) == 1
    path.write_text('{"half": ')
    with caplog.at_level(logging.WARNING):
        assert measure(detect()).measured == probed.measured
    assert len(calls) == 2
    assert "probing again" in caplog.text
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    measure(detect())
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("share", "age", "again"), [(0.4, 3600.0, True), (0.4, 60.0, False), (0.95, 3600.0, False), (None, 3600.0, False)]
)
def test_what_was_measured_beside_others_is_soon_measured_again(
    share: float | None, age: float, again: bool, probed: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path))
    assert probed.measured is not None
    shared = probed.model_copy(update={"measured": probed.measured.changed(core_share=share)})
    monkeypatch.setattr(probe_cache, "probe", lambda host, *, budget_seconds: shared)
    measure(detect())
    (path,) = (tmp_path / "probe").iterdir()
    os.utime(path, (time.time() - age,) * 2)
    monkeypatch.setattr(probe_cache, "probe", lambda host, *, budget_seconds: probed)
    assert measure(detect()).measured == (probed.measured if again else shared.measured)


def test_torch_settings_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"resident_bytes": None, "compiler": None, "exchanges": None}
    monkeypatch.setattr(probe_module, "_run_base_process", lambda *_, **__: nothing)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high")
        measured = probe(detect(), budget_seconds=1).measured
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (1, "high")
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert measured is not None


def test_torch_settings_are_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(probe_module, "_run_base_process", lambda *_, **__: {})
    monkeypatch.setattr(probe_module, "dispatch_seconds", failing)
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match="planted"):
        probe(detect(), budget_seconds=1)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


def test_a_probe_says_which_measurements_failed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    answer = {"resident_bytes": 2**28, "compiler": True, "exchanges": None, "failures": {"exchanges": "RuntimeError: refused"}}
    code = f"print({json.dumps(json.dumps(answer))})"
    monkeypatch.setattr(probe_module.parent_process, "command", lambda *_, **__: [sys.executable, "-c", code])
    monkeypatch.setattr(probe_module, "_check_this_machine", lambda host: host.cpu)
    monkeypatch.setattr(probe_module, "_cpu_rates", lambda *_, **__: (Rates(fp32=1e12), 1.0))
    monkeypatch.setattr(probe_module, "dispatch_seconds", lambda *_: 1e-6)
    monkeypatch.setattr(probe_module, "_first_touch_seconds_per_byte", lambda *_: 0.0)
    numbers = probe(describe("epyc-9654")).measured
    assert numbers is not None and numbers.failed == ("exchanges",) and numbers.exchanges == {}
    assert "exchanges of a process are not measured: RuntimeError: refused" in caplog.text


def test_another_machine_is_refused(cache: Path) -> None:
    for host in (describe("8xh100"), detect().changed(num_nodes=2)):
        with pytest.raises(RequestError, match="not this machine"):
            measure(host)
    with pytest.raises(RequestError, match="budget_seconds=0"):
        probe(detect(), budget_seconds=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_is_measured(probed: Host) -> None:
    measured = probed.measured
    assert measured is not None
    assert measured.gpu is not None
    assert (measured.gpu.bf16 or 0) > (measured.cpu.bf16 or 0)
    assert (measured.host_to_device_bytes_per_second or 0) > 1e8
