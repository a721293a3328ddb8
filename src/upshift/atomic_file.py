"""Write files that a reader meets whole: the old content or the new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a temporary file beside the path and rename it. This is right also beside another process that writes the same.

    The folder must exist. A link is followed. A path that is no regular file, such as a pipe or /dev/null, is written to
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


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock, so that another thread or process that makes the same waits until this is done.

    The folder must exist. Raise OSError if the lock file cannot be opened."""
    import fcntl  # not on every system

    with path.with_name(f"{path.name}.lock").open("wb") as lock:
        with suppress(OSError):  # a network file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_once(path: Path, make: Callable[[], None], *, beside: Path | None = None) -> None:
    """Call ``make`` if ``path`` does not exist.

    ``beside``: another file that ``make`` also gives and that others wait for; its lock is taken. Raise OSError on failure."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(beside or path):
        if not path.exists():
            make()
