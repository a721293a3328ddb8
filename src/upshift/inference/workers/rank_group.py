"""Compute each task in several ranks at once. The ranks are processes of this machine, and each has a part of one model.

This process is none of them. It gives each task to all ranks and reads the result of rank 0, so a rank that ends or fails while
the others wait for it in a collective is noticed at once."""

from __future__ import annotations

import subprocess
import threading
import weakref
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from upshift import parent_process
from upshift.errors import EngineEnded, EngineFailed, UpshiftError
from upshift.inference.registry import Device
from upshift.inference.workers.dispatcher import Job, Task, read_answer
from upshift.inference.workers.process_pool import describe_exit
from upshift.settings import environment_for_local_rank

RANK = "upshift.inference.workers.rank_process"
ENDING_SECONDS = 5.0  # between the end of a process's connection and that of the process
NOTICE_SECONDS = 0.5  # between the error of a rank and the end of the rank that it exchanged with


class RankGroup:
    """The ranks of one model. They end with this object, and with this process."""

    def __init__(self, job: Job, size: int, device: Device) -> None:
        """Start ``size`` ranks, each of which builds the object of the job for its first task. On "cuda" each rank has a GPU of
        its own, and on "cpu" a part of the cores."""
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where the ranks meet
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self.close = weakref.finalize(self, _end, self._processes, self._connections)
        for rank in range(size):
            ours, theirs = Pipe()
            arguments = map(str, (theirs.fileno(), rank, size, self._store.port, device))
            process = subprocess.Popen(
                parent_process.command(RANK, *arguments),
                env=environment_for_local_rank(rank),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what libraries print there is no answer of the command
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._has_computed = False
        self._send(job)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait(self) -> None:
        """Wait until one of the ranks has ended."""
        ended = threading.Event()
        for process in self._processes:
            threading.Thread(target=_set_after, args=(process, ended), daemon=True).start()
        ended.wait()

    def compute(self, method: str, *arguments: Any) -> Any:
        """Return rank 0's result of a method of the job's object, which all ranks compute together.

        Raise the error of the first rank that fails, or EngineFailed if it fails after an earlier task. Raise EngineEnded if a
        rank has ended. Then all ranks end, because the others may wait for that one."""
        if not self.close.alive:
            raise EngineEnded("the ranks of the model have ended; run the command again")
        self._send(Task(method, arguments))
        value = None
        waiting = list(self._connections)
        while waiting:
            for ready in wait(waiting):
                assert isinstance(ready, Connection)
                waiting.remove(ready)
                rank = self._connections.index(ready)
                try:
                    result = read_answer(ready.recv())
                except (EOFError, ConnectionError):
                    raise self._failure(rank) from None
                except BaseException as error:  # of any kind
                    ended = self._find_ended(waiting)
                    if ended is not None:  # which is why this rank failed in a collective
                        raise self._failure(ended) from None
                    self.close()
                    if self._has_computed and isinstance(error, UpshiftError):
                        raise EngineFailed(f"rank {rank} of the model ended: {error}") from error
                    raise
                value = result if rank == 0 else value
        self._has_computed = True
        return value

    def _send(self, message: Job | Task) -> None:
        for connection in self._connections:
            with suppress(ConnectionError):  # the rank has ended, which is read from its connection
                connection.send(message)

    def _find_ended(self, connections: list[Connection]) -> int | None:
        """Return the first rank of these connections that has ended, or that ends within NOTICE_SECONDS. None: none has."""
        for ready in wait(connections, NOTICE_SECONDS):
            assert isinstance(ready, Connection)
            try:
                ready.recv()
            except (EOFError, ConnectionError):
                return self._connections.index(ready)
        return None

    def _failure(self, rank: int) -> EngineEnded:
        """Return the error for a rank that has ended, and end the others."""
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
        ending = "an open process" if process.returncode is None else describe_exit(process.returncode)
        size = len(self._processes)
        self.close()
        return EngineEnded(f"rank {rank} of the {size} ranks of the model ended with {ending}; run the command again")


def _set_after(process: subprocess.Popen[bytes], ended: threading.Event) -> None:
    process.wait()
    ended.set()


def _end(processes: list[subprocess.Popen[bytes]], connections: list[Connection]) -> None:
    """End the processes, which may wait for each other."""
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
