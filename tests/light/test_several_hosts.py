"""The Host of machines that a launcher joined."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.hardware.cluster import VisibleGpus, check_equal_gpus, join_hosts, machine_id, with_gpus_of_all_ranks
from upshift.hardware.spec import Cpu, Gpu, Host, Link, Measured, Rates

LINK = Link(name="network", bytes_per_second=1e8, latency_seconds=1e-4, measured=True)
H100 = describe("h100").gpu or Gpu(name="unknown", memory_bytes=None)


def machine(*, cores: int, free: int, fp32: float, name: str = "A", exchange: float = 1e9) -> Host:
    cpu = Cpu(
        model_name=name, architecture="x86_64", physical_cores=cores, usable_cores=cores, numa_nodes=1, l2_total_bytes=None,
        l3_total_bytes=None, isa=("avx2", "avx512f") if name == "A" else ("avx2",), memory_bytes=2 * free, free_memory_bytes=free,
    )  # fmt: skip
    measured = Measured(
        torch_version="2", transformers_version="5", num_threads=cores, cpu=Rates(fp32=fp32, memory_bytes_per_second=1e10),
        dispatch_seconds=1e-6, first_touch_seconds_per_byte=0.0, base_resident_bytes=1, compiler=True, probe_seconds=1.0,
        exchanges={"all_reduce": LINK.changed(bytes_per_second=exchange)},
    )  # fmt: skip
    return Host(name="this machine", cpu=cpu, measured=measured)


def test_of_everything_the_least_counts() -> None:
    hosts = [machine(cores=8, free=64, fp32=2e12), machine(cores=4, free=128, fp32=1e12, name="B", exchange=5e8)]
    joined = join_hosts(hosts, LINK)
    assert joined.cpu is not None and joined.measured is not None
    assert (joined.num_nodes, joined.num_devices, joined.inter_node) == (2, 2, LINK)
    assert (joined.cpu.usable_cores, joined.cpu.free_memory_bytes, joined.cpu.isa) == (4, 64, ("avx2",))
    assert (joined.cpu.model_name, joined.measured.num_threads, joined.measured.cpu.fp32) == ("A or B", 4, 1e12)
    assert joined.measured.exchanges["all_reduce"].bytes_per_second == 5e8
    assert joined.measured.cpu.bf16 is None
    assert joined.ranks_per_node(6) == 3


TOLD_BY_THE_FIRST = {"torch_version", "transformers_version", "probe_seconds", "failed", "core_share"}


def numbers_in(value: Any, path: str = "") -> dict[str, float]:
    """Return every number of a document by its path."""
    if isinstance(value, dict):
        return {key: number for name, part in value.items() for key, number in numbers_in(part, f"{path}.{name}").items()}
    return {path: value} if isinstance(value, int | float) and not isinstance(value, bool) else {}


def test_whatever_is_measured_the_slowest_machine_counts() -> None:
    """Every number of a measurement, CPU or GPU, in both orders of the hosts: the lowest rate, the longest time."""
    rates = {name: 8.0 for name in Rates.model_fields}
    links = {"all_reduce": LINK, "all_gather": LINK}
    fast = Measured(
        torch_version="2", transformers_version="5", num_threads=8, cpu=Rates(**rates), gpu=Rates(**rates), dispatch_seconds=1.0,
        gpu_dispatch_seconds=1.0, host_to_device_bytes_per_second=8.0, first_touch_seconds_per_byte=1.0, exchanges=links,
        gpu_exchanges=links, gpu_exchange_ranks=2, base_resident_bytes=1, gpu_compiler=True, compiler=True, probe_seconds=1.0,
    )  # fmt: skip
    document = fast.model_dump(exclude=TOLD_BY_THE_FIRST | {"gpu_exchange_ranks"})
    for changed in numbers_in(document):
        is_time = any(word in changed for word in ("seconds", "resident")) and "per_second" not in changed
        slow_document = fast.model_dump()
        *names, last = changed.strip(".").split(".")
        place = slow_document
        for name in names:
            place = place[name]
        place[last] = 2 * place[last] if is_time else place[last] / 2
        slow = Measured.model_validate(slow_document | {"num_threads": int(slow_document["num_threads"])})
        hosts = [describe("2xh100").changed(cpu=machine(cores=8, free=64, fp32=1.0).cpu, measured=one) for one in (fast, slow)]
        for order in (hosts, hosts[::-1]):
            joined = join_hosts(order, LINK).measured
            assert joined is not None and joined == slow, changed
    for name in ("compiler", "gpu_compiler"):
        hosts = [machine(cores=8, free=64, fp32=1.0).changed(measured=fast.changed(**{name: value})) for value in (True, False)]
        assert all(getattr(join_hosts(order, LINK).measured, name) is False for order in (hosts, hosts[::-1]))
    lacking = [machine(cores=8, free=64, fp32=1.0).changed(measured=one) for one in (fast, fast.changed(gpu=None, exchanges={}))]
    joined = join_hosts(lacking, LINK).measured
    assert joined is not None and joined.gpu is None and joined.exchanges == {}


def test_the_slowest_disk_and_the_smallest_gpu_count() -> None:
    host = describe("2xh100").changed(disk_bytes_per_second=2e9)
    assert host.gpu is not None and host.gpu.memory_bytes is not None and host.host_to_device is not None
    slow_link = host.host_to_device.changed(bytes_per_second=1e9)
    small_gpu = host.gpu.changed(memory_bytes=host.gpu.memory_bytes - 1, free_memory_bytes=5)
    hosts = [host, host.changed(disk_bytes_per_second=1e9, host_to_device=slow_link, gpu=small_gpu)]
    for order in (hosts, hosts[::-1]):
        joined = join_hosts(order, LINK)
        assert joined.disk_bytes_per_second == 1e9 and joined.host_to_device == slow_link
        assert joined.gpu is not None and joined.gpu.memory_bytes == small_gpu.memory_bytes


def test_one_machine_is_itself_and_unmeasured_rates_stay_unknown() -> None:
    host = machine(cores=8, free=64, fp32=2e12)
    assert join_hosts([host], None) is host
    joined = join_hosts([host, host.changed(measured=None)], None)
    assert joined.measured is None and joined.inter_node is None and joined.origin["inter_node"].startswith("unknown")


def test_hosts_of_different_devices_are_refused() -> None:
    with pytest.raises(RequestError, match=r"different devices \(4 x .*; start a job on hosts of one kind"):
        join_hosts([describe("4xh100"), describe("8xh100")], LINK)
    joined = join_hosts([describe("8xh100")] * 2, LINK)
    assert joined.num_devices == 16 and joined.ranks_per_node(16) == 8


def see(machine: str, *numbers: int, gpu: Gpu = H100) -> VisibleGpus:
    return VisibleGpus(machine=machine, gpus={f"GPU-{number}": gpu for number in numbers})


def test_gpus_that_a_launcher_shows_one_to_each_rank_are_counted_by_their_uuids() -> None:
    """Slurm's ``--gpus-per-task=1``: each rank sees one GPU of the host's four, and all ranks together see all."""
    one = describe("h100")
    here = machine_id()
    seen = [see(here, number) for number in range(4)] + [see("another host", 9)]
    host = with_gpus_of_all_ranks(one, seen)
    assert host.gpus_per_node == 4 and host.intra_node == describe("4xh100").intra_node
    assert host.intra_node is not None
    assert with_gpus_of_all_ranks(describe("4xh100"), [see(here, 0, 1, 2, 3)] * 4) == describe("4xh100")
    assert with_gpus_of_all_ranks(describe("epyc-9654"), [see(here)]) == describe("epyc-9654")


@pytest.mark.parametrize("changed", ["boot", "namespace"])
def test_two_machines_of_one_name_are_two(changed: str, tmp_path: Path) -> None:
    """Also two containers of one machine, which share its boot id."""

    def root(name: str, boot: str, namespace: str) -> Path:
        folder = tmp_path / name
        (folder / "proc/sys/kernel/random").mkdir(parents=True)
        (folder / "proc/sys/kernel/random/boot_id").write_text(f"{boot}\n")
        (folder / "proc/self/ns").mkdir(parents=True)
        (folder / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
        return folder

    first = root("first", "boot", "namespace")
    assert machine_id(first) == machine_id(root("same", "boot", "namespace"))
    assert machine_id(first) != machine_id(root("other", **{"boot": "boot", "namespace": "namespace", changed: "other"}))
    assert machine_id(tmp_path / "nothing").split() == [platform.node()]


def test_the_id_of_a_machine_is_that_of_its_processes() -> None:
    code = "from upshift.hardware.cluster import machine_id; print(machine_id())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == machine_id()


def test_ranks_that_see_different_gpus_of_a_machine_are_refused() -> None:
    l40s = describe("l40s").gpu
    assert l40s is not None
    check_equal_gpus([see("a", 0), see("a", 1, gpu=H100.changed(free_memory_bytes=1)), see("b", 2, gpu=l40s), see("c")])
    with pytest.raises(RequestError, match=r"the ranks on a see GPUs of different kinds \(name: NVIDIA H100.* and NVIDIA L40S\)"):
        check_equal_gpus([see("a 1 2", 0), see("b 1 2", 2), see("a 1 2", 1, gpu=l40s)])
    with pytest.raises(RequestError, match=r"pcie_width: 16 and 8\); start ranks on GPUs of one kind"):
        check_equal_gpus([see("a", 0), see("a", 1, gpu=H100.changed(pcie_width=8))])
    with pytest.raises(RequestError, match="rank 2 on b sees no GPU, and other ranks there do"):
        check_equal_gpus([see("a", 0), see("b 1 2", 1), see("b 1 2")])
