"""Run independent tasks side by side in forked copies of this process, which have every library and model that it has loaded."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any, NamedTuple, TypeVar

import psutil
import torch

from upshift.parent_process import end_with

T = TypeVar("T")
STUCK_SECONDS = 20.0  # without computing anything


def run_forked(tasks: Sequence[Callable[[], T]], *, progress: Callable[[int], None] = lambda done: None) -> list[T]:
    """Return the results, which must be picklable, in the order of the tasks.

    As many tasks run at once as torch may use threads (OMP_NUM_THREADS). A task that fails in a copy is run again here, so
    that its error is raised with its own traceback. All are run here if copies cannot be made. So are tasks of copies that
    wait for a lock which another thread of this process held when they were made.
    """
    results: dict[int, T] = {}
    workers = min(len(tasks), torch.get_num_threads())
    if workers > 1 and _may_fork():
        for number, result in _side_by_side(tasks, workers):
            results[number] = result
            progress(len(results))
    for number, task in enumerate(tasks):
        if number not in results:
            results[number] = task()
            progress(len(results))
    return [results[number] for number in range(len(tasks))]


def _may_fork() -> bool:
    """Return whether this process can be forked. CUDA does not survive it."""
    return "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()


def _side_by_side(tasks: Sequence[Callable[[], T]], workers: int) -> Iterator[tuple[int, T]]:
    """Yield (number, result) of the tasks that succeeded, as they finish."""
    gc.freeze()  # else each copy's garbage collector visits all objects of the libraries, and copies their pages
    copies = [_Copy(tasks) for _ in range(workers)]
    gc.unfreeze()
    idle = list(copies)
    busy = dict[Any, _Copy]()
    waiting = list(range(len(tasks)))
    try:
        while busy or (waiting and idle):
            while waiting and idle:
                copy = idle.pop()
                copy.connection.send(waiting.pop(0))
                busy[copy.connection] = copy
            ready = wait(list(busy), timeout=STUCK_SECONDS)
            if not ready and not any(copy.computes() for copy in busy.values()):
                return
            for connection in ready:
                copy = busy.pop(connection)
                answer = _receive(connection)
                if answer is None:  # the copy has ended, perhaps killed
                    continue
                idle.append(copy)
                if answer.succeeded:
                    yield answer.number, answer.result
    finally:
        for copy in copies:
            copy.process.kill()
            copy.process.join()


class _Answer(NamedTuple):
    number: int
    succeeded: bool
    result: Any = None


class _Copy:
    def __init__(self, tasks: Sequence[Callable[[], Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(tasks, theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        self._seconds = 0.0

    def computes(self) -> bool:
        """Return whether the copy has used processor time since the last call."""
        before = self._seconds
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return False
        self._seconds = times.user + times.system
        return self._seconds > before


def _receive(connection: Any) -> _Answer | None:
    try:
        found: _Answer = connection.recv()
    except (EOFError, ConnectionResetError):
        return None
    return found


def _work(tasks: Sequence[Callable[[], Any]], connection: Any, parent: int) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its copies
    torch.set_num_threads(1)  # the threads of OpenMP are not copied
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        try:
            answer = _Answer(number, True, tasks[number]())
        except Exception:  # run again, and raised, by the parent
            answer = _Answer(number, False)
        connection.send(answer)
