"""Examine the cores and the memory of this machine: governor, NUMA, control groups, swap, load, heat.

All facts come from the kernel's files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from upshift.debugging.finding import Finding, error, hint, ok, warning
from upshift.hardware.cgroup import process_cgroup, read_limits, read_text
from upshift.hardware.spec import Host
from upshift.units import GIB, KIB, MIB, format_bytes

SWAP_NOTICED = 0.02  # share of the memory; less in swap is no problem
LOW_FREE_SHARE = 0.1  # share of the memory
BUSY = 0.5  # runnable threads of other programs, for each usable core
THROTTLED = 0.05  # share of the periods of the CPU quota
STOLEN = 0.03  # share of the time since the start
FEW_FILES = 4096


def examine_cpu(host: Host, root: Path) -> Iterator[Finding]:
    """Yield findings about the cores. ``root``: the folder that contains proc and sys."""
    cpu = host.cpu
    if cpu is None:
        return
    origin = host.origin.get("cpu.usable_cores", "unknown")
    evidence = f"{cpu.usable_cores} of {cpu.physical_cores or 'unknown'} cores usable ({origin})"
    if read_text(root / "sys/devices/system/cpu/smt/active") == "1":
        evidence += "; SMT is on, Upshift computes with one thread of each core"
    yield ok("CPU", what=cpu.model_name or "of unknown name", evidence=evidence)
    yield from _governor(root)
    yield from _numa(cpu.numa_nodes)
    yield from _quota(cpu.physical_cores, root)
    yield from _load(cpu.usable_cores, root)
    yield from _heat(root)


def _governor(root: Path) -> Iterator[Finding]:
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    governors = {read_text(file) for file in files} - {""}
    if governors - {"performance"}:
        yield hint(
            "CPU governor",
            what=f"cores change their clock by the governor {', '.join(sorted(governors))}",
            evidence="/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
            fix="sudo cpupower frequency-set -g performance",
        )


def _numa(nodes: int | None) -> Iterator[Finding]:
    if nodes is not None and nodes > 1:
        yield hint(
            "NUMA",
            what=f"{nodes} nodes: one process over all of them reads far memory",
            evidence="/sys/devices/system/node",
            fix=f"upshift launch --hosts localhost --nproc {nodes} -- train ... binds one rank to each node",
        )


def _quota(physical: int | None, root: Path) -> Iterator[Finding]:
    limits = read_limits(root)
    if limits.cores is not None and physical is not None and limits.cores < physical:
        yield hint(
            "cgroup",
            what=f"a quota of {limits.cores:g} cores on a machine of {physical}",
            evidence="cpu.max of this process's control group",
            fix="raise --cpus of docker run, or limits.cpu of the pod, if the rest of the machine is yours",
        )
    group = process_cgroup(root, "cpu")
    counters: dict[str, str] = {}
    if group:
        counters = dict(line.split()[:2] for line in read_text(group / "cpu.stat").splitlines() if " " in line)
    periods = int(counters.get("nr_periods", 0))
    throttled = int(counters.get("nr_throttled", 0))
    if periods and throttled > THROTTLED * periods:
        yield warning(
            "cgroup",
            what=f"stopped by its CPU quota in {throttled / periods:.0%} of the periods",
            evidence=f"cpu.stat: nr_throttled {throttled:,} of nr_periods {periods:,}",
            fix=f"export OMP_NUM_THREADS={max(1, int(limits.cores or 1))}; or raise the quota",
            cause="more threads than the quota has cores only wait",
        )


def _load(usable: int, root: Path) -> Iterator[Finding]:
    averages = read_text(root / "proc/loadavg").split()
    if averages and float(averages[0]) > BUSY * usable:
        yield warning(
            "load",
            what=f"other work runs: load {averages[0]} on {usable} usable cores",
            evidence="/proc/loadavg, the last minute",
            fix="ps -eo pid,pcpu,rss,args --sort=-pcpu | head shows it; measure when it is gone",
        )
    jiffies = [int(field) for field in read_text(root / "proc/stat").partition("\n")[0].split()[1:]]
    if len(jiffies) > 7 and jiffies[7] > STOLEN * sum(jiffies[:8]):
        yield warning(
            "load",
            what=f"the virtual machine was not given {jiffies[7] / sum(jiffies[:8]):.0%} of its time",
            evidence="steal in /proc/stat, since the start",
            fix="rent an instance with dedicated cores (timings vary on this one), and there: upshift doctor",
        )


def _heat(root: Path) -> Iterator[Finding]:
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/package_throttle_count")
    counts = [int(text) for file in files if (text := read_text(file)).isdigit()]
    if any(counts):
        yield warning(
            "CPU",
            what="has throttled because of heat",
            evidence=f"package_throttle_count {max(counts):,} since the start",
            fix="clean its fans; watch it under load with: watch sensors",
        )


def examine_memory(
    host: Host, root: Path, *, needed_bytes: float | None = None, open_files: int | None = None
) -> Iterator[Finding]:
    """Yield findings about the memory of the host.

    ``needed_bytes``: the memory that all processes of a plan need. ``open_files``: how many files this process may open.
    """
    cpu = host.cpu
    if cpu is not None and cpu.memory_bytes and cpu.free_memory_bytes is not None:
        origin = host.origin.get("cpu.memory_bytes", "unknown")
        yield from _free_memory(cpu.memory_bytes, cpu.free_memory_bytes, origin, needed_bytes, root)
    kib = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        if len(line.split()) > 1:
            kib[line.split(":")[0]] = int(line.split()[1])
    yield from _swap(kib)
    yield from _pages(kib, root)
    group = process_cgroup(root, "memory")
    events: dict[str, str] = {}
    if group:
        events = dict(line.split() for line in read_text(group / "memory.events").splitlines())
    if int(events.get("oom_kill", 0)):
        yield warning(
            "cgroup",
            what=f"the kernel killed {events['oom_kill']} processes here for memory",
            evidence="memory.events of this process's control group",
            fix="raise --memory of docker run, or limits.memory of the pod; or upshift plan --set per_device_train_batch_size=1",
        )
    if open_files is not None and open_files < FEW_FILES:
        yield hint(
            "open files",
            what=f"a process may open {open_files:,}; data workers and ranks pass tensors by files",
            evidence="RLIMIT_NOFILE",
            fix="ulimit -n 65536",
        )


def _free_memory(total: int, free: int, origin: str, needed: float | None, root: Path) -> Iterator[Finding]:
    evidence = f"{format_bytes(free)} free of {format_bytes(total)} ({origin})"
    limit = read_limits(root).memory_bytes
    if needed is not None and needed > free:
        if limit is not None and needed > limit:
            enough = math.ceil(1.1 * needed / GIB)
            shortage = f"the control group has a limit of {format_bytes(limit)}"
            fix = f"raise the limit: docker run --memory {enough}g, or limits.memory: {enough}Gi of the pod"
        else:
            shortage = f"the machine has {format_bytes(free)} free"
            fix = "upshift plan again: it plans for what is free; or end what holds it: ps -eo pid,rss,args --sort=-rss | head"
        yield error(
            "memory",
            what=f"the plan needs {format_bytes(needed)}, and {shortage}",
            evidence=f"{evidence}; the plan holds {format_bytes(needed)}",
            fix=fix,
        )
    elif free < LOW_FREE_SHARE * total:
        yield warning(
            "memory",
            what=f"only {free / total:.0%} are free",
            evidence=evidence,
            fix="ps -eo pid,rss,args --sort=-rss | head shows who holds it",
        )
    else:
        yield ok("memory", what=f"{format_bytes(free)} free", evidence=evidence)


def _swap(kib: dict[str, int]) -> Iterator[Finding]:
    total = kib.get("SwapTotal", 0)
    free = kib.get("SwapFree", 0)
    used = total - free
    if used > SWAP_NOTICED * kib.get("MemTotal", 0) and used:
        yield warning(
            "swap",
            what=f"{format_bytes(used * KIB)} lie in swap: what touches them waits for the disk",
            evidence="/proc/meminfo",
            fix="end what fills the memory, then: sudo swapoff -a && sudo swapon -a",
        )
    elif total:
        yield ok("swap", what=f"{format_bytes(total * KIB)}, {format_bytes(used * KIB)} used", evidence="/proc/meminfo")
    else:
        yield ok("swap", what="none: memory that runs out ends a process at once", evidence="/proc/meminfo")


def _pages(kib: dict[str, int], root: Path) -> Iterator[Finding]:
    setting = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in setting:
        yield hint(
            "huge pages",
            what="never used: large tensors cost more page faults and address look-ups",
            evidence="/sys/kernel/mm/transparent_hugepage/enabled",
            fix="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled; export THP_MEM_ALLOC_ENABLE=1",
        )
    reserved = kib.get("HugePages_Free", 0) * kib.get("Hugepagesize", 0) * KIB
    if reserved > 64 * MIB:
        yield hint(
            "huge pages",
            what=f"{format_bytes(reserved)} are reserved and unused: nothing else can have them",
            evidence="HugePages_Free in /proc/meminfo",
            fix="echo 0 | sudo tee /proc/sys/vm/nr_hugepages",
        )
