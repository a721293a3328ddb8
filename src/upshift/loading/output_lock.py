"""Allow one writer at a time for an output, by a lock that ends with the process that holds it.

The lock is flock(2) on a small file in the output folder, or next to an output that is a file. The file names the holder. On
Linux the lock also works between hosts that share an NFS folder. The file is removed when the lock is released. After a kill the
file remains, without a lock.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from upshift.errors import RequestError

LOCK_NAME = ".upshift.lock"  # in an output folder
HOLDER_BYTES = 1000  # the most bytes that are read of the lock file
ENDING_SECONDS = 30.0  # children of a killed process hold its lock until their writes are on the disk
POLL_SECONDS = 0.05
DYING_SECONDS = 1.0  # a killed process exists until the kernel has freed its memory


class OutputLock:
    """The lock of one output, held until ``release``.

    The constructor raises RequestError if another process or thread holds it."""

    def __init__(self, output: Path, lock_file: Path) -> None:
        self.output = output
        self.lock_file = lock_file
        self.descriptor = self._acquire()
        with suppress(OSError):  # the disk is full: the lock holds without the holder's name
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)

    def release(self) -> None:
        """Remove the lock file, then release the lock. A process that comes later then creates a new file."""
        import fcntl  # not on every system

        with suppress(OSError):
            self.lock_file.unlink()
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # this releases it for children that inherited the descriptor, too
        os.close(self.descriptor)

    def _acquire(self) -> int:
        start = time.monotonic()
        while True:
            descriptor = _open_lock_file(self.output, self.lock_file)
            try:
                _flock(descriptor)
                if _is_at(descriptor, self.lock_file):
                    return descriptor
                os.close(descriptor)  # the previous holder has removed the file in the meantime
            except BlockingIOError:
                holder = os.pread(descriptor, HOLDER_BYTES, 0).decode(errors="replace")
                os.close(descriptor)
                waited = time.monotonic() - start
                if waited > ENDING_SECONDS or (waited > DYING_SECONDS and _may_live(holder)):
                    raise RequestError(self._refusal(holder)) from None
                time.sleep(POLL_SECONDS)

    def _refusal(self, holder: str) -> str:
        pid, _, host = holder.partition(" ")
        by = f"process {pid} on {host}" if pid.isdecimal() and host else "another process"
        return f"output {self.output} is being written by {by}; wait until that ends, or give another output"


_held: dict[Path, tuple[int, OutputLock]] = {}  # claims in this process, by lock file: thread and lock
_guard = threading.Lock()


@contextmanager
def claimed(output: Path) -> Iterator[None]:
    """Hold the lock of an output folder while the context is open. Claims of one thread may be nested.

    A missing folder is created, and removed again after an error if it is empty. Raise RequestError if another process or
    thread holds the lock, or if the folder cannot be created.
    """
    if output.exists() and not output.is_dir():
        raise RequestError(f"output directory {output} is a file; give a directory")
    was_created = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"output directory {output} cannot be used: {error.strerror}; give another one") from None
    try:
        with _held_once(output):
            yield
    except BaseException:
        if was_created:
            with suppress(OSError):  # the folder is not empty
                output.rmdir()
        raise


@contextmanager
def _held_once(output: Path) -> Iterator[None]:
    lock_file = output.resolve() / LOCK_NAME
    thread = threading.get_ident()
    with _guard:
        holder, _ = _held.get(lock_file, (None, None))
        if holder is None:
            _held[lock_file] = thread, OutputLock(output, lock_file)
        elif holder != thread:
            raise RequestError(f"output {output} is being written by another thread of this process; give another output")
    try:
        yield
    finally:
        if holder is None:
            with _guard:
                _, lock = _held.pop(lock_file)
            lock.release()


@contextmanager
def locked(output: Path, lock_file: Path) -> Iterator[None]:
    """Hold one lock while the context is open. Raise RequestError if any process or thread holds it."""
    lock = OutputLock(output, lock_file)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def shared_lock(output: Path, lock_file: Path, *, when_alone: Callable[[], None]) -> Iterator[None]:
    """Hold a lock that several processes and threads may hold at once while the context is open. The file stays.

    Call ``when_alone`` before, if nobody else holds the lock. Others wait until it returns."""
    import fcntl  # not on every system

    descriptor = _open_lock_file(output, lock_file)
    try:
        try:
            _flock(descriptor)
        except BlockingIOError:
            pass  # others hold it
        else:
            when_alone()
        with suppress(OSError):  # a network file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # this releases it for children that inherited the descriptor, too
        os.close(descriptor)


def check_free(output: Path, lock_file: Path) -> None:
    """Raise RequestError if another process writes the output. Commands call it before their slow part begins."""
    OutputLock(output, lock_file).release()


def held_descriptors(output: Path) -> tuple[int, ...]:
    """Return the descriptors that a child process inherits, so that the lock of a folder lasts as long as the child."""
    locks = _held.get(output.resolve() / LOCK_NAME)
    return () if locks is None else (locks[1].descriptor,)


def lock_file_beside(output: Path) -> Path:
    """Return the lock file of an output that is a file."""
    return output.with_name(f".{output.name}{LOCK_NAME}")


def _open_lock_file(output: Path, lock_file: Path) -> int:
    try:
        return os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise RequestError(f"output {output} cannot be used: {error.strerror}; give another one") from None


def _flock(descriptor: int) -> None:
    """Take the lock. Raise BlockingIOError if another process holds it."""
    import fcntl  # not on every system

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            raise BlockingIOError(error.errno, error.strerror) from None
        # Other errors come from network file systems without locks, where two writers cannot be kept apart.


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _may_live(holder: str) -> bool:
    """Return False only for a process of this host that has ended."""
    pid, _, host = holder.partition(" ")
    if not pid.isdecimal() or host != socket.gethostname():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process of another user
        return True
    try:  # on Linux, an ended process exists as a zombie until its parent waits for it
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state != "Z"
