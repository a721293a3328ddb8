"""Python processes of tests that need not import everything again: each is a fork of a process that has done nothing but import.

While ``WarmPython`` is in force, ``subprocess.Popen`` of this interpreter starts a small program (warm_stub.py) in its place. The
program asks a server (warm_server.py) for a fork, which gets the program's arguments, variables, folder, and open files. The
program passes signals on and ends as the fork ends, so that whoever started it sees the process that it expects. If the program
is killed, so is the fork. Processes that a fork starts are forks of the same server.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STUB = str(HERE / "warm_stub.py")
SERVER = str(HERE / "warm_server.py")
KEPT = 3  # servers: each holds a quarter of a GiB
START_SECONDS = 120.0
POLL_SECONDS = 0.02
OPTIONS = ("-u", "-P")  # of Python, that a fork can follow
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)
# Variables that nothing reads while it is imported: a fork may have others than its server.
LATE = (
    "UPSHIFT_", "PYTEST_", "TORCHELASTIC_", "TORCH_NCCL_", "SLURM_", "OMPI_", "PMI_", "MASTER_", "RANK", "LOCAL_RANK",
    "GROUP_RANK", "ROLE_", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "COLUMNS", "LINES", "NO_COLOR", "TMPDIR", "PWD",
    "OLDPWD",
    "CUDA_VISIBLE_DEVICES", "PRETENDED_USED_MIB", "PRETENDED_LEFT", "SHLVL", "_",
)  # fmt: skip
Real = subprocess.Popen


class WarmPython:
    """The servers of this process, by what a fork cannot change. The second process of a kind starts a server of that kind."""

    def __init__(self, sockets: Mapping[tuple[object, ...], str] | None = None) -> None:
        self._sockets = dict(sockets or {})
        self._may_start = sockets is None
        self._seen: set[tuple[object, ...]] = set()
        self._processes: dict[tuple[object, ...], subprocess.Popen[bytes]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="upshift-warm-") if self._may_start else None

    def command(self, arguments: object, options: Mapping[str, Any]) -> list[str] | None:
        """Return the command that asks for a fork, or None where only a process of its own will do."""
        if not isinstance(arguments, (list, tuple)) or not is_followed([os.fspath(word) for word in arguments], options):
            return None
        variables = options.get("env")
        socket = self._socket(kind(os.environ if variables is None else variables))
        return socket and [sys.executable, "-I", "-S", STUB, socket, *map(os.fspath, arguments)]

    def _socket(self, key: tuple[object, ...]) -> str | None:
        process = self._processes.get(key)
        if process is not None and process.poll() is not None:  # a test has ended it
            self._end(key)
        if key not in self._sockets and self._may_start:
            if key not in self._seen:
                self._seen.add(key)
                return None
            while len(self._sockets) >= KEPT:
                self._end(next(iter(self._sockets)))
            self._start(key)
        if key in self._processes:  # the server that was used last is ended last
            self._sockets[key] = self._sockets.pop(key)
        return self._sockets.get(key)

    def _start(self, key: tuple[object, ...]) -> None:
        assert self._folder is not None
        path = str(Path(self._folder.name) / str(len(self._seen) + time.monotonic_ns()))
        variables = dict(key[0])  # type: ignore[call-overload]
        process = Real(
            [sys.executable, SERVER, path], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=variables,
            start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + START_SECONDS
        while not Path(path).exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        assert Path(path).exists(), "the server of warm processes did not start"
        self._processes[key] = process
        self._sockets[key] = path

    def _end(self, key: tuple[object, ...]) -> None:
        process = self._processes.pop(key)
        del self._sockets[key]
        assert process.stdin is not None
        process.stdin.close()  # the server ends with it
        process.wait()

    def close(self) -> None:
        while self._processes:
            self._end(next(iter(self._processes)))
        if self._folder is not None:
            self._folder.cleanup()


def kind(variables: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a process has from its start and a fork cannot change: variables, cores, and limits."""
    early = {name: value for name, value in variables.items() if not name.startswith(LATE)}
    if "PRETENDED_GPUS" in early:  # one GPU and several of a model are of one kind: imports ask for the capability
        early["PRETENDED_GPUS"] = re.sub(r"\b\d+x", "", early["PRETENDED_GPUS"])
    cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    group = Path("/proc/self/cgroup")
    limits = tuple(resource.getrlimit(limit) for limit in LIMITS)
    return frozenset(early.items()), cores, group.read_text() if group.exists() else "", limits


def is_followed(words: Sequence[str], options: Mapping[str, Any]) -> bool:
    """Return whether a fork can run this command as a process of its own would."""
    if not words or words[0] != sys.executable or options.get("preexec_fn") or options.get("executable") or options.get("shell"):
        return False
    rest = list(words[1:])
    while rest and rest[0] in OPTIONS:
        rest.pop(0)
    return bool(rest) and (rest[0] in ("-m", "-c") or not rest[0].startswith("-")) and rest[0] != STUB


@contextmanager
def in_force(warm: WarmPython) -> Iterator[None]:
    """Let ``subprocess.Popen`` start Python by ``warm``."""

    class Popen(Real):  # type: ignore[type-arg]
        def __init__(self, args: Any, *more: Any, **options: Any) -> None:
            command = None if more else warm.command(args, options)
            super().__init__(command or args, *more, **options)
            self.args = args

    subprocess.Popen = Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = Real  # type: ignore[misc]
