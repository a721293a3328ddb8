"""Bind a rank to its own cores, whole NUMA nodes or a part of one, so that its memory is near.

Linux places a page on the node of the core that first writes it. So a rank that is bound before its first tensor gets near memory
without numactl. Hardware threads of one core stay together.
"""

from __future__ import annotations

import os
from pathlib import Path

CpuSet = tuple[int, ...]


def bind_process(local_rank: int, local_ranks: int) -> CpuSet | None:
    """Bind this process, and all threads that it starts later, to its share of the usable cores. Return the share.

    Return None and change nothing if the system cannot bind, if it has fewer cores than ranks, or if there is only one rank.
    """
    if not hasattr(os, "sched_setaffinity") or local_ranks == 1:
        return None
    share = cores_of(local_rank, local_ranks, allowed_cpus())
    if share is not None:
        os.sched_setaffinity(0, share)
    return share


def cores_of(local_rank: int, local_ranks: int, allowed: set[int], *, root: Path = Path("/")) -> CpuSet | None:
    """Return the hardware threads of a rank. Ranks share no core, and their numbers of cores differ by at most one.

    Return None if there are fewer cores than ranks."""
    cores = sorted({_core(cpu, allowed, root) for cpu in allowed}, key=lambda core: (_node(core[0], root), core))
    if local_ranks > len(cores):
        return None
    first, last = (len(cores) * rank // local_ranks for rank in (local_rank, local_rank + 1))
    return tuple(sorted(cpu for core in cores[first:last] for cpu in core))


def allowed_cpus() -> set[int]:
    """Return the hardware threads that this process may use. A system that does not tell allows all."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def one_per_core(cpus: set[int], *, root: Path = Path("/")) -> list[int]:
    """Return the first hardware thread of each core."""
    return sorted({_core(cpu, cpus, root)[0] for cpu in cpus})


def _core(cpu: int, allowed: set[int], root: Path) -> CpuSet:
    """Return the allowed hardware threads of the core that ``cpu`` belongs to."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    siblings = read_cpu_list(path) if path.is_file() else {cpu}
    return tuple(sorted(siblings & allowed))


def _node(cpu: int, root: Path) -> int:
    """Return the NUMA node of a hardware thread, or 0 if it is unknown."""
    nodes = (root / f"sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return min((int(node.name.removeprefix("node")) for node in nodes), default=0)


def read_cpu_list(path: Path) -> set[int]:
    """Read the CPU numbers of a file in the kernel's notation, such as 0-3,8."""
    cpus: set[int] = set()
    for item in path.read_text(encoding="ascii").strip().split(","):
        first, _, last = item.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
