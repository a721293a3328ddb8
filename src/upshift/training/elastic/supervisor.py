"""Run a job as whole copies in processes of their own: one that is killed is started again, and the others go on meanwhile."""

from __future__ import annotations

import importlib.util
import signal
import threading
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import Queue

from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.fork_server import ENDLESS_SECONDS, Ending, ForkServer, fork_server
from upshift.planning.plan import ALONE, Plan
from upshift.record import Record
from upshift.settings import quiet_torchft
from upshift.training.data.dataset import TrainingData
from upshift.training.elastic.replica import ReplicaRequest, arrival_name, job_name, result_name
from upshift.training.job.processes import job_folder, read_result
from upshift.training.job.request import Job
from upshift.training.loop.events import Event, Finished, Healed, OnEvent, SentEvent, StepDone, Waited
from upshift.training.loop.signals import StopRequest

WORKER = "upshift.training.elastic.replica_process"
HEARTBEAT_TIMEOUT_MS = 1000  # without a sign of life a copy counts as gone; it gives one each 100 ms
JOIN_TIMEOUT_MS = 60_000  # the copies in a step wait so long for one that is alive and has not come to it
MAX_FAILED_STARTS = 3  # a copy that dies so often in a row before a step with it has counted stays away


def check_healing(plan: Plan) -> None:
    """Raise RequestError if copies cannot heal each other, with what to do instead."""
    if importlib.util.find_spec("torchft") is None:
        raise RequestError("--heal needs torchft; pip install 'upshift[heal]'")
    if plan.num_processes < 2:
        raise RequestError("--heal is for several copies, and the plan has one process; add --nproc 2")
    if plan.layout != ALONE:
        raise RequestError(
            f"--heal is for processes that have the whole model each, not {plan.layout.label()}; leave the layout out, or --heal"
        )
    if plan.optimizer_in_backward:
        raise RequestError(
            "--heal takes a step again that lost a copy, and optimizer_in_backward has moved weights by then; "
            "use --set optimizer_in_backward=false"
        )


def fixed_for_healing(fixed: tuple[str, ...], *, launched: bool) -> tuple[str, ...]:
    """Return assignments of ``--set`` that leave plans which can heal. The user's own assignments stay.

    Raise RequestError among ranks of a launcher, which ends all of them when one dies.
    """
    if launched:
        raise RequestError("--heal starts processes itself, and a launcher did here; use upshift train --nproc 2 --heal alone")
    asked = {text.partition("=")[0] for text in fixed}
    plain = {**ALONE.model_dump(), "optimizer_in_backward": False}
    return (*fixed, *(f"{name}={str(value).lower()}" for name, value in plain.items() if name not in asked))


class Replica:
    """A copy that has one life after the other, each forked from a process that has imported everything.

    Imports are most of the time of a start, and imported modules are in memory once.
    """

    def __init__(
        self, number: int, folder: Path, lighthouse: str, told: Queue[tuple[Replica, Event | None]], stack: ExitStack
    ) -> None:
        self.number, self._folder, self._lighthouse, self._told, self._stack = number, folder, lighthouse, told, stack
        self._server: ForkServer | None = None
        self._ending: Ending | None = None
        self._in_vain = 0
        self.begin(first=True)

    def begin(self, *, first: bool) -> None:
        if self._server is None or not self._server.runs:
            self._server = self._stack.enter_context(fork_server(WORKER, own_session=True))
        self._came_at = 0 if first else None
        life = ReplicaRequest(folder=str(self._folder), number=self.number, lighthouse=self._lighthouse, first=first)
        threading.Thread(target=self._listen, args=(self._server, life), daemon=True).start()

    def _listen(self, server: ForkServer, life: ReplicaRequest) -> None:
        self._ending = None
        with suppress(JobFailed):  # of the server, with which the copy is gone
            for said in server.ask(life, SentEvent, limit_seconds=ENDLESS_SECONDS):
                if isinstance(said, Ending):
                    self._ending = said
                else:
                    self._told.put((self, said.event))
        self._told.put((self, None))

    def interrupt(self) -> None:
        assert self._server is not None
        self._server.interrupt()

    def came(self, step: int) -> None:
        """Note that the copy came back at a step, with what the others have had since that step."""
        self._came_at = step

    @property
    def was_killed(self) -> bool:
        return not (self._folder / result_name(self.number)).exists()

    def may_come_again(self, step: int) -> bool:
        """Return whether the copy may start again. ``step`` is the last one that counted."""
        took_part = self._came_at is not None and step > self._came_at
        self._in_vain = 0 if took_part else self._in_vain + 1
        return self._in_vain < MAX_FAILED_STARTS

    def result(self) -> Record:
        """Return the copy's Record. Raise the error with which the copy failed."""
        return read_result(self._folder, 0, interrupted=False, name=result_name(self.number))

    def last_words(self) -> str:
        if self._ending is None:
            return "died with the process that it was forked from"
        if self._ending.signal is not None:
            return f"was killed ({signal.Signals(self._ending.signal).name})"
        return f"died (exit code {self._ending.exit}: {self._ending.last_words})"


