"""Import everything once, and fork a process for each command that arrives on a socket (warm_processes.py)."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from upshift.importing import importing
from upshift.parent_process import end_with
from upshift.settings import quiet_libraries

COMMAND_BYTES = 2**20  # the most of a command with its environment
MOST_DESCRIPTORS = 32
FREE_DESCRIPTOR = 500  # above every descriptor that a process is given
STREAMS = (0, 1, 2)
OWN = ["-m", "upshift.parent_process"]


Begin = Callable[[bool], None]


def main(module: str, descriptor: int) -> None:
    """Import ``module``, which imports what the processes need. ``begin`` of it is called first in each process, and is told
    whether the process runs a command, which may start processes of its own, and not a module that upshift has started."""
    quiet_libraries()
    with importing():
        begin = importlib.import_module(module).begin
        gc.freeze()  # as upshift.training.job.job_process does
    Server(socket.socket(fileno=descriptor), begin).serve()


class Server:
    """Start processes until the other end of the socket is closed."""

    def __init__(self, connection: socket.socket, begin: Begin) -> None:
        self._connection = connection
        self._begin = begin
        self._exits: dict[int, int] = {}  # the process's id -> the descriptor that its exit code is written to
        self._woken, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only of a terminal; the caller decides which processes end

    def serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._connection.fileno(), self._woken], [], [])
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, COMMAND_BYTES)
                self._send_exit_codes()
            if self._connection.fileno() in ready:
                message, descriptors, _, _ = socket.recv_fds(self._connection, COMMAND_BYTES, MOST_DESCRIPTORS)
                if not message:
                    return
                self._connection.send(str(self._start(json.loads(message), descriptors)).encode())

    def _send_exit_codes(self) -> None:
        for child in list(self._exits):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                descriptor = self._exits.pop(child)
                with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                    os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(descriptor)

    def _start(self, command: dict[str, Any], descriptors: list[int]) -> int:
        """Return the id of a new process. ``descriptors``: of its exit code, and then those of ``command["descriptors"]``."""
        server = os.getpid()
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            run_process(command, descriptors[1:], self._begin, started=write_end, server=server)
        os.close(write_end)
        os.read(read_end, 1)  # ends when the child has its session and hears SIGINT: it can be signalled from then on
        os.close(read_end)
        self._exits[child] = descriptors[0]
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        return child


def run_process(command: dict[str, Any], descriptors: list[int], begin: Begin, *, started: int, server: int) -> NoReturn:
    """Become the process of the command, and end as Python ends. Exit handlers of the server's imports do not run."""
    code = 1
    is_interrupted = False
    try:
        atexit._clear()
        if command["new_session"]:
            os.setsid()
        end_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(started)  # the caller may signal from now on, and SIGINT was ignored until here
        take_descriptors(dict(zip(command["descriptors"], descriptors, strict=True)))
        os.environ.clear()
        os.environ.update(command["environment"])
        os.chdir(command["folder"])
        begin(command["arguments"][:2] != OWN)
        run_python(command["arguments"])
        code = 0
    except SystemExit as ended:
        code = exit_code(ended)
    except KeyboardInterrupt:
        is_interrupted = True
        traceback.print_exc()
    except BaseException:  # a fork never returns into the server's code
        traceback.print_exc()
    finally:
        end_process(code, is_interrupted)


def end_process(code: int, is_interrupted: bool) -> NoReturn:
    """Do what Python does at its end (Py_FinalizeEx): join threads, run the process's own exit handlers, flush its streams."""
    try:
        for step in (threading._shutdown, atexit._run_exitfuncs, flush):  # type: ignore[attr-defined]
            try:
                step()
            except BaseException:  # Python prints it, too, and goes on
                traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if is_interrupted:
            os.kill(os.getpid(), signal.SIGINT)
    finally:  # a fork never returns into the server's code
        os._exit(code)


def flush() -> None:
    """Write what Python's streams still hold. A script may have closed a stream, or removed it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            with contextlib.suppress(OSError):  # nobody reads what it printed
                stream.flush()


def take_descriptors(received: dict[int, int]) -> None:
    """Give the received descriptors the numbers that the command knows them by, and close all others."""
    moved = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE_DESCRIPTOR) for number, descriptor in received.items()}
    for socket_or_pipe in sockets_and_pipes():
        if socket_or_pipe not in moved.values() and socket_or_pipe not in STREAMS:
            os.close(socket_or_pipe)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)


def sockets_and_pipes() -> list[int]:
    """Return the server's own, and those of processes that it has started: a process that held them open would hide an end."""
    names = {int(path.name): os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    return [number for number, name in names.items() if name.startswith(("socket:", "pipe:"))]


def run_python(arguments: list[str]) -> None:
    """Run ``-m MODULE``, ``-c CODE`` or a script, with its arguments, as the main module."""
    sys.orig_argv = [sys.executable, *arguments]
    first, *rest = arguments
    if arguments[:2] == OWN:  # this process ends with the server, which ends with its parent
        rest = rest[3:]
        first = "-m" if not rest[0].endswith(".py") else rest.pop(0)
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def exit_code(ended: SystemExit) -> int:
    """Return the exit code that Python gives a process that ends so. It prints a text, and ends with 1."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
