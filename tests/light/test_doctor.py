"""Faults planted in what doctor reads, each found and named with what to type: GPUs by fake NVML answers, machines by files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from upshift.cli.doctor import verdict
from upshift.cli.main import app
from upshift.debugging import doctor
from upshift.debugging.cpu_memory import examine_cpu, examine_memory
from upshift.debugging.disks import Usage, disk_rates, examine_folder, examine_shm
from upshift.debugging.finding import Finding, error, ok, worst_first
from upshift.debugging.gpus import examine_gpus, examine_topology
from upshift.debugging.measured_rates import examine_rates
from upshift.debugging.plan_needs import PlanNeeds, examine_plan, read_plan_needs
from upshift.debugging.software import (
    examine_allocators,
    examine_compilers,
    examine_cuda,
    examine_extras,
    examine_requirements,
    examine_switches,
    examine_threads,
    find_compilers,
)
from upshift.errors import JobFailed, RequestError
from upshift.hardware import Measured, Rates, describe, detect
from upshift.hardware.nvml import Gpus, read_gpus
from upshift.units import GIB, MIB

RTX = "NVIDIA GeForce RTX 4090"
H100 = "NVIDIA H100 80GB HBM3"


class FakeNvml:
    """Answers by question, without "nvmlDeviceGet", the same for all GPUs. What has none raises, as the driver does."""

    class NVMLError(Exception):
        pass

    NVML_DEVICE_MIG_ENABLE = 1
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(
        self,
        count: int = 1,
        *,
        levels: dict[tuple[int, int], int] | None = None,
        nvlinks: tuple[tuple[int, int], ...] = (),
        **answers: Any,
    ) -> None:
        memory = SimpleNamespace(total=24 * GIB, used=8 * MIB, free=24 * GIB - 8 * MIB)
        self.answers = {
            "Count": count,
            "Name": RTX,
            "MemoryInfo": memory,
            "Temperature": 45,
            "TemperatureThreshold": 90,
            "PerformanceState": 8,
            "CurrentClocksEventReasons": 1,
            "CurrPcieLinkWidth": 16,
            "MaxPcieLinkWidth": 16,
            "CurrPcieLinkGeneration": 1,
            "MaxPcieLinkGeneration": 4,
            "EnforcedPowerLimit": 450_000,
            "PowerManagementDefaultLimit": 450_000,
            "PowerUsage": 30_000,
            "PowerManagementLimitConstraints": [150_000, 600_000],
            "PersistenceMode": 1,
            "CudaComputeCapability": (8, 9),
        } | answers
        self.levels, self.nvlinks = levels or {}, nvlinks

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.answers.get("CudaDriver", 12080)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return self.levels[one, other]

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        return 0 if (one, other) in self.nvlinks else 5

    def __getattr__(self, question: str) -> Any:
        if not question.startswith("nvmlDeviceGet"):
            raise AttributeError(question)

        def answer(handle: int = 0, *arguments: Any) -> Any:
            known = self.answers.get(question.removeprefix("nvmlDeviceGet"))
            if known is None:
                raise self.NVMLError("Not Supported")
            return known(handle, *arguments) if callable(known) else known

        return answer


def gpus(*arguments: Any, **named: Any) -> Gpus:
    return read_gpus(FakeNvml(*arguments, **named), None)


def look(found: Gpus, psu: float | None = None) -> list[Finding]:
    return list(examine_gpus(found, psu_watts=psu, process_name={41: "python train.py"}.get))


def only(findings: Iterator[Finding] | list[Finding], severity: str = "warning") -> Finding:
    """The one that asks for something."""
    asking = [finding for finding in findings if finding.severity not in ("ok", "unknown")]
    assert [finding.severity for finding in asking] == [severity], asking
    return asking[0]


def none(findings: Iterator[Finding]) -> bool:
    return all(finding.severity in ("ok", "unknown") for finding in findings)


def test_a_finding_that_asks_says_what_to_type() -> None:
    with pytest.raises(ValueError, match="needs a fix"):
        Finding(severity="warning", subject="x", what="y")
    order = worst_first([Finding(severity="ok", subject="x", what="y"), error("x", what="y", fix="z")])
    assert [finding.severity for finding in order] == ["error", "ok"]


def test_a_healthy_gpu_asks_for_nothing() -> None:
    (finding,) = look(gpus())
    assert finding.severity == "ok"
    assert RTX in finding.evidence and "30 of 450 W" in finding.evidence


def test_no_gpu_is_unknown_not_fine() -> None:
    assert [(f.severity, f.evidence) for f in look(read_gpus(None, None))] == [("unknown", "none: nvidia-ml-py is not installed")]


@pytest.mark.parametrize(
    ("answers", "severity", "what", "fix"),
    [
        (
            {"CurrentClocksEventReasons": 0x40 | 0x8, "Temperature": 91, "ClockInfo": 900, "MaxClockInfo": 2520},
            "error",
            "throttles because of heat",
            "-pl 360",
        ),
        ({"Temperature": 88}, "warning", "about to throttle", "nvidia-smi -i 0 -pl 360"),
        ({"Temperature": 81}, "hint", "warmer than 80", "-pl 360"),
        ({"CurrentClocksEventReasons": 0x80}, "error", "braked from outside", "power socket"),
        ({"EnforcedPowerLimit": 300_000}, "warning", "300 W of its 450 W", "sudo nvidia-smi -i 0 -pl 450"),
        ({"CurrPcieLinkWidth": 4}, "warning", "4 PCIe lanes of 16", "lspci"),
        ({"CurrPcieLinkGeneration": 3, "PerformanceState": 0}, "warning", "PCIe 3.0 under load instead of 4.0", "BIOS"),
        ({"TotalEccErrors": 2}, "error", "2 memory errors", "--gpu-reset -i 0"),
        ({"RetiredPages": [0x10, 0x20]}, "warning", "4 retired", "PAGE_RETIREMENT"),  # the fake says two by each cause
        ({"RemappedRows": (0, 1, 1, 0)}, "warning", "waits for a reset", "--gpu-reset -i 0"),
        ({"RemappedRows": (0, 1, 0, 1)}, "error", "could not remap", "replaced"),
        ({"ComputeMode": 2}, "error", "prohibited", "-c DEFAULT"),
        ({"PersistenceMode": 0}, "hint", "driver's state", "-pm 1"),
    ],
)
def test_one_fault_of_a_gpu(answers: dict[str, Any], severity: str, what: str, fix: str) -> None:
    finding = only(look(gpus(**answers)), severity)
    assert finding.subject == "GPU 0"
    assert what in finding.what
    assert fix in (finding.fix or "")


def test_a_slow_link_of_an_idle_gpu_is_no_fault() -> None:
    assert none(iter(look(gpus(CurrPcieLinkGeneration=1, PerformanceState=8))))


def test_who_holds_the_memory() -> None:
    memory = SimpleNamespace(total=24 * GIB, used=20 * GIB, free=4 * GIB)
    holders = [SimpleNamespace(pid=41, usedGpuMemory=19 * GIB), SimpleNamespace(pid=77, usedGpuMemory=None)]
    finding = only(look(gpus(MemoryInfo=memory, ComputeRunningProcesses=holders)))
    assert "20.0 GiB of 24.0 GiB" in finding.what
    assert "python train.py (pid 41, 19.0 GiB)" in finding.evidence and "another container (pid 77)" in finding.evidence
    assert (finding.fix or "").startswith("kill 41 77")


def test_missing_nvlinks() -> None:
    gone = only(look(gpus(Name=H100, NvLinkState=lambda handle, link: 0)))
    assert "18 NVLinks, none active" in gone.what
    some = only(look(gpus(Name=H100, NvLinkState=lambda handle, link: int(link < 12))))
    assert "12 of 18 NVLinks" in some.what
    assert "fabricmanager" in (some.fix or "")


@pytest.mark.parametrize(
    ("psu", "severity", "fix"),
    [(850, "error", "-pl 340"), (1000, "warning", "-pl 400"), (1200, "ok", ""), (350, "error", "a power supply of 1125 W (")],
)
def test_power_supply(psu: float, severity: str, fix: str) -> None:
    found = [f for f in look(gpus(2, levels={(0, 1): 30}), psu) if f.subject == "power supply"]
    assert [f.severity for f in found] == [severity]
    assert fix in (found[0].fix or "")
    assert "900 W" in found[0].evidence


LEVELS = {(0, 1): 50, (0, 2): 10, (0, 3): 50, (1, 2): 50, (1, 3): 10, (2, 3): 50}


def test_topology_in_words() -> None:
    finding = only(examine_topology(gpus(4, levels=LEVELS)))
    assert "GPU0-GPU1" in finding.what and "cross the CPU sockets" in finding.what
    assert "put tensor parallel on 0,2" in finding.what
    assert "CUDA_VISIBLE_DEVICES=0,2,1,3" in (finding.fix or "")
    assert "GPU0-GPU2, GPU1-GPU3 share one PCIe switch (PIX)" in finding.evidence
    fine = {pair: 10 if pair in ((0, 1), (2, 3)) else 50 for pair in LEVELS}
    assert none(examine_topology(gpus(4, levels=fine)))
    half = only(examine_topology(gpus(4, levels=fine, nvlinks=((0, 1), (2, 3)))), "hint")
    assert "GPU0-GPU2" in half.what and "--tensor-parallel 2" in (half.fix or "")
    unsaid = gpus(2, levels={(0, 1): 50})
    assert [
        f.severity for f in examine_topology(unsaid.changed(pairs=[{"one": 0, "other": 1, "level": None, "nvlink": None}]))
    ] == ["unknown"]


# --- looks that fail ---------------------------------------------------------------------------------------------------


def break_probe(host: Any) -> Any:
    raise JobFailed("a process that imports torch and transformers fails here: libcudart.so.12: cannot open shared object file")


LOOKS = ("gpus", "topology", "plan", "cpu", "memory", "folder", "shm", "requirements", "cuda", "compilers", "threads", "switches")


@pytest.mark.parametrize("look", [*LOOKS, "allocators", "extras"])
def test_a_look_that_fails_costs_no_finding_of_another(look: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it fails, a broken library, a machine's file in another form: the others' findings name the cause."""
    monkeypatch.setattr(doctor, "QUICK_BYTES", MIB)
    monkeypatch.setattr(doctor, "WHOLE_BYTES", MIB)
    monkeypatch.setattr("upshift.hardware.probe.probe", break_probe)
    needs = PlanNeeds(device="cuda", per_host=1, bytes_each=1.0)
    before = {finding.subject for finding in doctor.examine(quick=True, output=tmp_path, needs=needs).findings}
    whole_look = getattr(doctor, f"examine_{look}")
    of_look: set[str] = set()

    def break_in_the_middle(*arguments: Any, **named: Any) -> Iterator[Finding]:
        of_look.update(finding.subject for finding in whole_look(*arguments, **named))
        yield ok("before", what="read")
        raise ValueError("invalid literal for int(): 'x'")

    monkeypatch.setattr(doctor, f"examine_{look}", break_in_the_middle)
    findings = doctor.examine(quick=False, output=tmp_path, needs=needs).findings
    failed = [finding for finding in findings if "cannot be examined any further" in finding.what]
    assert len(failed) == (3 if look == "folder" else 2)
    assert all(finding.severity == "error" and finding.fix for finding in failed)
    assert failed[-1].subject == "rates" and "libcudart.so.12" in failed[-1].what
    assert {"before", *(before - of_look)} <= {finding.subject for finding in findings}


