# needs torch
"""Run independent tasks in parallel in forked copies of this process, which share its loaded libraries and models."""

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
    """Run all tasks and return their results in the order of the tasks. Results must be picklable.

    As many tasks run at once as torch may use threads (OMP_NUM_THREADS). This process runs a task itself in three cases: the
    process cannot be forked; the task failed in a worker, so that its error is raised with its own traceback; or the workers
    are stuck at a lock that another thread of this process held during the fork.
    """
    results: dict[int, T] = {}
    workers = min(len(tasks), torch.get_num_threads())
    if workers > 1 and _can_fork():
        for number, result in _run_in_workers(tasks, workers):
            results[number] = result
            progress(len(results))
    for number, task in enumerate(tasks):
        if number not in results:
            results[number] = task()
            progress(len(results))
    return [results[number] for number in range(len(tasks))]


def _can_fork() -> bool:
    """Return whether this process can be forked. An initialized CUDA context does not survive a fork."""
    return "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()


def _run_in_workers(tasks: Sequence[Callable[[], T]], num_workers: int) -> Iterator[tuple[int, T]]:
    """Yield (number, result) of each task that succeeds, as it finishes."""
    is_frozen = gc.get_freeze_count() > 0  # then the caller excludes the libraries from every collection, and they stay excluded
    if not is_frozen:
        gc.freeze()  # without this, each worker's garbage collector visits all objects of the libraries and copies their pages
    workers = [_Worker(tasks) for _ in range(num_workers)]
    if not is_frozen:
        gc.unfreeze()
    idle = list(workers)
    busy = dict[Any, _Worker]()
    pending = list(range(len(tasks)))
    try:
        while busy or (pending and idle):
            while pending and idle:
                worker = idle.pop()
                worker.connection.send(pending.pop(0))
                busy[worker.connection] = worker
            ready = wait(list(busy), timeout=STUCK_SECONDS)
            if not ready and not any(worker.has_computed() for worker in busy.values()):
                return
            for connection in ready:
                worker = busy.pop(connection)
                answer = _receive(connection)
                if answer is None:  # the worker has ended, or was killed
                    continue
                idle.append(worker)
                if answer.succeeded:
                    yield answer.number, answer.result
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


class _Answer(NamedTuple):
    number: int
    succeeded: bool
    result: Any = None


class _Worker:
    def __init__(self, tasks: Sequence[Callable[[], Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, worker_end = context.Pipe()
        self.process = context.Process(target=_serve_tasks, args=(tasks, worker_end, os.getpid()), daemon=True)
        self.process.start()
        worker_end.close()
        self._seconds = 0.0

    def has_computed(self) -> bool:
        """Return whether the worker has used processor time since the last call."""
        earlier_seconds = self._seconds
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return False
        self._seconds = times.user + times.system
        return self._seconds > earlier_seconds


def _receive(connection: Any) -> _Answer | None:
    try:
        answer: _Answer = connection.recv()
    except (EOFError, ConnectionResetError):
        return None
    return answer


def _serve_tasks(tasks: Sequence[Callable[[], Any]], connection: Any, parent: int) -> None:
    """Run the tasks whose numbers arrive on ``connection`` until the parent closes it."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    torch.set_num_threads(1)  # a fork does not copy OpenMP's threads
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        try:
            answer = _Answer(number, True, tasks[number]())
        except Exception:  # the parent runs the task again and raises its error
            answer = _Answer(number, False)
        connection.send(answer)
