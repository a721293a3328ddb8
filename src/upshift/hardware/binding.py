"""A rank's own cores: whole NUMA nodes, or a part of one, so that it computes where its memory is.

Linux gives a page to the node of the core that first touches it: who is bound before its first tensor has near memory, and needs
no numactl. Threads of one core stay with one rank.
"""

from __future__ import annotations

import os
from pathlib import Path

CpuSet = tuple[int, ...]


def bind(local_rank: int, local_ranks: int) -> CpuSet | None:
    """Takes this process's share of the cores it may use, for all threads it starts later. None: left as it was, where the system
    cannot, or has fewer cores than ranks, or one rank has all."""
    if not hasattr(os, "sched_setaffinity") or local_ranks == 1:
        return None
    share = cores_of(local_rank, local_ranks, os.sched_getaffinity(0))
    if share is not None:
        os.sched_setaffinity(0, share)
    return share


def cores_of(local_rank: int, local_ranks: int, allowed: set[int], *, root: Path = Path("/")) -> CpuSet | None:
    """The hardware threads of one rank. Ranks share no core, and every one has equally many, up to one."""
    cores = sorted({_core(cpu, allowed, root) for cpu in allowed}, key=lambda core: (_node(core[0], root), core))
    if local_ranks > len(cores):
        return None
    first, last = (len(cores) * rank // local_ranks for rank in (local_rank, local_rank + 1))
    return tuple(sorted(cpu for core in cores[first:last] for cpu in core))


def _core(cpu: int, allowed: set[int], root: Path) -> CpuSet:
    """The allowed hardware threads of this one's core."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    siblings = read_cpu_list(path) if path.is_file() else {cpu}
    return tuple(sorted(siblings & allowed))


def _node(cpu: int, root: Path) -> int:
    """Of memory; 0 where the system does not tell."""
    nodes = (root / f"sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return min((int(node.name.removeprefix("node")) for node in nodes), default=0)


def read_cpu_list(path: Path) -> set[int]:
    """The kernel's notation: 0-3,8."""
    found: set[int] = set()
    for part in path.read_text(encoding="ascii").strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
