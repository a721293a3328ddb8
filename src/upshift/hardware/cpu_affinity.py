"""Bind a rank to its own cores: whole NUMA nodes, or a part of one, so that it computes where its memory is.

Linux gives a page to the node of the core that first touches it. A rank that is bound before its first tensor has near memory,
and needs no numactl. Threads of one core stay with one rank.
"""

from __future__ import annotations

import os
from pathlib import Path

CpuSet = tuple[int, ...]


def bind(local_rank: int, local_ranks: int) -> CpuSet | None:
    """Bind this process, and all threads it starts later, to its share of the cores that it may use. Return the share.

    None: nothing was changed, because the system cannot bind, or has fewer cores than ranks, or one rank has all cores.
    """
    if not hasattr(os, "sched_setaffinity") or local_ranks == 1:
        return None
    share = cores_of(local_rank, local_ranks, os.sched_getaffinity(0))
    if share is not None:
        os.sched_setaffinity(0, share)
    return share


def cores_of(local_rank: int, local_ranks: int, allowed: set[int], *, root: Path = Path("/")) -> CpuSet | None:
    """Return the hardware threads of one rank. Ranks share no core, and their numbers of cores differ by at most one."""
    cores = sorted({_core(cpu, allowed, root) for cpu in allowed}, key=lambda core: (_node(core[0], root), core))
    if local_ranks > len(cores):
        return None
    first, last = (len(cores) * rank // local_ranks for rank in (local_rank, local_rank + 1))
    return tuple(sorted(cpu for core in cores[first:last] for cpu in core))


def _core(cpu: int, allowed: set[int], root: Path) -> CpuSet:
    """Return the allowed hardware threads of the core of ``cpu``."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    siblings = read_cpu_list(path) if path.is_file() else {cpu}
    return tuple(sorted(siblings & allowed))


def _node(cpu: int, root: Path) -> int:
    """Return the NUMA node of a hardware thread; 0 where the system does not tell."""
    nodes = (root / f"sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return min((int(node.name.removeprefix("node")) for node in nodes), default=0)


def read_cpu_list(path: Path) -> set[int]:
    """Read the CPU numbers of a file in the kernel's notation: 0-3,8."""
    found: set[int] = set()
    for part in path.read_text(encoding="ascii").strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
