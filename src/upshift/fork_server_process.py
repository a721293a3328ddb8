"""Run the process behind ``ForkServer``: import a worker, then fork a child for each request on standard input.

SIGINT ends it and the child, and so does the end of the process that sends requests. Where an import of the worker has asked CUDA
something, no fork could use a GPU: the child runs this module anew then, and imports the worker for its request alone."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn, TextIO

from upshift import parent_process
from upshift.importing import importing
from upshift.internals.torch_names import cuda_was_asked
from upshift.parent_process import end_with
from upshift.settings import quiet_libraries

POLL_SECONDS = 0.02


def main(worker_name: str) -> None:
    quiet_libraries()  # else a library's line may be the last words of a child
    children: list[int] = []
    asker = os.getppid()
    signal.signal(signal.SIGINT, partial(_end, children))
    said = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever libraries print is not among the answers
    with importing():
        worker = importlib.import_module(worker_name)
        gc.freeze()  # else the garbage collector of every child visits all objects of the libraries, and copies their pages
    for line in sys.stdin:
        task = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the handler that ends this process must know the child
        children.append(_start_child(worker, Path(task["request"]), said))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _say(said, {"child": children[0]})
        ending = _wait(children[0], limit_seconds=float(task["limit"]), asker=asker)
        children.clear()
        _say(said, ending)


def _start_child(worker: ModuleType, request: Path, said: TextIO) -> int:
    server = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            end_with(server)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if cuda_was_asked():
                _begin_anew(request, said)
        except BaseException:  # a fork never returns into the server's code
            traceback.print_exc()
            os._exit(1)
        _work(worker, request, said)
    with suppress(PermissionError):  # it has begun anew already, in its group
        os.setpgid(child, child)  # as the child itself does: whoever is first, the group is there before it is killed
    return child


def _begin_anew(request: Path, said: TextIO) -> NoReturn:
    os.set_inheritable(said.fileno(), True)
    command = [*parent_process.begin_again(), str(request), str(said.fileno())]
    os.execv(command[0], command)


def answer_alone(worker_name: str, request: Path, said: int) -> NoReturn:
    """Answer one request in this process, which is new. ``said``: the file descriptor of the answers."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quiet_libraries()
    with importing():
        worker = importlib.import_module(worker_name)
    _work(worker, request, os.fdopen(said, "w"))


def _work(worker: ModuleType, request: Path, said: TextIO) -> NoReturn:
    """Run the worker, and end this process without the exit handlers of libraries."""
    code = 1
    try:
        worker.main(request, lambda value: _say(said, {"answer": value.to_json()}))
        code = 0
    except BaseException:  # the log says what it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, *, limit_seconds: float, asker: int) -> dict[str, Any]:
    deadline = time.monotonic() + limit_seconds
    timed_out = False
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if os.getppid() != asker:  # the asking process was killed, and nobody reads the child's answers
            os.killpg(child, signal.SIGKILL)
            os._exit(1)
        if not timed_out and time.monotonic() > deadline:
            timed_out = True
            os.killpg(child, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return {
        "timed_out": timed_out,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "exit": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
    }


def _say(said: TextIO, what: dict[str, Any]) -> None:
    said.write(json.dumps(what) + "\n")
    said.flush()


def _end(children: list[int], number: int, frame: FrameType | None) -> None:
    for child in children:
        os.killpg(child, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        answer_alone(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    main(sys.argv[1])
