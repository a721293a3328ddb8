"""Divide the devices of this machine among copies of a model, which are processes of their own."""

from __future__ import annotations

from upshift.errors import RequestError
from upshift.hardware.cpu_affinity import bind_process
from upshift.hardware.detect import detect
from upshift.settings import take_gpus


def count_replicas(requested: int | None, *, devices: int = 1) -> int:
    """Return the number of replicas: as requested, or as many as the GPUs allow, or without GPUs one for each NUMA node.

    Memory of another NUMA node is slower. ``devices``: the GPUs, or the cores, of each replica. Raise RequestError for more
    replicas than the GPUs, or the cores, allow."""
    host = detect()
    cores = host.cpu.usable_cores if host.cpu is not None else 1
    available = host.gpus_per_node or cores
    limit = max(available // devices, 1)
    if requested is not None and requested > limit:
        unit = "GPUs" if host.gpus_per_node else "cores"
        of_each = f", with {devices} of them for each," if devices > 1 else ""
        raise RequestError(
            f"--replicas {requested}{of_each} is more than the {available} {unit} of this machine; ask for at most {limit}"
        )
    if host.gpus_per_node:
        return requested or limit
    nodes = host.cpu.numa_nodes if host.cpu is not None and host.cpu.numa_nodes else 1
    return requested or min(nodes, limit)


def take_share(number: int, count: int, *, devices: int = 1) -> None:
    """Take the share of replica ``number`` of ``count``: some of the cores, or GPUs of its own.

    Call it before any library asks for the devices. ``devices``: the GPUs of each replica."""
    if detect().gpus_per_node:
        take_gpus(range(number * devices, (number + 1) * devices))
    else:
        bind_process(number, count)
