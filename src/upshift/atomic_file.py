"""Write files atomically: a reader sees the old content or the new content, never a part of either."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a temporary file next to the path, then rename it. Several processes may write the same path at once.

    The folder must exist. Links are followed. A path that is not a regular file, such as a pipe or /dev/null, is written
    directly. Raise OSError on failure."""
    encoded = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(encoded)
        return
    file = Path(os.path.realpath(path))
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(encoded)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk. Raise OSError on failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_and_rename(temporary: Path, path: Path) -> None:
    """Wait until a file, or all files of a folder, are on the disk. Then rename it.

    A power cut leaves no incomplete ``path``. Raise OSError on failure."""
    files = [temporary] if temporary.is_file() else [file for file in temporary.rglob("*") if file.is_file()]
    for file in files:
        sync_path(file)
    temporary.replace(path)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a path, so that another thread or process that makes the same file waits.

    The lock is a file named like the path, with ".lock" added. Its folder must exist. Raise OSError if it cannot be opened."""
    import fcntl  # not on every system

    with path.with_name(f"{path.name}.lock").open("wb") as lock:
        with suppress(OSError):  # a network file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_once(path: Path, make: Callable[[], None], *, beside: Path | None = None) -> None:
    """Call ``make`` if ``path`` does not exist. Raise OSError on failure.

    ``beside``: another file that ``make`` also writes. Other callers wait for that file, so its lock is taken."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(beside or path):
        if not path.exists():
            make()
