"""Examine folders and shared memory: free space, the rates of their disks, the size of /dev/shm."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from upshift.debugging.finding import Finding, error, ok, warning
from upshift.hardware.cgroup import read_text
from upshift.hardware.disk import fresh_disk_rate
from upshift.units import GIB, MIB, format_bytes

SLOW = 100e6  # bytes per second; a checkpoint of 7 B parameters with its optimizer, 84 GB, then takes a quarter of an hour
LOW_FREE_BYTES = 5 * GIB
SMALL_SHM = 1 * GIB  # docker gives 64 MiB
FULL = 0.95  # share of the space
NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "ceph", "beegfs", "virtiofs"}
PROBE_PREFIX = ".upshift_disk_probe_"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def usage(folder: Path) -> Usage:
    return Usage(*shutil.disk_usage(folder))


def examine_folder(folder: Path, *, purpose: str, option: str, probe_bytes: int, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield findings about a folder. ``option``: how a user chooses another folder for this purpose."""
    existing = _nearest_existing(folder)
    subject = f"{purpose} folder"
    kind = _filesystem(existing, root)
    if not existing.is_dir():
        yield error(subject, what=f"{existing} is not a folder", evidence=kind, fix=option)
        return
    if not os.access(existing, os.W_OK):
        yield error(subject, what=f"{existing} cannot be written", evidence=f"{kind}", fix=option)
        return
    free = usage(existing).free
    evidence = f"{existing}: {format_bytes(free)} free, {kind}"
    if free < LOW_FREE_BYTES:
        yield warning(
            subject,
            what=f"only {format_bytes(free)} free",
            evidence=evidence,
            fix=f"du -xh {existing} | sort -h | tail shows what takes it; or {option}",
        )
        if free < 2 * probe_bytes:
            return
    try:
        write, read = disk_rates(existing, probe_bytes)
    except OSError as failure:
        yield error(subject, what=f"writing to {existing} fails: {failure.strerror}", evidence=evidence, fix=option)
        return
    rates = f"writes {write / 1e6:,.0f} MB/s"
    if read is not None:
        rates += f", reads {read / 1e6:,.0f} MB/s"
    if write < SLOW or (read is not None and read < SLOW):
        yield warning(
            subject,
            what=f"its disk is slow: {rates}",
            evidence=f"{evidence}; {format_bytes(probe_bytes)} written and read",
            cause="a network file system" if kind in NETWORK_FILESYSTEMS else None,
            fix=f"use a local disk: {option}",
        )
    else:
        yield ok(subject, what=rates, evidence=f"{evidence}; {format_bytes(probe_bytes)} written and read")


def disk_rates(folder: Path, num_bytes: int) -> tuple[float, float | None]:
    """Return the bytes per second of writing to the disk, and of reading from it (None: the cache cannot be dropped)."""
    block = os.urandom(MIB)  # random bytes, because some disks do not store zeros
    # A name of its own: doctors on several hosts may look at one shared folder at the same time.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=PROBE_PREFIX) as file:
        start = time.perf_counter()
        for _ in range(num_bytes // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        write = num_bytes / (time.perf_counter() - start)
        return write, fresh_disk_rate(Path(file.name))


def examine_shm(folder: Path = Path("/dev/shm"), *, look: Callable[[Path], Usage] = usage) -> Iterator[Finding]:
    if not folder.is_dir():
        return
    space = look(folder)
    evidence = f"{format_bytes(space.used)} of {format_bytes(space.total)} used"
    if space.total and space.used > FULL * space.total:
        largest = sorted(((file.stat().st_size, file) for file in _files(folder)), reverse=True)[:3]
        names = " ".join(str(file) for _, file in largest)
        listed = "; ".join(f"{file.name} {format_bytes(size)}" for size, file in largest)
        if listed:
            evidence += f"; largest: {listed}"
        remove = f"rm {names}" if names else f"lsof +L1 {folder} shows deleted files that are still open"
        yield error(
            "/dev/shm",
            what="is full: data workers die with a bus error, ranks cannot start",
            evidence=evidence,
            fix=f"{remove}, if what made them has ended; or mount -o remount,size=8G /dev/shm",
        )
    elif space.total < SMALL_SHM:
        yield warning(
            "/dev/shm",
            what=f"has {format_bytes(space.total)}: data workers and NCCL pass tensors through it",
            evidence=evidence,
            fix="docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm of the pod",
        )
    else:
        yield ok("/dev/shm", what=f"{format_bytes(space.free)} free", evidence=evidence)


def _files(folder: Path) -> Iterator[Path]:
    try:
        yield from (path for path in folder.iterdir() if path.is_file())
    except OSError:
        return


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder


def _filesystem(folder: Path, root: Path) -> str:
    """Return the type of the file system that contains a folder: that of the longest mount point above it."""
    longest = ""
    kind = "file system unknown"
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        fields, _, right = line.partition(" - ")
        mount_point = fields.split()[4]
        if (folder == Path(mount_point) or Path(mount_point) in folder.parents) and len(mount_point) >= len(longest):
            longest = mount_point
            kind = right.split()[0]
    return kind
