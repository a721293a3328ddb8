"""Read the limits that control groups (v1, v2 or both) set for the cores and the memory of this process.

The kernel enforces the limits of the process's group and of all its ancestors, so the smallest limit counts. Swap limits are
ignored, and so is memory.high, which slows a process but does not kill it.
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
    """Return the limits of this process. None: no limit. `root`: the folder that contains proc and sys."""
    cores = [_cores(group) for group in _ancestors(root, "cpu")]
    memory = [_memory(group) for group in _ancestors(root, "memory")]
    return CgroupLimits(
        cores=min((limit for limit in cores if limit is not None), default=None),
        memory_bytes=min((pair[0] for pair in memory if pair is not None), default=None),
        free_memory_bytes=min((pair[1] for pair in memory if pair is not None), default=None),
    )


def process_cgroup(root: Path, controller: str) -> Path | None:
    """Return the folder of this process's own group, which has the group's statistics, or None if there is no group."""
    return next((group.path for group in _ancestors(root, controller)), None)


def _cores(group: _Group) -> float | None:
    if group.version == 2:
        quota, _, period = read_text(group.path / "cpu.max").partition(" ")
    else:
        quota = read_text(group.path / "cpu.cfs_quota_us")
        period = read_text(group.path / "cpu.cfs_period_us")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)


def _memory(group: _Group) -> tuple[int, int] | None:
    """Return the limit, and the part of it that is free, in bytes.

    Pages of files do not count as used, as in the kernel's MemAvailable: the kernel takes them back before it ends a process.
    """
    names = ("memory.max", "memory.current")
    prefix = ""
    if group.version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        prefix = "total_"  # with the groups below
    limit = read_text(group.path / names[0])
    used = read_text(group.path / names[1])
    if not limit.isdigit() or int(limit) >= UNLIMITED:
        return None
    statistics = dict(line.split() for line in read_text(group.path / "memory.stat").splitlines())
    file_pages = sum(int(statistics.get(f"{prefix}{kind}_file", "0")) for kind in ("active", "inactive"))
    held = max(0, int(used or 0) - file_pages)
    return int(limit), max(0, int(limit) - held)


def _ancestors(root: Path, controller: str) -> Iterator[_Group]:
    """Yield the folders of this process's groups for a controller, from its own group up to the mount point."""
    membership = _membership(root)
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        # proc_pid_mountinfo(5): id parent device root mount_point options [tags..] - type source super_options
        fields, _, right = line.partition(" - ")
        mount_root, mount_point = fields.split()[3:5]
        kind, *_, super_options = right.split()
        if kind == "cgroup2":
            version = 2
            group_path = membership.get("")
        elif kind == "cgroup" and controller in super_options.split(","):
            version = 1
            group_path = membership.get(controller)
        else:
            continue
        if group_path is None:
            continue
        top = root / mount_point.lstrip("/")
        base = mount_root.rstrip("/")
        inside = group_path[len(base) :] if group_path.startswith(f"{base}/") else ""
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
