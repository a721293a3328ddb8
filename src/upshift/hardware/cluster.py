"""Join the machines of a launcher to one Host, with the measured link between them.

Machines are planned as equal ones. Each step waits for the slowest machine, so the smallest amount and the lowest rate count.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from upshift.errors import RequestError
from upshift.hardware.catalog.interconnect import gpu_link
from upshift.hardware.cgroup import read_text
from upshift.hardware.spec import Cpu, Exchange, Gpu, Host, Isa, Link, Measured, Rates
from upshift.units import MIB
from upshift.value import Value

Number = TypeVar("Number", int, float)
LINK_BYTES = 4 * MIB
SMALL_BYTES = 1024
REPEATS = 3
LARGEST_COUNTS = (  # fields of Measured whose largest value counts: times, and the memory of a process
    "dispatch_seconds",
    "gpu_dispatch_seconds",
    "first_touch_seconds_per_byte",
    "base_resident_bytes",
)


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
    cpus = [host.cpu for host in hosts if host.cpu is not None]
    return first.changed(
        name=f"{len(hosts)} hosts",
        num_nodes=len(hosts),
        cpu=_weakest_cpu(cpus) if len(cpus) == len(hosts) else None,
        gpu=_smallest_gpu([host.gpu for host in hosts if host.gpu is not None]),
        intra_node=_link_of_all([host.intra_node for host in hosts]),
        inter_node=link,
        host_to_device=_link_of_all([host.host_to_device for host in hosts]),
        disk_bytes_per_second=_minimum([host.disk_bytes_per_second for host in hosts]),
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
    """Raise RequestError if the ranks of a machine see GPUs of different products, or if some of them see none."""
    gpus_of_machines: dict[str, list[Gpu]] = {}
    for visible in gpus_of_ranks:
        gpus_of_machines.setdefault(visible.machine, []).extend(visible.gpus.values())
    for rank, visible in enumerate(gpus_of_ranks):
        if gpus_of_machines[visible.machine] and not visible.gpus:
            raise RequestError(
                f"rank {rank} on {visible.machine.split()[0]} sees no GPU, and other ranks there do; give each rank one, as with "
                "srun --gpus-per-task=1, or leave CUDA_VISIBLE_DEVICES the same for all"
            )
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
    known_values = _all_known(values)
    return min(known_values) if known_values else None


def _maximum(values: Sequence[Number | None]) -> Number | None:
    """Return the largest value, or None (unknown) if a value is unknown."""
    known_values = _all_known(values)
    return max(known_values) if known_values else None


def _all_known(values: Sequence[Number | None]) -> list[Number]:
    """Return the values, or none of them if one is unknown."""
    known_values = [value for value in values if value is not None]
    return known_values if len(known_values) == len(values) else []


def _smallest_gpu(gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU that all machines have, with the smallest memory; None if they have none."""
    if not gpus:
        return None
    return gpus[0].changed(
        memory_bytes=_minimum([gpu.memory_bytes for gpu in gpus]),
        free_memory_bytes=_minimum([gpu.free_memory_bytes for gpu in gpus]),
    )


def _link_of_all(links: Sequence[Link | None]) -> Link | None:
    """Return the slowest link, or None (unknown) if a machine's link is unknown."""
    known_links = [link for link in links if link is not None]
    return _slowest_link(known_links) if len(known_links) == len(links) else None


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
    """Return the lowest rates, the longest times and the largest process of all machines. None if a machine was not measured.

    A rate, a time or an exchange that one machine lacks is unknown. The versions, and how the probe went, are the first one's."""
    all_measured = [measured for measured in measurements if measured is not None]
    if len(all_measured) < len(measurements):
        return None
    first = all_measured[0]
    longest_times = {name: _maximum([getattr(measured, name) for measured in all_measured]) for name in LARGEST_COUNTS}
    compilers = {name: _of_all([getattr(measured, name) for measured in all_measured]) for name in ("compiler", "gpu_compiler")}
    gpu_rates = [measured.gpu for measured in all_measured if measured.gpu is not None]
    has_equal_groups = len({measured.gpu_exchange_ranks for measured in all_measured}) == 1
    return first.changed(
        num_threads=min(measured.num_threads for measured in all_measured),
        cpu=_lowest_rates([measured.cpu for measured in all_measured]),
        gpu=_lowest_rates(gpu_rates) if len(gpu_rates) == len(all_measured) else None,
        host_to_device_bytes_per_second=_minimum([measured.host_to_device_bytes_per_second for measured in all_measured]),
        exchanges=_slowest_exchanges([measured.exchanges for measured in all_measured]),
        gpu_exchanges=_slowest_exchanges([measured.gpu_exchanges for measured in all_measured]) if has_equal_groups else {},
        gpu_exchange_ranks=first.gpu_exchange_ranks if has_equal_groups else None,
        **longest_times,
        **compilers,
    )


def _lowest_rates(rates: Sequence[Rates]) -> Rates:
    return rates[0].changed(**{name: _minimum([getattr(rate, name) for rate in rates]) for name in type(rates[0]).model_fields})


def _slowest_exchanges(exchanges: Sequence[Mapping[Exchange, Link]]) -> dict[Exchange, Link]:
    """Return the slowest link of each operation that all machines have measured."""
    shared = [name for name in exchanges[0] if all(name in links for links in exchanges)]
    return {name: _slowest_link([links[name] for links in exchanges]) for name in shared}


def _slowest_link(links: Sequence[Link]) -> Link:
    """Return the link of the lowest rate, with the longest latency of all."""
    slowest = min(links, key=lambda link: (link.bytes_per_second, link.name))
    return slowest.changed(latency_seconds=_maximum([link.latency_seconds for link in links]))


def _of_all(answers: Sequence[bool | None]) -> bool | None:
    """Return whether all answers are True; None if one is unknown and none is False."""
    if False in answers:
        return False
    return None if None in answers else True
