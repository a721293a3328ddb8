"""Import what the processes of tests import, and fork a process for each command that arrives on a socket (warm_python.py).

python warm_server.py SOCKET. It ends with its standard input.
"""

from __future__ import annotations

import ast
import atexit
import fcntl
import gc
import importlib
import importlib.util
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from upshift.importing import importing
from upshift.internals.torch_names import cuda_not_started
from upshift.settings import quiet_libraries

MODULES = (
    "upshift.cli.main", "upshift.training.job.job", "upshift.training.elastic.replica_process", "upshift.training.job.server",
    "upshift.training.trials.worker", "upshift.tuning.mup_check", "upshift.tuning.trainer_trial", "upshift.serving.engine.main",
    "upshift.inference.encoding.contest", "upshift.inference.generation.contest", "upshift.hardware.probe_process",
    "upshift.benchmarking.meters", "parallel_runs",
)  # fmt: skip
MOST_DESCRIPTORS = 64
HIGH = 700  # descriptors above are the server's own, and those of a command until they get their numbers
OWN_FILES = (__file__, runpy.__file__, "<frozen runpy>")
PREFIX = ["-m", "upshift.parent_process"]


def main(path: str) -> None:
    quiet_libraries()
    sys.path.append(sys.path.pop(0))  # the folder of this script, and of the tests' helpers
    with importing(), cuda_not_started():
        for module in MODULES:
            importlib.import_module(module)
        sys.modules["parallel_runs"].import_modules()
        if "pretended_cuda" in sys.modules:  # a process of its own has asked nothing when it begins
            sys.modules["pretended_cuda"].forget_questions()
        gc.freeze()
    assert threading.active_count() == 1
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener = socket.socket(fileno=fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, HIGH))
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)
    Forks(listener, path).serve()


class Forks:
    """The processes that run: ``_connections`` by process id, and the descriptors that tell of their ends."""

    def __init__(self, listener: socket.socket, path: str) -> None:
        self._listener, self._path = listener, path
        self._connections: dict[int, socket.socket] = {}
        self._ends: dict[int, int] = {}  # a descriptor of a process (pidfd), and its id
        self._poll = select.poll()
        self._poll.register(0, select.POLLHUP)
        self._poll.register(listener, select.POLLIN)

    def serve(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == 0:
                    self._end_all()
                elif descriptor == self._listener.fileno():
                    self._start(self._listener.accept()[0])
                elif descriptor in self._ends:
                    self._report(descriptor)
                else:
                    self._kill(descriptor)

    def _start(self, connection: socket.socket) -> None:
        header, descriptors, _, _ = socket.recv_fds(connection, 8, MOST_DESCRIPTORS)
        content = connection.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL)
        child = os.fork()
        if child == 0:
            run(*ast.literal_eval(content.decode(errors="surrogateescape")), descriptors, self._path)
        for descriptor in descriptors:
            os.close(descriptor)
        self._connections[child] = connection
        end = os.pidfd_open(child)
        self._ends[end] = child
        self._poll.register(end, select.POLLIN)
        self._poll.register(connection, select.POLLHUP)
        self._tell(connection, child)

    def _report(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        child = self._ends.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(child, 0)
        connection = self._connections.pop(child)
        with suppress(KeyError):  # the program was killed first
            self._poll.unregister(connection)
        self._tell(connection, os.waitstatus_to_exitcode(status))
        connection.close()

    def _kill(self, descriptor: int) -> None:
        """Kill the fork of a program that was killed, unless it has just ended by itself."""
        for child, connection in self._connections.items():
            if connection.fileno() == descriptor:
                os.killpg(child, signal.SIGKILL)
                self._poll.unregister(descriptor)

    def _tell(self, connection: socket.socket, number: int) -> None:
        with suppress(BrokenPipeError):  # the program was killed
            connection.sendall(number.to_bytes(8, "little", signed=True))

    def _end_all(self) -> NoReturn:
        for child in self._connections:
            os.killpg(child, signal.SIGKILL)
        os._exit(0)


def run(
    words: list[str], variables: dict[str, str], folder: str, numbers: list[int], mask: int, descriptors: list[int], path: str
) -> NoReturn:
    """Run a Python command in this fork, and end it. ``descriptors`` get the numbers that the command expects."""
    os.setsid()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
    os.closerange(0, HIGH)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
    os.closerange(HIGH, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    if "pretended_cuda" in sys.modules:
        sys.modules["pretended_cuda"].take_gpus()
    os.chdir(folder)
    os.umask(mask)
    sys.orig_argv[:] = words
    rest = words[1:]
    options = set()
    while rest[0] in ("-u", "-P"):
        options.add(rest.pop(0))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through="-u" in options)  # type: ignore[union-attr]
    start_warm(path, variables)
    if rest[:2] == PREFIX:  # the program watches the parent
        module, *arguments = rest[4:]
        rest = [module, *arguments] if module.endswith(".py") else ["-m", module, *arguments]
    code, is_interrupted = 1, False
    try:
        run_python(rest, has_own_folder="-P" not in options)
        code = 0
    except SystemExit as ended:
        code = exit_code(ended)
    except BaseException as error:
        is_interrupted = isinstance(error, KeyboardInterrupt)
        own = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename in OWN_FILES]
        traceback.print_exception(error.with_traceback(below(error.__traceback__, len(own))))
    finally:
        finish(code, is_interrupted=is_interrupted)


def start_warm(path: str, variables: dict[str, str]) -> None:
    """Let the processes that this one starts be forks of its server, too."""
    import warm_python

    warm = warm_python.WarmPython({warm_python.kind(variables): path})
    warm_python.in_force(warm).__enter__()


def run_python(rest: list[str], *, has_own_folder: bool) -> None:
    """Run ``-m MODULE``, ``-c CODE`` or a script with its arguments as the program of this process."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    if rest[0] == "-m":
        module, *arguments = rest[1:]
        sys.argv[:] = ["-m", *arguments]
        if has_own_folder:
            sys.path.insert(0, os.getcwd())
        sys.modules.pop(module, None)
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # as Python itself does
        return
    if rest[0] == "-c":
        sys.argv[:] = ["-c", *rest[2:]]
        own_folder, code = "", compile(rest[1], "<string>", "exec")
    else:
        sys.argv[:] = rest
        own_folder, code = str(Path(rest[0]).resolve().parent), compile(Path(rest[0]).read_bytes(), rest[0], "exec")
        main_module.__file__ = os.path.abspath(rest[0])
    if has_own_folder:
        sys.path.insert(0, own_folder)
    exec(code, main_module.__dict__)


def below(trace: types.TracebackType | None, count: int) -> types.TracebackType | None:
    """Return a traceback without its first frames."""
    for _ in range(count):
        trace = trace and trace.tb_next
    return trace


def exit_code(ended: SystemExit) -> int:
    """Return the exit code that Python gives a process that ends so. It prints a text, and ends with 1."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def finish(code: int, *, is_interrupted: bool) -> NoReturn:
    """End this process as Python ends one: wait for its threads, run its exit handlers, and write what is buffered."""
    ending: Any = (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush)  # type: ignore[attr-defined]
    for call in ending:
        try:
            call()
        except BaseException:
            traceback.print_exc()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1])
