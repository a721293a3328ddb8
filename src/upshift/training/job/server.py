"""Run jobs one after the other, each in a fork of a process that has imported everything.

This saves time for many short jobs, because importing would take most of their time. JobServer is the caller's side. ``main``
runs one job in a child of the fork server, from the files in a folder.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from upshift.fork_server import ENDLESS_SECONDS, ChildExit, ForkServer, fork_server
from upshift.loading.output_lock import claimed
from upshift.record import Record
from upshift.training.data.dataset import TrainingData
from upshift.training.job.job import append_record, open_job, run_rank
from upshift.training.job.processes import job_folder, read_result, run_from_folder
from upshift.training.job.request import Job
from upshift.training.loop.events import Event, OnEvent, SentEvent, to_sent_event
from upshift.value import Value

WORKER = "upshift.training.job.server"
STOP_NAME = "stop"  # a file in the job's folder that tells the child to end


class Request(Value):
    """The request to run the job in a folder."""

    folder: str


def main(path: Path, answer: Callable[[Value], None]) -> None:
    folder = Path(Request.from_file(path).folder)

    def on_event(event: Event) -> None:
        answer(to_sent_event(event))
        if (folder / STOP_NAME).exists():
            os.killpg(0, signal.SIGKILL)  # this process and the ranks that it forked

    run_from_folder(folder, run_rank, on_event)


class JobServer:
    """A connection to a fork server that runs jobs."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    @property
    def runs(self) -> bool:
        return self._server.runs

    def run(self, job: Job, data: TrainingData, on_event: OnEvent) -> Record:
        """Run a job as ``run_job`` does. If ``on_event`` raises an error, end the job at its next event and raise the error."""
        with claimed(Path(job.output)):
            return self._run(open_job(job, data), data, on_event)

    def _run(self, job: Job, data: TrainingData, on_event: OnEvent) -> Record:
        with job_folder(job, data) as folder:
            answers = self._server.ask(Request(folder=str(folder)), SentEvent, limit_seconds=ENDLESS_SECONDS)
            exit_code = 0
            try:
                for answer in answers:
                    if isinstance(answer, ChildExit):
                        exit_code = -answer.signal if answer.signal else answer.exit or 0
                    else:
                        on_event(answer.event)
            except BaseException:  # after any error the child must not go on
                (folder / STOP_NAME).touch()
                with suppress(StopIteration):
                    while not isinstance(next(answers), ChildExit):
                        pass
                raise
            record = read_result(folder, exit_code, interrupted=False)
        append_record(record)
        return record


@contextmanager
def job_server() -> Iterator[JobServer]:
    with fork_server(WORKER) as server:
        yield JobServer(server)
