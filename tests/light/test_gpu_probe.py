"""The GPU probe beside noisy, slow and failing processes: its answers, its warnings, and how long a result is valid."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_profile import make_profile

from upshift.hardware import Host, describe, probe, probe_cache, probe_process
from upshift.hardware.gpu_probe import exchange_path
from upshift.hardware.probe_cache import has_all_gpu_rates, measure
from upshift.hardware.spec import Link, Measured, Rates
from upshift.planning.cost.rates import predict_rates
from upshift.planning.inference.time import device_rates
from upshift.planning.plan import plain_default
from upshift.planning.workload import Workload

# Prints as NCCL does: to C's standard output, which is flushed when the process ends, behind what Python printed.
PRINTING = """
import ctypes, json, sys
from upshift.parent_process import take_stdout
libc = ctypes.CDLL(None)
libc.printf(b"NCCL version 2.27.5\\n")
stdout = take_stdout()
libc.printf(b"machine:1:1 [0] NCCL INFO a long line\\n")
print("a line of Python's")
stdout.write(json.dumps({"failures": {}, "value": 7}) + "\\n")
stdout.flush()
libc.printf(b"machine:1:1 [0] NCCL INFO comm destroyed\\n")
"""


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return a list for the code of the probe's processes; each process runs the code whose number is its first argument."""
    codes: list[str] = []

    def command(module: str, kind: str, number: str, options: tuple[str, ...] = ()) -> list[str]:
        return [sys.executable, "-c", codes[int(number)]]

    monkeypatch.setattr(probe.parent_process, "command", command)
    return codes


def run(codes: list[str], children: list[str]) -> dict[str, object] | None:
    children[:] = codes
    return probe._run_gpu_probe([["exchanges", str(number)] for number in range(len(codes))])


@pytest.mark.skipif(sys.platform == "win32", reason="C's standard output is found in another way on Windows")
def test_what_libraries_print_is_no_part_of_the_answer(children: list[str]) -> None:
    assert run([PRINTING], children) == {"failures": {}, "value": 7}


