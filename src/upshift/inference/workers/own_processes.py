"""Watch the processes that an engine has beside the one that built it, such as the ranks of a divided model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from upshift.benchmarking.meters import tree_bytes
from upshift.errors import EngineEnded


@runtime_checkable
class OwnProcesses(Protocol):
    """An engine that computes in processes of its own."""

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes, without those that they have started."""
        ...

    def wait(self) -> None:
        """Wait until one of the processes has ended."""
        ...


def watch_processes(engine: object, tell: Callable[[EngineEnded], None]) -> None:
    """Call ``tell`` from another thread when a process of the engine ends. Do nothing for an engine without any."""
    if isinstance(engine, OwnProcesses):
        threading.Thread(target=_tell_end, args=(engine, tell), daemon=True).start()


def own_bytes(engine: object) -> int:
    """Return the bytes that the processes of an engine occupy now. 0 for an engine without any."""
    return sum(map(tree_bytes, engine.pids)) if isinstance(engine, OwnProcesses) else 0


def _tell_end(engine: OwnProcesses, tell: Callable[[EngineEnded], None]) -> None:
    engine.wait()
    tell(EngineEnded("a process of the engine has ended"))
