"""Processes of jobs that need not import everything again: each is a fork of a process that has done nothing but import.

It has its own session, its standard output and error, and its exit code, as the process has that upshift starts.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from pathlib import Path
from typing import IO

from warm_servers import surroundings

from upshift import parent_process
from upshift.training.job.job_process import PROCESS

SERVER = Path(__file__).with_name("warm_job_process.py")
KEPT = 2  # idle servers: each holds a quarter of a GiB
MESSAGE_BYTES = 64


class Server:
    """A process that has imported the module of a job, and the socket to it. It has ``variables`` besides this process's."""

    def __init__(self, module: str, **variables: str) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = parent_process.command(str(SERVER), module, str(theirs.fileno()))
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                env=os.environ | variables,
            )
        self.job: Job | None = None

    @property
    def is_idle(self) -> bool:
        return self._process.poll() is None and (self.job is None or self.job.poll() is not None)

    def close(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


class Job:
    """The process of one job, with what upshift uses of ``subprocess.Popen``."""

    def __init__(self, server: Server, folder: str, pass_fds: tuple[int, ...]) -> None:
        self.connection = server.connection
        self.returncode: int | None = None
        read_end, write_end = os.pipe()
        socket.send_fds(self.connection, [os.fsencode(folder)], [write_end, 2, *pass_fds])
        os.close(write_end)
        self.stdout: IO[str] = os.fdopen(read_end)
        self.pid = int(self.connection.recv(MESSAGE_BYTES))

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            code = self.connection.recv(MESSAGE_BYTES)
            self.returncode = int(code) if code else -signal.SIGKILL  # no message: the server was killed, and its job with it
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class WarmJobs:
    """Stands for ``subprocess`` in upshift.training.job.processes."""

    DEVNULL = subprocess.DEVNULL
    PIPE = subprocess.PIPE

    def __init__(self) -> None:
        self._servers: dict[object, Server] = {}

    def Popen(self, command: list[str], *, pass_fds: tuple[int, ...], start_new_session: bool, **streams: object) -> Job:  # noqa: N802
        process, module, folder = command[-3:]
        assert process == PROCESS and start_new_session
        assert streams == {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        key = (module, *surroundings())
        server = self._servers.pop(key, None)
        if server is not None and not server.is_idle:  # its last job runs on, or a test has ended it
            server.close()
            server = None
        if server is None:
            server = Server(module)
        self._servers[key] = server
        while len(self._servers) > KEPT:
            self._servers.pop(next(iter(self._servers))).close()
        server.job = Job(server, folder, pass_fds)
        return server.job

    def close(self) -> None:
        while self._servers:
            self._servers.popitem()[1].close()
