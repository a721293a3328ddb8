"""Join the machines of a launcher to one Host, with the measured link between them.

Machines are planned as equal ones. Each step waits for the slowest machine, so the smallest amount and the lowest rate count.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from upshift.errors import RequestError
from upshift.hardware.catalog.interconnect import gpu_link
from upshift.hardware.cgroup import read_text
from upshift.hardware.spec import Cpu, Gpu, Host, Isa, Link, Measured
from upshift.units import MIB
from upshift.value import Value

Number = TypeVar("Number", int, float)
LINK_BYTES = 4 * MIB
SMALL_BYTES = 1024
REPEATS = 3


def join_hosts(hosts: Sequence[Host], link: Link | None) -> Host:
    """Return one Host for several machines. Raise RequestError if they have different devices.

    ``hosts``: each machine as its own ranks detected it. ``link``: between the machines; None: not measured.
    """
    first = hosts[0]
    if len(hosts) == 1:
        return first
    gpus = {(host.gpus_per_node, str(host.gpu.identity()) if host.gpu else "") for host in hosts}
    if len(gpus) > 1 or any(host.mixed_gpus for host in hosts):
        names = {f"{host.gpus_per_node} x {host.gpu.name if host.gpu else 'mixed GPUs'}" for host in hosts}
        raise RequestError(f"these hosts have different devices ({', '.join(sorted(names))}); start a job on hosts of one kind")
    free = [host.gpu.free_memory_bytes for host in hosts if host.gpu is not None]
    cpus = [host.cpu for host in hosts if host.cpu is not None]
    return first.changed(
        name=f"{len(hosts)} hosts",
        num_nodes=len(hosts),
        cpu=_weakest_cpu(cpus) if len(cpus) == len(hosts) else None,
        gpu=first.gpu.changed(free_memory_bytes=_minimum(free)) if first.gpu is not None else None,
        inter_node=link,
        measured=_slowest_measured([host.measured for host in hosts]),
        origin=first.origin | {"num_nodes": "the launcher", "inter_node": "measured" if link else "unknown: not measured"},
    )


class VisibleGpus(Value):
    """Hold the GPUs that one rank sees, and the machine or the container that it runs in."""

    machine: str
    gpus: dict[str, Gpu]  # by UUID


def machine_id(root: Path = Path("/")) -> str:
    """Return a text that is the same in all ranks of a machine or a container, and differs between two of them.

    Two machines may have one name, and containers have the boot id of their machine. The namespace of processes tells containers
    apart. Programs that start a container for each rank on a cluster (Apptainer, Enroot) leave ranks in the machine's one."""
    boot = read_text(root / "proc/sys/kernel/random/boot_id")
    try:
        namespace = os.readlink(root / "proc/self/ns/pid")
    except OSError:
        namespace = ""
    return " ".join((platform.node() or "localhost", boot, namespace))


def with_gpus_of_all_ranks(host: Host, gpus_of_ranks: Sequence[VisibleGpus]) -> Host:
    """Return this host with all GPUs that its ranks see. A launcher may show each rank one GPU only (``--gpus-per-task=1``).

    Args:
        gpus_of_ranks: of every rank of the job.
    """
    here = machine_id()
    uuids = {uuid for visible in gpus_of_ranks if visible.machine == here for uuid in visible.gpus}
    if host.gpu is None or len(uuids) <= host.gpus_per_node:
        return host
    link = gpu_link(host.gpu)
    origin = host.origin | {"gpus_per_node": "NVML, over all ranks", "intra_node": "NVML and the link's specification"}
    return host.changed(gpus_per_node=len(uuids), intra_node=link, origin=origin)


def check_equal_gpus(gpus_of_ranks: Sequence[VisibleGpus]) -> None:
    """Raise RequestError if the ranks of a machine see GPUs of different products."""
    gpus_of_machines: dict[str, list[Gpu]] = {}
    for visible in gpus_of_ranks:
        gpus_of_machines.setdefault(visible.machine, []).extend(visible.gpus.values())
    for machine, gpus in gpus_of_machines.items():
        identities = [gpu.identity() for gpu in gpus]
        different = next((name for name in Gpu.model_fields if len({str(fields.get(name)) for fields in identities}) > 1), None)
        if different is not None:
            values = " and ".join(sorted({str(fields[different]) for fields in identities}))
            problem = f"the ranks on {machine.split()[0]} see GPUs of different kinds ({different}: {values})"
            raise RequestError(f"{problem}; start ranks on GPUs of one kind")


def measure_link(group: Any = None) -> Link | None:
    """Measure the link between the ranks of a group, one on each machine. Return None if there is one rank.

    Every rank of ``group`` (None: all ranks) must call this function. All get the same link.
    """
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    if ranks == 1:
        return None
    seconds = [_ring_seconds(torch.zeros(size // 4), group) for size in (SMALL_BYTES, LINK_BYTES)]
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    small, large = slowest.tolist()
    ring_bytes = 2.0 * (ranks - 1) / ranks * LINK_BYTES  # a ring all-reduce sends so many over each machine's port
    return Link(
        name="network",
        bytes_per_second=ring_bytes / max(large - small, 0.1 * large),
        latency_seconds=small / (2 * (ranks - 1)),
        measured=True,
    )


def _ring_seconds(tensor: Any, group: Any) -> float:
    import torch.distributed as dist

    samples = []
    for _ in range(REPEATS + 1):
        dist.barrier(group)
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        samples.append(time.perf_counter() - start)
    return median(samples[1:])


def _minimum(values: Sequence[Number | None]) -> Number | None:
    """Return the smallest value, or None (unknown) if a value is unknown."""
    known_values = [value for value in values if value is not None]
    return min(known_values) if known_values and len(known_values) == len(values) else None


def _weakest_cpu(cpus: Sequence[Cpu]) -> Cpu:
    """Return a Cpu with the smallest amounts of all, and with the instructions that all have."""
    first = cpus[0]
    names = {cpu.model_name for cpu in cpus}
    instructions: list[tuple[Isa, ...]] = [cpu.isa for cpu in cpus if cpu.isa is not None]
    shared: tuple[Isa, ...] | None = None
    if len(instructions) == len(cpus):
        shared = tuple(name for name in instructions[0] if all(name in isa for isa in instructions))
    return first.changed(
        model_name=first.model_name if len(names) == 1 else " or ".join(sorted(str(name) for name in names)),
        physical_cores=_minimum([cpu.physical_cores for cpu in cpus]),
        usable_cores=min(cpu.usable_cores for cpu in cpus),
        numa_nodes=_minimum([cpu.numa_nodes for cpu in cpus]),
        isa=shared,
        memory_bytes=_minimum([cpu.memory_bytes for cpu in cpus]),
        free_memory_bytes=_minimum([cpu.free_memory_bytes for cpu in cpus]),
    )


def _slowest_measured(measurements: Sequence[Measured | None]) -> Measured | None:
    """Return the rates of the slowest machine, and the times and sizes of the first one. None if a machine was not measured."""
    all_measured = [measured for measured in measurements if measured is not None]
    if len(all_measured) < len(measurements):
        return None
    first = all_measured[0]
    names = type(first.cpu).model_fields
    rates = {name: _minimum([getattr(measured.cpu, name) for measured in all_measured]) for name in names}
    exchanges = {
        name: min((measured.exchanges[name] for measured in all_measured), key=lambda link: link.bytes_per_second)
        for name in first.exchanges
        if all(name in measured.exchanges for measured in all_measured)
    }
    threads = min(measured.num_threads for measured in all_measured)
    return first.changed(cpu=first.cpu.changed(**rates), exchanges=exchanges, num_threads=threads)