def run_healing(job: Job, data: TrainingData, on_event: OnEvent) -> Record:
    """Run the copies until all have ended. Raise JobFailed with the words of one that failed, or if none is left."""
    quiet_torchft()
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
        quorum_tick_ms=50,
    )
    told: Queue[tuple[Replica, Event | None]] = Queue()
    numbers = range(job.plan.num_processes)
    with job_folder(job, data) as folder, ExitStack() as stack:
        stack.callback(lighthouse.shutdown)
        for number in numbers:
            _write_job(folder, number, job)
        address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"  # hosts do not always know their own name
        copies = [Replica(number, folder, address, told, stack) for number in numbers]
        with StopRequest(on_request=partial(_interrupt_all, copies)) as stop:
            return _supervise(job, folder, copies, told, on_event, stop)


def _write_job(folder: Path, number: int, job: Job) -> None:
    """Write a copy's job. Each copy has every micro-batch of the global batch, and computes those that fall to it."""
    plan, ranks = job.plan, job.plan.num_processes
    alone = plan.changed(num_processes=1, gradient_accumulation_steps=plan.gradient_accumulation_steps * ranks)
    (folder / job_name(number)).write_text(job.changed(plan=alone, whole_plan=plan, heal=False).to_json(), encoding="utf-8")


def _interrupt_all(copies: list[Replica]) -> None:
    for copy in copies:
        copy.interrupt()


def _supervise(
    job: Job, folder: Path, copies: list[Replica], told: Queue[tuple[Replica, Event | None]], on_event: OnEvent, stop: StopRequest
) -> Record:
    left, step = list(copies), 0
    finished: Replica | None = None
    interrupted: Interrupted | None = None
    while left:
        copy, event = told.get()
        if event is not None:
            step = event.step if isinstance(event, StepDone) else step
            finished = copy if isinstance(event, Finished) else finished
            if isinstance(event, Healed):
                copy.came(event.step)
                event = Waited(event.step, f"copy {copy.number} is here, and has what the others have")
            on_event(event)
        elif not copy.was_killed:
            left.remove(copy)
            try:
                copy.result()
            except Interrupted as error:  # all are, at the same step, and one of them saves
                interrupted = error
        else:
            again = copy.may_come_again(step) and not stop.requested and finished is None
            then = "it is started again" if again else "it stays away"
            lost = f"copy {copy.number} of {job.plan.num_processes} {copy.last_words()}"
            on_event(Waited(step, f"{lost}; the others go on, and {then}"))
            if again:
                _write_job(folder, copy.number, job.changed(resume=True, overwrite=False, checkpoint=None))
                copy.begin(first=False)
            else:
                (folder / arrival_name(copy.number)).touch()  # nobody waits for it at the start
                left.remove(copy)
    if interrupted is not None:
        raise interrupted
    if finished is None or finished.was_killed:
        if stop.requested:
            raise Interrupted("interrupted before the first step; nothing new is saved, start again")
        last = f"the last of them {copy.last_words()}"
        raise JobFailed(f"all {len(copies)} copies are gone, {last}; remove the cause, then --resume")
    return finished.result()
