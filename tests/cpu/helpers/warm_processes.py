"""Processes of Python in forks of one process that has imported everything: importing it takes five seconds of a core.

A fork shares the server's modules, and torch's state after the imports. It has its own session, streams, descriptors, arguments,
folder, environment, exit handlers and exit code. Its libraries log as little as those of upshift's own processes. ``Popen`` and
``run`` start a new process if its imports would differ: because of cores, limits, options of Python, or variables that libraries
read meanwhile. Tests of what a process imports, of its start, its memory or its death need a new process, too.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import IO, Any

from warm_process_server import COMMAND_BYTES, Begin, Server

from upshift import parent_process
from upshift.parent_process import end_with

SERVER = Path(__file__).with_name("warm_process_server.py")
MESSAGE_BYTES = 64
READ_BYTES = 2**16
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)
# Python and libraries read variables whose names begin so while they start or are imported. Left out are others that imports
# read, but that tests set for what happens later, such as CI and COLUMNS.
READ_BY_IMPORTS = (
    "AOTINDUCTOR_", "AOT_", "ATEN_", "DATASETS_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "HF_", "HOME", "HUGGINGFACE_", "INDUCTOR_",
    "KINETO_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PANDAS_", "PYTHON",
    "PYTORCH_", "SYMPY_", "TMPDIR", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_", "TRANSFORMERS_", "USE_", "XDG_CACHE_HOME",
)  # fmt: skip
READ_WHEN_USED = ("TORCHINDUCTOR_CACHE_DIR",)  # torch sets it for itself
# Upshift's commands set these for themselves if nobody has, also in the process of the tests (upshift.settings).
SET_BY_COMMANDS = {
    ("GOMP_SPINCOUNT", "20000"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("KINETO_LOG_LEVEL", "99"),
    ("TRANSFORMERS_VERBOSITY", "error"),
}  # fmt: skip
RUN_BY_FORKS = ("-m", "-c")  # other options are the interpreter's own
Stream = int | IO[Any] | None


class WarmProcess:
    """A process, with what upshift uses of ``subprocess.Popen``. ``ended``: the descriptor with its exit code."""

    def __init__(self, args: Sequence[str], pid: int, ended: int, streams: Sequence[IO[Any] | None]) -> None:
        self.args, self.pid = args, pid
        self.stdin, self.stdout, self.stderr = streams
        self.returncode: int | None = None
        self._ended = ended
        self._lock = threading.Lock()
        self._written: dict[IO[Any], bytes] = {}
        weakref.finalize(self, os.close, ended)  # not earlier: another thread may wait for it

    def poll(self) -> int | None:
        """Return the exit code, or None. As subprocess does, return None while another caller reads the code.

        A handler of a signal may call this while the same thread waits, so it never waits for the lock."""
        if self.returncode is None and self._lock.acquire(blocking=False):
            try:
                if self.returncode is None and select.select([self._ended], [], [], 0.0)[0]:
                    code = os.read(self._ended, MESSAGE_BYTES)
                    self.returncode = int(code) if code else -signal.SIGKILL  # no code: the server was killed, and this with it
            finally:
                self._lock.release()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            select.select([self._ended], [], [], self._seconds_until(end, timeout))
        return code

    def _seconds_until(self, end: float | None, timeout: float | None) -> float | None:
        """Return the seconds that are left, or None without a limit. Raise TimeoutExpired at the end."""
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return left

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Close the process's input, and return what it writes into its pipes until it ends.

        After TimeoutExpired the process runs on, and another call also returns what was read before, as subprocess does."""
        end = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None:
            with suppress(BrokenPipeError):
                self.stdin.close()
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        while is_open := [stream for stream in streams if not stream.closed]:
            for stream in select.select(is_open, [], [], self._seconds_until(end, timeout))[0]:
                read = os.read(stream.fileno(), READ_BYTES)
                self._written[stream] = self._written.get(stream, b"") + read
                if not read:
                    stream.close()
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        stdout, stderr = (None if stream is None else self._content(stream) for stream in (self.stdout, self.stderr))
        return stdout, stderr

    def _content(self, stream: IO[Any]) -> Any:
        written = self._written.get(stream, b"")
        return TextIOWrapper(BytesIO(written), stream.encoding).read() if isinstance(stream, TextIOWrapper) else written

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the server has seen its end, and its exit code comes
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class WarmProcesses:
    """Stands for ``subprocess`` where upshift starts processes of Python.

    ``module``: what the server imports. Its ``begin`` runs first in each process. ``variables``: what the server's environment
    has besides this process's. ``taken``: the variables that ``begin`` takes from each process's environment, so that they may
    differ from the server's. The server has the environment of now, although it starts with the first fork."""

    DEVNULL, PIPE, TimeoutExpired = subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(
        self, module: str = "warm_imports", variables: Mapping[str, str] | None = None, *, taken: Sequence[str] = ()
    ) -> None:
        self._module = module
        self._taken = taken
        self._environment = {**os.environ, **(variables or {})}
        self._surroundings = surroundings(self._environment, taken)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_forked = False
        self._started: list[WarmProcess] = []

    def Popen(self, command: Sequence[str], **options: Any) -> WarmProcess | subprocess.Popen[Any]:  # noqa: N802
        """Start a fork, or a new process where a fork would be another one."""
        given = options.get("env")
        environment = {**(os.environ if given is None else given)}
        program, first, *_ = command
        is_new = program != sys.executable or (first.startswith("-") and first not in RUN_BY_FORKS)
        if is_new or surroundings(environment, self._taken) != self._surroundings:
            return subprocess.Popen(command, **options)
        return self.start(list(command[1:]), environment=environment, **{key: options[key] for key in options if key != "env"})

    def start(
        self, arguments: Sequence[str], *, environment: Mapping[str, str], stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None, stderr: Stream = None, cwd: Path | None = None, text: bool = False,
        start_new_session: bool = False, pass_fds: Sequence[int] = (),
    ) -> WarmProcess:  # fmt: skip
        """Start ``python ARGUMENTS`` in a fork, whatever the environment is."""
        with opened_streams(stdin, stdout, stderr) as (theirs, ours):
            read_end, write_end = os.pipe()
            command = {
                "arguments": list(arguments), "environment": dict(environment), "folder": str(cwd or os.getcwd()),
                "new_session": start_new_session, "descriptors": [0, 1, 2, *pass_fds],
            }  # fmt: skip
            try:
                pid = self._send(json.dumps(command), [write_end, *theirs, *pass_fds])
            finally:
                os.close(write_end)
        modes = [mode + ("" if text else "b") for mode in "wrr"]
        streams = [None if end is None else os.fdopen(end, mode) for end, mode in zip(ours, modes, strict=True)]
        process = WarmProcess(arguments, pid, read_end, streams)
        with self._lock:
            self._started = [*(one for one in self._started if one.returncode is None), process]
        return process

    def running(self) -> list[WarmProcess]:
        """Return the forks that run now, in the order of their starts. Other processes see the server's command line for them."""
        with self._lock:
            self._started = [process for process in self._started if process.poll() is None]
            return list(self._started)

    def run(
        self, *arguments: str | Path, timeout: float | None = None, cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Return the exit code of ``python ARGUMENTS`` and what it printed. Kill it and fail after ``timeout`` seconds."""
        command = [sys.executable, *map(str, arguments)]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.Popen(
                command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise AssertionError(f"{command[1:]} took longer than {timeout} s\n{text_of(err)[-5000:]}") from None
            return subprocess.CompletedProcess(command, process.wait(), text_of(out), text_of(err))

    def _send(self, message: str, descriptors: Sequence[int]) -> int:
        with self._lock:
            self._start_server()
            socket.send_fds(self._connection, [message.encode()], descriptors)
            return int(self._connection.recv(MESSAGE_BYTES))

    @classmethod
    def forked(cls, begin: Begin) -> WarmProcesses:
        """Return processes whose server is a fork of this process, which has imported everything and computed nothing."""
        processes = cls()
        processes._is_forked = True
        processes._connection, theirs = connected_sockets()
        parent = os.getpid()
        if os.fork() == 0:
            with ends_as_fork():
                end_with(parent)
                processes._connection.close()
                Server(theirs, begin).serve()
        theirs.close()
        return processes

    def _start_server(self) -> None:
        if self._is_forked or (self._process is not None and self._process.poll() is None):
            return
        path = os.pathsep.join(filter(None, [str(SERVER.parent), self._environment.get("PYTHONPATH")]))
        self._connection, theirs = connected_sockets()
        with theirs:
            self._process = subprocess.Popen(
                parent_process.command(str(SERVER), self._module, str(theirs.fileno())),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, pass_fds=(theirs.fileno(),),
                env={**self._environment, "PYTHONPATH": path},
            )  # fmt: skip

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, COMMAND_BYTES)
    return ours, theirs


@contextmanager
def ends_as_fork() -> Iterator[None]:
    """End this process with the block: a fork never returns into the code of its parent."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


@contextmanager
def opened_streams(stdin: Stream, stdout: Stream, stderr: Stream) -> Iterator[tuple[list[int], list[int | None]]]:
    """Yield the descriptors of the three streams, and the ends of pipes that stay here. Close those that only the process has."""
    theirs, ours, closed = [], [], []
    for number, stream in enumerate((stdin, stdout, stderr)):
        kept = None
        if stream == subprocess.PIPE:
            read_end, write_end = os.pipe()
            descriptor, kept = (read_end, write_end) if number == 0 else (write_end, read_end)
            closed.append(descriptor)
        elif stream == subprocess.DEVNULL:
            descriptor = os.open(os.devnull, os.O_RDWR)
            closed.append(descriptor)
        elif stream is None or isinstance(stream, int):
            descriptor = number if stream is None else stream
        else:
            descriptor = stream.fileno()
        theirs.append(descriptor)
        ours.append(kept)
    try:
        yield theirs, ours
    finally:
        for descriptor in closed:
            os.close(descriptor)


def text_of(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def surroundings(environment: Mapping[str, str], taken: Sequence[str] = ()) -> tuple[object, ...]:
    """Return what decides the imports of a new process, but for the variables ``taken``, and what it may use of the machine."""
    names = [name for name in environment if name.startswith(READ_BY_IMPORTS) and name not in (*taken, *READ_WHEN_USED)]
    variables = {(name, environment[name]) for name in names} - SET_BY_COMMANDS
    cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    group = Path("/proc/self/cgroup")
    return (
        frozenset(variables), cores, group.read_text() if group.exists() else "",
        tuple(resource.getrlimit(limit) for limit in LIMITS),
    )  # fmt: skip
