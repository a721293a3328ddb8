"""Hold processes that trials are forked from: as many as trials run at once, each used again while it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Server(Protocol):
    @property
    def runs(self) -> bool: ...


S = TypeVar("S", bound=Server)


@dataclass
class Servers(Generic[S]):
    """A context of servers. ``one`` is called from as many threads as there are trials at once."""

    start: Callable[[], AbstractContextManager[S]]
    _all: ExitStack = field(default_factory=ExitStack)
    _free: list[S] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def one(self) -> Iterator[S]:
        """Yield a free server, or a new one. A server that died is not used again."""
        with self._lock:
            server = self._free.pop() if self._free else self._all.enter_context(self.start())
        try:
            yield server
        finally:
            if server.runs:
                self._free.append(server)

    def __enter__(self) -> Servers[S]:
        return self

    def __exit__(self, *_: object) -> None:
        self._all.close()
