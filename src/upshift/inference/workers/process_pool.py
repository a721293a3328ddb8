"""Run the workers of a job in processes of this machine. Each has a share of the cores, or GPUs of its own."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from upshift import parent_process
from upshift.inference.workers.dispatcher import Answer, Job, Task

WORKER = "upshift.inference.workers.worker_process"


class ProcessPool:
    """Workers in processes of this machine. They end with this process.

    ``devices``: the GPUs of each worker, if there are any."""

    def __init__(self, job: Job, size: int, *, devices: int = 1) -> None:
        self.size = size
        self._job = job
        self._devices = devices
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        for number in range(size):
            process, connection = self._start(number)
            self._processes.append(process)
            self._connections.append(connection)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, worker: int, task: Task) -> None:
        with suppress(ConnectionError):  # it has ended, which ``receive`` reports
            self._connections[worker].send(task)

    def receive(self) -> tuple[int, Answer | None]:
        connection = wait(self._connections)[0]
        assert isinstance(connection, Connection)
        worker = self._connections.index(connection)
        try:
            return worker, connection.recv()
        except (EOFError, ConnectionError):
            return worker, None

    def restart(self, worker: int) -> str:
        code = self._end(worker)
        self._processes[worker], self._connections[worker] = self._start(worker)
        return describe_exit(code)

    def close(self) -> None:
        for worker in range(self.size):
            self._end(worker)

    def _start(self, number: int) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        arguments = [str(value) for value in (theirs.fileno(), number, self.size, self._devices)]
        process = subprocess.Popen(
            parent_process.command(WORKER, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # what libraries print there is no answer of the command
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        with suppress(ConnectionError):
            ours.send(self._job)
        return process, ours

    def _end(self, worker: int) -> int:
        """End a worker's process, if it runs, and return its exit code."""
        self._connections[worker].close()
        process = self._processes[worker]
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.0 if process.poll() is None else None)
        process.kill()
        return process.wait()


def describe_exit(code: int) -> str:
    """Return how a process ended, by its exit code."""
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit {code}"
