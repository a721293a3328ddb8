"""Files that a reader meets whole: the old content or the new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Written beside and renamed; right also beside another process that writes the same. Its folder must exist. A link is
    followed; what is no regular file, such as a pipe or /dev/null, is written to as it is. Raises OSError."""
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
    """Whoever makes the same waits until this is done, in another process, too. The folder must exist. Raises OSError."""
    import fcntl  # not on every system

    with path.with_name(f"{path.name}.lock").open("wb") as lock:
        with suppress(OSError):  # a network file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_once(path: Path, make: Callable[[], None], *, beside: Path | None = None) -> None:
    """Where ``path`` is not there. ``beside``: what ``make`` gives, too, and others wait for. Raises OSError."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(beside or path):
        if not path.exists():
            make()
