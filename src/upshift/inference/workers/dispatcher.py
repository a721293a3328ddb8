"""Give tasks to workers, and return the results in the order of the tasks.

A worker that dies is started again, and its task is computed again. So each task has exactly one result."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol

from upshift.errors import JobFailed, NothingFits, RequestError

MAX_DEATHS = 3  # of the workers of one task, or of one worker before it answers
AHEAD = 3  # tasks of each worker that may be done before the next result in order: their results wait in memory
ERRORS = {2: RequestError, 3: NothingFits}  # by the exit code


class Job(NamedTuple):
    """Name the class whose object a worker computes with, as module:name, and its arguments."""

    factory: str
    arguments: Mapping[str, Any]


class Task(NamedTuple):
    """A method of the job's object, and its arguments."""

    method: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] | None = None


class Answer(NamedTuple):
    """Hold the result of a task, or the message and the exit code of its error."""

    value: Any = None
    error: str | None = None
    exit_code: int = 1


class WorkerPool(Protocol):
    """Workers with the numbers from 0 to ``size - 1``, each of which has built the object of one job."""

    size: int

    def send(self, worker: int, task: Task) -> None:
        """Give a task to a worker that has none."""
        ...

    def receive(self) -> tuple[int, Answer | None]:
        """Wait for the next answer of any worker. None: the worker has ended."""
        ...

    def restart(self, worker: int) -> str:
        """Start a worker again that has ended. Return how it ended."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class _Running(NamedTuple):
    number: int
    task: Task
    deaths: int = 0  # of workers that had it


SET_UP = -1  # the number of the task that each worker computes first


class Dispatcher:
    """Give tasks to the workers of a pool."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._set_up: Task | None = None
        self._is_set_up: set[int] = set()
        self._deaths = Counter[int]()  # of each worker since its last answer

    def set_up(self, task: Task) -> None:
        """Compute a task on each worker before its next one, also after a restart."""
        self._set_up = task
        self._is_set_up = set()

    def ask(self, task: Task) -> Any:
        """Return the result of one task."""
        (result,) = self.in_order([task])
        return result

    def in_order(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """Yield the result of each task, in their order.

        Raise the error of a task, or JobFailed if the workers of a task die again and again."""
        fresh = enumerate(tasks)
        waiting: deque[_Running] = deque()  # tasks whose worker died
        running: dict[int, _Running] = {}  # by worker
        results: dict[int, Any] = {}
        next_number = 0
        num_begun = 0
        while True:
            for worker in range(self.pool.size):
                if worker not in running and not waiting and num_begun - next_number < AHEAD * self.pool.size:
                    waiting.extend(_Running(number, task) for number, task in islice(fresh, 1))
                    num_begun += len(waiting)
                if worker not in running and waiting:
                    running[worker] = self._start(worker, waiting)
            if not running:
                return
            worker, answer = self.pool.receive()
            item = running.pop(worker, None)
            if answer is None:
                self._restart(worker, item, waiting)
                continue
            assert item is not None
            self._deaths[worker] = 0
            if item.number == SET_UP:
                read_answer(answer)
                self._is_set_up.add(worker)
                continue
            results[item.number] = read_answer(answer)
            while next_number in results:
                yield results.pop(next_number)
                next_number += 1

    def _start(self, worker: int, waiting: deque[_Running]) -> _Running:
        """Send the next task to a worker, or the task that each worker computes first."""
        item = None
        if self._set_up is not None and worker not in self._is_set_up:
            item = _Running(SET_UP, self._set_up)
        item = item or waiting.popleft()
        self.pool.send(worker, item.task)
        return item

    def _restart(self, worker: int, item: _Running | None, waiting: deque[_Running]) -> None:
        """Start a worker again that died, and keep its task for the next worker that is free."""
        self._is_set_up.discard(worker)
        self._deaths[worker] += 1
        deaths = max(self._deaths[worker], 0 if item is None else item.deaths + 1)
        ending = self.pool.restart(worker)
        if deaths >= MAX_DEATHS:
            raise JobFailed(
                f"worker {worker + 1} of {self.pool.size} ended {deaths} times at the same work, last with {ending}; give it "
                "more memory, or ask for fewer --replicas"
            )
        if item is not None and item.number != SET_UP:
            waiting.appendleft(item._replace(deaths=deaths))


def read_answer(answer: Answer) -> Any:
    """Return the value of an answer, or raise its error."""
    if answer.error is not None:
        raise ERRORS.get(answer.exit_code, JobFailed)(answer.error)
    return answer.value