@pytest.mark.parametrize("code", ["", "print('no JSON')", "print('[1]')"])
def test_a_process_without_an_answer_is_warned_of(code: str, children: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert run([code], children) is None
    assert "gave no answer" in caplog.text


def test_the_base_process_may_print_and_may_give_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown: dict[str, object] = {"resident_bytes": None, "compiler": None, "exchanges": None}
    for code, expected in ((PRINTING, unknown | {"failures": {}, "value": 7}), ("print('x')", unknown)):
        monkeypatch.setattr(probe.parent_process, "command", lambda *_, code=code, **__: [sys.executable, "-c", code])
        assert probe._run_base_process(1, timeout_seconds=60.0) == expected


def test_the_rank_that_fails_is_named_at_once(children: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """The first rank waits for it, and the last one fills a pipe that nobody reads."""
    waits = "import time; time.sleep(60)"
    fails = "import time; time.sleep(0.3); raise SystemExit('no memory on GPU 1')"
    chats = "import sys, time; sys.stderr.write('x' * 10**6 + chr(10)); time.sleep(60)"
    start = time.monotonic()
    assert run([waits, fails, chats], children) is None
    assert time.monotonic() - start < 30
    assert "rank 1 of 3: no memory on GPU 1" in caplog.text


def test_ranks_that_print_much_do_not_wait_for_a_reader(children: list[str]) -> None:
    answers = "import sys; sys.stderr.write('x' * 10**6); print('{}')"
    assert run([answers, answers], children) == {}


def test_the_message_in_the_answer_counts_before_the_last_line(children: list[str], caplog: pytest.LogCaptureFixture) -> None:
    fails = """
import json, sys
print(json.dumps({"failures": {"exchanges": "NCCL: unhandled system error"}}))
sys.stderr.write("[W] process group was not destroyed")
sys.exit(1)
"""
    assert run([fails], children) is None
    assert "NCCL: unhandled system error" in caplog.text and "not destroyed" not in caplog.text


def test_a_rate_that_failed_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(probe, "torch_cuda", lambda: ("2", "12.8"))
    monkeypatch.setattr(probe, "lacks_cuda", lambda *_: False)
    answer = {"gpu": {"fp32": 1.0}, "failures": {"bf16": "CUDA out of memory"}}
    monkeypatch.setattr(probe, "_run_gpu_probe", lambda _: answer)
    assert probe._gpu_numbers(describe("h100"), 1.0) == {"gpu": {"fp32": 1.0}, "failed": ("bf16",)}
    assert "(bf16) is not measured: CUDA out of memory" in caplog.text


WHOLE = Rates(fp32=1e13, fp32_medium=1e14, bf16=2e14, fp16=2e14, memory_bytes_per_second=1e12)
EXCHANGES = {"all_reduce": Link(name="nccl", bytes_per_second=1e11, measured=True)}


def measured(gpu: Rates | None, *, exchanges: bool = False) -> Measured:
    return Measured(
        torch_version="2", transformers_version="5", num_threads=1, cpu=Rates(fp32=1e12), gpu=gpu, dispatch_seconds=1e-6,
        first_touch_seconds_per_byte=None, base_resident_bytes=1, compiler=None, probe_seconds=1.0, core_share=1.0,
        gpu_exchanges=EXCHANGES if exchanges else {}, gpu_exchange_ranks=2 if exchanges else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "numbers", "complete"),
    [
        ("h100", measured(WHOLE), True),
        ("h100", measured(None), False),
        *[("h100", measured(WHOLE.changed(**{name: None})), False)
          for name in ("fp32", "fp32_medium", "bf16", "fp16", "memory_bytes_per_second")],
        ("rtx-2080", measured(WHOLE.changed(bf16=None, fp32_medium=None)), True),
        ("rtx-2080", measured(WHOLE.changed(bf16=None, fp32_medium=None, fp16=None)), False),
        ("2xh100", measured(WHOLE), False),
        ("2xh100", measured(WHOLE, exchanges=True), True),
        ("epyc-9654", measured(None), True),
    ],
)  # fmt: skip
def test_a_gpus_result_that_lacks_a_rate_is_soon_measured_again(
    text: str, numbers: Measured, complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = describe(text)
    assert has_all_gpu_rates(host, numbers) is complete
    assert count_probes(host, numbers, tmp_path, monkeypatch) == (1 if complete else 2)


@pytest.mark.parametrize("failed", [(), ("resident_bytes",), ("compiler",), ("exchanges",), ("host_to_device",)])
def test_a_measurement_that_failed_is_soon_made_again(
    failed: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failure is no result, whichever it is: other programs may have held what it needed."""
    numbers = measured(None).changed(failed=failed)
    assert count_probes(describe("epyc-9654"), numbers, tmp_path, monkeypatch) == (2 if failed else 1)


@pytest.mark.parametrize("name", ["resident_bytes", "compiler", "exchanges"])
@pytest.mark.parametrize("error", [RuntimeError("connection refused\nmore"), OSError("no space left on device")])
def test_each_failure_of_the_base_process_leaves_its_number_unknown(name: str, error: Exception) -> None:
    def fail() -> None:
        raise error

    succeeding = {"resident_bytes": lambda: 2**28, "compiler": lambda: False, "exchanges": dict}
    results = probe_process.answer(succeeding | {name: fail})
    assert results.pop("failures") == {name: f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    assert results == {"resident_bytes": 2**28, "compiler": False, "exchanges": {}} | {name: None}


def test_a_compiler_that_a_signal_ends_is_not_one_that_cannot_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    monkeypatch.setattr(probe_process, "CPP_COMPILER", SimpleNamespace(get=lambda: lambda: str(compiler)))
    monkeypatch.setattr(probe_process, "NO_COMPILER", SimpleNamespace(get=lambda: RuntimeError))
    for code, works in (("exit 0", True), ("exit 1", False), ("kill -9 $$", None)):
        compiler.write_text(f"#!/bin/sh\n{code}\n")
        compiler.chmod(0o755)
        if works is None:
            with pytest.raises(OSError, match="signal 9"):
                probe_process.compiler_works()
        else:
            assert probe_process.compiler_works() is works


def count_probes(host: Host, numbers: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often a host is probed with this result if it is needed three times, the last time after 700 s."""
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path))
    calls: list[Host] = []

    def probed(host: Host, *, budget_seconds: float) -> Host:
        calls.append(host)
        return probe.with_measured(host, numbers)

    monkeypatch.setattr(probe_cache, "probe", probed)
    for _ in range(2):
        assert measure(host).measured == numbers
    assert len(calls) == 1
    (path,) = (tmp_path / "probe").iterdir()
    old = time.time() - 700
    os.utime(path, (old, old))
    measure(host)
    return len(calls)


def test_exchanges_on_other_paths_of_nccl_are_another_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path))
    names = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    two = describe("2xh100")
    paths = [probe_cache._cache_path(two)]
    for name, value in [*((name, "1") for name in names), ("NCCL_P2P_LEVEL", "../x y")]:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            paths.append(probe_cache._cache_path(two))
    assert len(set(paths)) == 5 and all(path.parent == tmp_path / "probe" for path in paths)


