"""Run the process behind ``ForkServer``: import a worker, then fork a child for each request on standard input.

SIGINT ends this process and the child, and so does the end of the client that sends requests. Some libraries ask torch about GPUs
while they are imported. NVML answers, because no fork of a process that started CUDA can use a GPU. If an import starts CUDA all
the same, the child executes this module again and imports the worker itself."""

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
from upshift.internals.torch_names import cuda_not_started, is_fork_after_cuda
from upshift.parent_process import end_with
from upshift.settings import quiet_libraries

POLL_SECONDS = 0.02


def main(worker_name: str) -> None:
    quiet_libraries()  # else the last line of a child's log may be a library's
    children: list[int] = []
    client = os.getppid()
    signal.signal(signal.SIGINT, partial(_kill_children, children))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print must not mix with the answers
    with importing(), cuda_not_started():
        worker = importlib.import_module(worker_name)
        gc.freeze()  # else each child's garbage collector visits all objects of the libraries and copies their pages
    for line in sys.stdin:
        task = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the handler that ends this process must know the child
        children.append(_start_child(worker, Path(task["request"]), answers))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _send(answers, {"child": children[0]})
        ending = _wait_for_child(children[0], limit_seconds=float(task["limit"]), client=client)
        children.clear()
        _send(answers, ending)


def _start_child(worker: ModuleType, request: Path, answers: TextIO) -> int:
    server = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            end_with(server)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if is_fork_after_cuda():
                _exec_new_process(request, answers)
        except BaseException:  # a fork never returns into the server's code
            traceback.print_exc()
            os._exit(1)
        _run_worker(worker, request, answers)
    with suppress(PermissionError):  # the child already executes a new program, in its own group
        os.setpgid(child, child)  # the child does the same: the group must exist before it can be killed
    return child


def _exec_new_process(request: Path, answers: TextIO) -> NoReturn:
    os.set_inheritable(answers.fileno(), True)
    command = [*parent_process.restart_command(), str(request), str(answers.fileno())]
    os.execv(command[0], command)


def answer_one_request(worker_name: str, request: Path, answers_descriptor: int) -> NoReturn:
    """Answer one request in this new process. ``answers_descriptor``: the file descriptor that answers are written to."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quiet_libraries()
    with importing():
        worker = importlib.import_module(worker_name)
        gc.freeze()  # as in a fork of the server
    _run_worker(worker, request, os.fdopen(answers_descriptor, "w"))


def _run_worker(worker: ModuleType, request: Path, answers: TextIO) -> NoReturn:
    """Run the worker, then end this process without running the exit handlers of libraries."""
    code = 1
    try:
        worker.main(request, lambda value: _send(answers, {"answer": value.to_json()}))
        code = 0
    except BaseException:  # the server's log gets the traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for_child(child: int, *, limit_seconds: float, client: int) -> dict[str, Any]:
    deadline = time.monotonic() + limit_seconds
    timed_out = False
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if os.getppid() != client:  # the client was killed, so nobody reads the child's answers
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


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _kill_children(children: list[int], number: int, frame: FrameType | None) -> None:
    for child in children:
        os.killpg(child, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        answer_one_request(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    main(sys.argv[1])