# --- planted machines ------------------------------------------------------------------------------------------------


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {48 * 2**20} kB\n"} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {"proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "proc/self/cgroup": "0::/box\n"}
BOX = "sys/fs/cgroup/box"


@pytest.mark.parametrize(
    ("files", "severity", "subject", "what", "fix"),
    [
        (
            {"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n"},
            "hint",
            "CPU governor",
            "powersave",
            "cpupower frequency-set -g performance",
        ),
        (
            {"sys/devices/system/node/node0/cpulist": "0-1\n", "sys/devices/system/node/node1/cpulist": "2-3\n"},
            "hint",
            "NUMA",
            "2 nodes",
            "upshift launch --hosts localhost --nproc 2",
        ),
        ({"proc/loadavg": "9.50 3 2 1/2 3\n"}, "warning", "load", "load 9.50 on 4", "ps -eo"),
        ({"proc/stat": "cpu  500 0 100 300 0 0 0 100 0 0\n"}, "warning", "load", "not given 10%", "dedicated"),
        ({"sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "7\n"}, "warning", "CPU", "heat", "sensors"),
        (V2 | {f"{BOX}/cpu.max": "200000 100000\n"}, "hint", "cgroup", "quota of 2 cores on a machine of 4", "--cpus"),
    ],
)
def test_one_fault_of_the_cpu(tmp_path: Path, files: dict[str, str], severity: str, subject: str, what: str, fix: str) -> None:
    cores = {
        f"sys/devices/system/cpu/cpu{n}/topology/{key}": f"{value}\n"
        for n in range(4)
        for key, value in (("physical_package_id", 0), ("core_id", n))
    }
    root = plant(tmp_path, cores | files)
    finding = only(examine_cpu(detect(root, nvml=None, affinity=range(4)), root), severity)
    assert (finding.subject, what in finding.what, fix in (finding.fix or "")) == (subject, True, True), finding


def test_a_quota_that_stops_threads(tmp_path: Path) -> None:
    root = plant(
        tmp_path, V2 | {f"{BOX}/cpu.max": "200000 100000\n", f"{BOX}/cpu.stat": "usage_usec 5\nnr_periods 100\nnr_throttled 40\n"}
    )
    finding = only(examine_cpu(detect(root, nvml=None, affinity=range(2)), root))
    assert "40% of the periods" in finding.what
    assert "export OMP_NUM_THREADS=2" in (finding.fix or "")


@pytest.mark.parametrize(
    ("files", "severity", "subject", "what", "fix"),
    [
        ({"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 50000 kB\n"}, "warning", "memory", "5% are free", "ps -eo"),
        (
            {"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 500000 kB\nSwapTotal: 900000 kB\nSwapFree: 400000 kB\n"},
            "warning",
            "swap",
            "488 MiB",
            "swapoff",
        ),
        (
            {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
            "hint",
            "huge pages",
            "never",
            "tee /sys/kernel",
        ),
        (V2 | {f"{BOX}/memory.events": "low 0\noom 3\noom_kill 2\n"}, "warning", "cgroup", "killed 2", "--memory"),
    ],
)
def test_one_fault_of_the_memory(tmp_path: Path, files: dict[str, str], severity: str, subject: str, what: str, fix: str) -> None:
    root = plant(tmp_path, files)
    finding = only(examine_memory(detect(root, nvml=None, affinity={0}), root), severity)
    assert (finding.subject, what in finding.what, fix in (finding.fix or "")) == (subject, True, True), finding


def test_a_cgroup_limit_below_the_plan(tmp_path: Path) -> None:
    root = plant(tmp_path, V2 | {f"{BOX}/memory.max": f"{8 * GIB}\n", f"{BOX}/memory.current": f"{GIB}\n"})
    host = detect(root, nvml=None, affinity={0})
    finding = only(examine_memory(host, root, needed_bytes=20 * GIB), "error")
    assert "needs 20.0 GiB" in finding.what and "limit of 8.00 GiB" in finding.what
    assert "--memory 22g" in (finding.fix or "")
    assert none(examine_memory(host, root, needed_bytes=4 * GIB))


def test_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "left_behind").write_bytes(b"x" * 2048)
    full = only(examine_shm(tmp_path, look=lambda folder: Usage(8 * GIB, 8 * GIB, 0)), "error")
    assert "full" in full.what and "left_behind" in full.evidence
    assert f"rm {tmp_path / 'left_behind'}" in (full.fix or "")
    small = only(examine_shm(tmp_path, look=lambda folder: Usage(64 * MIB, 0, 64 * MIB)))
    assert "--shm-size" in (small.fix or "")
    assert none(examine_shm(tmp_path, look=lambda folder: Usage(8 * GIB, 0, 8 * GIB)))


def raise_full(_: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_two_doctors_look_at_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes a file of its own; the one that ends first does not take the other's away."""
    fsync = os.fsync
    rates: list[tuple[float, float | None]] = []

    def look_as_well(descriptor: int) -> None:
        if not rates:
            rates.append((0.0, None))
            rates.append(disk_rates(tmp_path, MIB))
            assert len(list(tmp_path.iterdir())) == 1
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", look_as_well)
    rates.append(disk_rates(tmp_path, MIB))
    assert len(rates) == 3 and rates[1][0] > 0 < rates[2][0] and list(tmp_path.iterdir()) == []


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = [
        f
        for f in examine_folder(tmp_path / "not" / "yet", purpose="output", option="--output", probe_bytes=MIB)
        if "free" in f.evidence
    ]
    assert "writes" in finding.what
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("os.fsync", raise_full)
    broken = only(
        [f for f in examine_folder(tmp_path, purpose="output", option="--output F", probe_bytes=MIB) if "only" not in f.what],
        "error",
    )
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert broken.fix == "--output F"
    (tmp_path / "file").touch()
    asked = {"purpose": "cache", "option": "export UPSHIFT_CACHE=FOLDER", "probe_bytes": MIB}
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        assert only(list(examine_folder(path, **asked)), "error").what == f"{tmp_path / 'file'} is not a folder"


# --- planted software ------------------------------------------------------------------------------------------------


def test_requirements_that_are_not_met() -> None:
    requirements = {"a": ["numpy<1.0", "b>=2; extra == 'x'", "numpy>=1.0; python_version < '3'"], "numpy": []}
    finding = only(examine_requirements(requirements, {"a": "1.0", "numpy": "2.1"}), "error")
    assert finding.what == "a 1.0 needs numpy<1.0"
    assert (finding.fix or "").startswith("pip install 'numpy<1.0'")
    assert none(examine_requirements({"a": ["numpy>=2"]}, {"a": "1.0", "numpy": "2.1"}))


def test_torch_against_the_driver() -> None:
    old = only(examine_cuda(gpus(CudaDriver=12080), (13, 0), True, {}), "error")
    assert "CUDA 13.0, the driver serves 12.8" in old.what and "nvidia-driver-580" in (old.fix or "")
    assert "without CUDA" in only(examine_cuda(gpus(), None, True, {}), "error").what
    assert only(examine_cuda(gpus(), (12, 8), True, {"CUDA_VISIBLE_DEVICES": ""})).fix == "unset CUDA_VISIBLE_DEVICES"
    assert only(examine_cuda(gpus(), (12, 8), True, {"NVIDIA_TF32_OVERRIDE": "0"})).fix == "unset NVIDIA_TF32_OVERRIDE"
    for built in ("7.5;9.0+PTX", "9.0a", "8.6a", "12.0"):
        arch = only(examine_cuda(gpus(), (12, 8), True, {"TORCH_CUDA_ARCH_LIST": built}), "error")
        assert arch.fix == 'export TORCH_CUDA_ARCH_LIST="8.9"'
    for built in ("8.0", "7.5+PTX", "8.9a", "Ada", "8.6f 9.0"):
        assert none(examine_cuda(gpus(), (12, 8), True, {"TORCH_CUDA_ARCH_LIST": built}))
    assert none(examine_cuda(gpus(), (12, 1), True, {"TORCH_CUDA_ARCH_LIST": "8.0 8.9+PTX", "CUDA_VISIBLE_DEVICES": "1"}))


def toolchain(tmp_path: Path, releases: dict[str, str], *, gcc: str = "12") -> Any:
    for folder in releases:
        path = tmp_path / folder / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        path.touch()

    def ask(command: list[str]) -> str | None:
        return (
            gcc
            if "gcc" in command[0] or "g++" in command[0]
            else f"Cuda compilation tools, release {releases[Path(command[0]).parts[-3]]}, V"
        )

    path = ":".join(str(tmp_path / folder / "bin") for folder in releases)
    return find_compilers({"PATH": path}, {"g++": "/usr/bin/g++", "ninja": "/usr/bin/ninja"}.get, ask)


def test_two_toolkits(tmp_path: Path) -> None:
    compilers = toolchain(tmp_path, {"cuda-12.8": "12.8", "cuda-13.0": "13.0"})
    first, second = (f for f in examine_compilers(compilers, gpus(), (13, 0), {}))
    assert "2 toolkits in PATH" in first.what and f"CUDA_HOME={tmp_path / 'cuda-13.0'}" in (first.fix or "")
    assert "nvcc is of CUDA 12.8, torch of 13.0" in second.what


def test_compilers(tmp_path: Path) -> None:
    assert list(examine_compilers(toolchain(tmp_path / "a", {"cuda": "12.8"}), gpus(), (12, 6), {})) == []
    new = only(examine_compilers(toolchain(tmp_path / "b", {"cuda": "12.1"}, gcc="14"), gpus(), (12, 1), {}))
    assert "gcc 14 is newer than nvcc of CUDA 12.1 takes (12)" in new.what
    missing = find_compilers({"PATH": ""}, lambda name: None, lambda command: None)
    assert "sudo apt install g++" in (only(examine_compilers(missing, Gpus(origin="none"), None, {})).fix or "")
    deepspeed = only(examine_compilers(toolchain(tmp_path / "c", {}), gpus(), None, {"deepspeed": "0.16"}), "hint")
    assert (deepspeed.fix or "").startswith('TORCH_CUDA_ARCH_LIST="8.9" DS_BUILD_CPU_ADAM=1')


def test_threads_that_oversubscribe() -> None:
    assert only(examine_threads({"OMP_NUM_THREADS": "32"}, usable_cores=8, local_ranks=1)).fix == "export OMP_NUM_THREADS=8"
    shared = only(examine_threads({"OMP_NUM_THREADS": "8"}, usable_cores=8, local_ranks=4))
    assert "8 x 4 ranks on 8" in shared.what and shared.fix == "export OMP_NUM_THREADS=2"
    assert only(examine_threads({"MKL_NUM_THREADS": "x"}, usable_cores=8, local_ranks=1)).subject == "MKL_NUM_THREADS"
    assert "idle" in only(examine_threads({"OMP_NUM_THREADS": "1"}, usable_cores=8, local_ranks=1), "hint").what
    assert list(examine_threads({"OMP_NUM_THREADS": "8"}, usable_cores=8, local_ranks=1)) == []


def test_switches_left_on(tmp_path: Path) -> None:
    assert only(examine_switches({"CUDA_LAUNCH_BLOCKING": "1"})).fix == "unset CUDA_LAUNCH_BLOCKING"
    assert list(examine_switches({"NCCL_P2P_DISABLE": "0"})) == []
    (tmp_path / "libnccl.so.2").touch()
    assert "libnccl.so.2" in only(examine_switches({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"})).what


def test_allocators_and_extras(tmp_path: Path) -> None:
    assert "sudo apt install libjemalloc2" in (only(examine_allocators({}, tmp_path), "hint").fix or "")
    there = plant(tmp_path, {"usr/lib64/libtcmalloc.so.4": ""})
    assert (only(examine_allocators({}, there), "hint").fix or "") == "export LD_PRELOAD=/usr/lib64/libtcmalloc.so.4"
    assert none(examine_allocators({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, there))
    extras = only(
        examine_extras(
            {
                "torchao": "1",
                "peft": "1",
                "accelerate": "1",
                "datasets": "1",
                "openvino": "1",
                "onnxruntime": "1",
                "ctranslate2": "1",
            }
        ),
        "hint",
    )
    assert extras.fix == "pip install '.[bitsandbytes,llamacpp]'"


def test_rates_against_the_table() -> None:
    host = detect(nvml=FakeNvmlForDetect())
    rates = Rates(fp32=60e12, bf16=300e12, memory_bytes_per_second=2600e9)
    measured = Measured(
        torch_version="2",
        transformers_version=None,
        num_threads=4,
        cpu=Rates(fp32=1e11),
        gpu=rates,
        dispatch_seconds=1e-6,
        first_touch_seconds_per_byte=None,
        base_resident_bytes=None,
        compiler=False,
        probe_seconds=1,
        host_to_device_bytes_per_second=12e9,
    )
    found = {f.subject: f for f in examine_rates(host, measured)}
    assert found["GPU matrix products"].severity == "warning"  # 300 of some 790 TFLOP/s
    assert "of what such a part reaches" in found["GPU matrix products"].what
    assert found["GPU memory"].severity == "ok"
    assert found["copies to the GPU over PCIe 5.0 x16"].severity == "warning"
    assert found["compiler"].fix == "sudo apt install g++ python3-dev"


class FakeNvmlForDetect(FakeNvml):
    def __init__(self) -> None:
        super().__init__(Name=H100, MaxPcieLinkGeneration=5, CudaComputeCapability=(9, 0))


# --- this machine ----------------------------------------------------------------------------------------------------


def test_quick_doctor_is_quick(tmp_path: Path) -> None:
    arguments = ["upshift", "doctor", "--quick", "--json", "-o", str(tmp_path)]
    code = f"import sys; sys.path[:] = {sys.path!r}; sys.argv = {arguments!r}; "
    code += "import upshift.cli.main as m\ntry: m.main()\nexcept SystemExit: pass\nprint('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert {"error", "warning", "hint", "ok", "unknown"} >= {finding["severity"] for finding in document["findings"]}
    assert all(finding["fix"] for finding in document["findings"] if finding["severity"] in ("error", "warning", "hint"))
    assert {"GPU", "CPU", "memory", "swap", "libraries"} <= {finding["subject"] for finding in document["findings"]}
    assert done.stderr.splitlines()[-1] == "False"  # torch takes seconds to import


@pytest.mark.parametrize(
    ("severities", "words"),
    [
        ((), "Ready: no errors; nothing to mend."), (("ok", "unknown"), "Ready: no errors; nothing to mend."),
        (("warning", "hint", "hint"), "Ready: no errors; 1 warning, 2 hints."),
        (("error", "error", "hint"), "Not ready: 2 errors, 1 hint. Mend the errors first."),
    ],
)  # fmt: skip
def test_the_first_line_says_whether_the_machine_is_ready(severities: tuple[str, ...], words: str) -> None:
    assert verdict([Finding(severity=severity, subject="a", what="b", fix="c") for severity in severities]) == words  # type: ignore[arg-type]


def test_a_wrong_plan_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"plans": []}')
    command = [sys.executable, "-m", "upshift.cli.main", "doctor", "--quick", "--plan", str(tmp_path / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "upshift plan MODEL --json" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "x"], "a look at this machine does not use --data, which is for --tpu"),
        (["--port", "1234"], "does not use --port, which is for --hosts"),
        (["--network", "--wait", "3"], "--network does not use --wait, which is for --hosts"),
        (["run", "--network"], "RUN_DIR does not use --network"),
        (["run", "--plan", "plan.json"], "RUN_DIR does not use --plan, which is for a look at this machine"),
        (["run", "--psu", "850"], "RUN_DIR does not use --psu"),
        (["run", "--tpu"], "RUN_DIR does not use --tpu"),
        (["--tpu", "--quick"], "--tpu does not use --quick"),
    ],
)
def test_no_option_is_ignored(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *options])
    assert isinstance(result.exception, RequestError) and words in str(result.exception)


@pytest.mark.parametrize(
    ("plan", "predicted"),
    [({"num_processes": 1}, {"resident_gib": 2.0**30, "peak_gib": 1.0}),
     ({"replicas": 1, "tensor_parallel": 1, "pipeline_parallel": 1}, {"peak_gib": 2.0**30})]
)  # fmt: skip
def test_a_plan_of_training_or_of_generation(plan: dict[str, int], predicted: dict[str, float], tmp_path: Path) -> None:
    """It holds more than any machine has."""
    (tmp_path / "plan.json").write_text(json.dumps({"plans": [{"plan": {"device": "cpu", **plan}, "predicted": predicted}]}))
    asked = ["doctor", "--quick", "--json", "-o", str(tmp_path), "--plan", str(tmp_path / "plan.json")]
    result = CliRunner().invoke(app, asked)
    findings = json.loads(result.stdout)["findings"]
    assert result.exit_code == 1 and any("plan" in finding["what"] and finding["severity"] == "error" for finding in findings)


# --- a plan's room ---------------------------------------------------------------------------------------------------


def plan_file(path: Path, *, plan: dict[str, Any], predicted: dict[str, float], num_nodes: int = 1) -> Path:
    document = {"host": {"num_nodes": num_nodes}, "plans": [{"plan": plan, "predicted": predicted}]}
    path.write_text(json.dumps(document))
    return path


def test_a_plan_of_a_cpu_needs_what_all_its_processes_hold(tmp_path: Path) -> None:
    training = {"device": "cpu", "num_processes": 8}
    predicted = {"peak_gib": 1.0, "resident_gib": 3.0}
    needs = read_plan_needs(plan_file(tmp_path / "a", plan=training, predicted=predicted, num_nodes=2))
    assert (needs.per_host, needs.host_bytes) == (4, 12 * GIB)
    assert none(examine_plan(describe("epyc-9654"), needs))
    serving = {"device": "cpu", "replicas": 2, "tensor_parallel": 1, "pipeline_parallel": 1}
    needs = read_plan_needs(plan_file(tmp_path / "b", plan=serving, predicted={"peak_gib": 5.0}))
    assert needs.host_bytes == 10 * GIB


@pytest.mark.parametrize(
    ("on", "gib", "severity", "words"),
    [("2xh100", 70.0, "ok", "70.0 GiB on each of 2 devices"), ("2xh100", 90.0, "error", "79.6 GiB are free"),
     ("8xh100", 70.0, "ok", "has room"), ("h100", 70.0, "error", "needs 2 cuda devices on each host, and this machine has 1"),
     ("epyc-9654-768gb", 70.0, "error", "for cuda devices, and this machine has none"),
     ("m2-max-64gb", 70.0, "error", "has none"), ("8xgaudi-3", 70.0, "error", "has none")]
)  # fmt: skip
def test_a_plan_of_gpus_is_held_against_them(tmp_path: Path, on: str, gib: float, severity: str, words: str) -> None:
    plan = {"device": "cuda", "num_processes": 4}
    needs = read_plan_needs(plan_file(tmp_path / "plan", plan=plan, predicted={"resident_gib": gib}, num_nodes=2))
    assert needs.host_bytes is None
    (finding,) = examine_plan(describe(on), needs)
    assert (finding.severity, words in finding.what) == (severity, True), finding


def test_the_fullest_of_the_devices_that_a_plan_needs_decides(tmp_path: Path) -> None:
    host = describe("2xh100")
    assert host.gpu is not None
    gpus = tuple(host.gpu.changed(free_memory_bytes=free * GIB, name=name) for free, name in ((60, "a"), (20, "b")))
    mixed = host.changed(gpu=None, mixed_gpus=gpus, gpus_per_node=2)
    for processes, gib, severity in ((1, 50.0, "ok"), (2, 50.0, "error"), (2, 19.0, "ok"), (1, 61.0, "error")):
        plan = {"device": "cuda", "num_processes": processes}
        needs = read_plan_needs(plan_file(tmp_path / "plan", plan=plan, predicted={"resident_gib": gib}))
        (finding,) = examine_plan(mixed, needs)
        assert finding.severity == severity


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"plans": []}', '{"plans": [{"plan": {}, "predicted": {}}]}', '{"plans": 3}',
             '{"plans": [{"plan": {"device": "cpu", "num_processes": 0}, "predicted": {"peak_gib": 1}}]}',
             '{"plans": [{"plan": {"device": "cpu", "num_processes": 1}, "predicted": {"peak_gib": "x"}}]}']
)  # fmt: skip
def test_a_file_without_a_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan").write_text(text)
    with pytest.raises(RequestError, match="is not a file of plans; write one: upshift plan"):
        read_plan_needs(tmp_path / "plan")