@pytest.mark.parametrize(
    ("variables", "peers", "expected"),
    [
        ({}, True, "peer to peer"),
        ({}, False, "through the host"),
        ({"NCCL_P2P_DISABLE": "1"}, True, "through the host"),
        ({"NCCL_P2P_DISABLE": "0"}, True, "peer to peer"),
        ({"NCCL_P2P_LEVEL": "LOC"}, True, "through the host"),
        ({"NCCL_P2P_LEVEL": "NVL"}, True, "at NCCL_P2P_LEVEL=NVL"),
    ],
)
def test_the_path_of_nccl_is_named_as_it_is(
    variables: dict[str, str], peers: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("upshift.hardware.gpu_probe.are_peers", lambda ranks: peers)
    assert exchange_path(2) == expected


@pytest.mark.parametrize("name", ["fp32", "memory_bytes_per_second", "bf16"])
@pytest.mark.parametrize("key", ["h100", "mi300x", "rtx-3060", "rtx-a6000"])
def test_a_rate_that_was_not_measured_is_the_datasheets(name: str, key: str) -> None:
    """It is the rate of the same GPU without a probe; the other rates are measured.

    Efficiencies were measured by size for an H100 and for GeForce cards, of large products for an MI300X, and not for an A6000.
    """
    plain = describe(key)
    assert plain.gpu is not None and plain.gpu.peak is not None
    probed = plain.changed(measured=measured(WHOLE))
    partly = plain.changed(measured=measured(WHOLE.changed(**{name: None})))
    precision = "fp32" if name == "fp32" else "bf16"
    profile = make_profile()
    plan = plain_default(plain, profile, Workload(sequence_length=512, global_batch=8)).changed(precision=precision)
    weights = "fp32" if name == "fp32" else "bf16"
    hosts = (plain, probed, partly)
    trained = [predict_rates(host, profile, plan) for host in hosts]
    served = [device_rates(host, weights, precision, "graphs") for host in hosts]  # type: ignore[arg-type]
    for listed, whole, mixed in (trained, served):
        assert listed is not None and whole is not None and mixed is not None
        is_memory = name.startswith("memory")
        assert mixed.memory == pytest.approx((listed if is_memory else whole).memory)
        # The most that a product reaches: where rates were measured, smaller ones still lose their share.
        most = [rates.matrix * max(getattr(rates, "efficiencies", ()), default=1.0) for rates in (listed, whole, mixed)]
        assert most[2] == pytest.approx(most[1] if is_memory else most[0])
