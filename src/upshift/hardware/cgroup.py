"""Read the limits that control groups put on this process: cores and memory, v1, v2 and hybrid, the tightest of all ancestors.

The kernel enforces every ancestor's limit, so the files of the process's own group alone would overstate what is usable. Swap
limits and memory.high (which slows but does not kill) are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

UNLIMITED = 2**60  # v1 writes the largest page-aligned int64 for "no limit"


class CgroupLimits(NamedTuple):
    cores: float | None
    memory_bytes: int | None
    free_memory_bytes: int | None


class _Group(NamedTuple):
    path: Path
    version: int


def read_limits(root: Path) -> CgroupLimits:
    """Return the limits on the calling process; `root` is the folder that holds proc and sys. None: no limit found."""
    cores = [_cores(group) for group in _ancestors(root, "cpu")]
    memory = [_memory(group) for group in _ancestors(root, "memory")]
    return CgroupLimits(
        cores=min((limit for limit in cores if limit is not None), default=None),
        memory_bytes=min((pair[0] for pair in memory if pair is not None), default=None),
        free_memory_bytes=min((pair[1] for pair in memory if pair is not None), default=None),
    )


def own_group(root: Path, controller: str) -> Path | None:
    """Return the folder of this process's own group, whose files tell what happened to the group."""
    return next((group.path for group in _ancestors(root, controller)), None)


def _cores(group: _Group) -> float | None:
    if group.version == 2:
        quota, _, period = read_text(group.path / "cpu.max").partition(" ")
    else:
        quota = read_text(group.path / "cpu.cfs_quota_us")
        period = read_text(group.path / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _memory(group: _Group) -> tuple[int, int] | None:
    """Return the limit and what is left of it, in bytes.

    Reclaimable file pages do not count as used, as in Kubernetes' working set.
    """
    names = ("memory.max", "memory.current", "inactive_file")
    if group.version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit = read_text(group.path / names[0])
    used = read_text(group.path / names[1])
    if not limit.isdigit() or int(limit) >= UNLIMITED:
        return None
    reclaimable = dict(line.split() for line in read_text(group.path / "memory.stat").splitlines()).get(names[2], "0")
    working_set = max(0, int(used or 0) - int(reclaimable))
    return int(limit), max(0, int(limit) - working_set)


def _ancestors(root: Path, controller: str) -> Iterator[_Group]:
    """Yield the folders of this process's groups for one controller, from its own up to the mount point."""
    membership = _membership(root)
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        # proc_pid_mountinfo(5): id parent device root mount_point options [tags..] - type source super_options
        left, _, right = line.partition(" - ")
        mount_root, mount_point = left.split()[3:5]
        kind, *_, super_options = right.split()
        if kind == "cgroup2":
            version = 2
            own = membership.get("")
        elif kind == "cgroup" and controller in super_options.split(","):
            version = 1
            own = membership.get(controller)
        else:
            continue
        if own is None:
            continue
        top = root / mount_point.lstrip("/")
        base = mount_root.rstrip("/")
        inside = own[len(base) :] if own.startswith(f"{base}/") else ""
        folder = top / inside.strip("/")
        while folder != top and top in folder.parents:
            yield _Group(folder, version)
            folder = folder.parent
        yield _Group(top, version)


def _membership(root: Path) -> dict[str, str]:
    """Return the group path of each controller; the key of the v2 hierarchy is the empty string."""
    groups = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def read_text(path: Path) -> str:
    """Return the stripped content, empty if the file cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
