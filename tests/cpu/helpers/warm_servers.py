"""Fork servers that go on after the run which started them: a later run need not wait for seconds of imports again.

Every run still has a child of its own, forked from a process that has done nothing but import. A server is handed out again only
where a new one would be the same: of the same worker, with the same variables, folder, cores and limits.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from upshift.fork_server import ChildExit, ForkServer, fork_server
from upshift.value import Value

KEPT = 2  # idle servers: each holds a quarter of a GiB
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)
V = TypeVar("V", bound=Value)


class WarmServer:
    """A server as one run has it. ``is_idle``: it has ended every child, and nobody interrupted it."""

    def __init__(self, server: ForkServer, stack: ExitStack) -> None:
        self._server, self._stack = server, stack
        self._asked, self._ended, self._interrupted = 0, 0, False

    @property
    def runs(self) -> bool:
        return self._server.runs

    @property
    def is_idle(self) -> bool:
        return self.runs and self._asked == self._ended and not self._interrupted

    def ask(self, request: Value, kind: type[V], *, limit_seconds: float) -> Iterator[V | ChildExit]:
        self._asked += 1
        for answer in self._server.ask(request, kind, limit_seconds=limit_seconds):
            self._ended += isinstance(answer, ChildExit)
            yield answer

    def interrupt(self) -> None:
        self._interrupted = True
        self._server.interrupt()

    def close(self) -> None:
        self._stack.close()


class WarmServers:
    """``fork_server``, with servers that are kept, for one thread or many. ``close`` ends those."""

    def __init__(self) -> None:
        self._kept: dict[object, WarmServer] = {}
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, worker: str) -> Iterator[WarmServer]:
        key = (worker, *surroundings())
        with self._lock:
            server = self._kept.pop(key, None)
        if server is not None and not server.is_idle:  # a test has ended it
            server.close()
            server = None
        if server is None:
            stack = ExitStack()
            server = WarmServer(stack.enter_context(fork_server(worker)), stack)
        try:
            yield server
        finally:
            with self._lock:
                ended = [server]
                if server.is_idle:
                    ended = [self._kept.pop(key)] if key in self._kept else []
                    self._kept[key] = server
                while len(self._kept) > KEPT:
                    ended.append(self._kept.pop(next(iter(self._kept))))
            for one in ended:
                one.close()

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()


def surroundings() -> tuple[object, ...]:
    """Return what a new process would take over from this one, but for the name of the test that runs."""
    variables = frozenset((name, value) for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST")
    cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    group = Path("/proc/self/cgroup")
    return (
        variables, os.getcwd(), cores, group.read_text() if group.exists() else "",
        tuple(resource.getrlimit(limit) for limit in LIMITS),
    )  # fmt: skip
