"""Run a job as replicas in separate processes. A replica that is killed is started again, and the others go on meanwhile."""

from __future__ import annotations

import importlib.util
import signal
import threading
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import Queue

from upshift.errors import Interrupted, JobFailed, MissingExtra, RequestError
from upshift.fork_server import ENDLESS_SECONDS, ChildExit, ForkServer, fork_server
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
HEARTBEAT_TIMEOUT_MS = 1000  # a replica counts as lost after this time without a heartbeat; it sends one every 100 ms
JOIN_TIMEOUT_MS = 60_000  # the replicas wait this long for one that is alive and has not come to the step
MAX_FAILED_STARTS = 3  # after this many starts in a row without a counted step, a replica is not started again


def check_healing(plan: Plan) -> None:
    """Raise RequestError if replicas cannot heal each other. The message says what to do instead."""
    if importlib.util.find_spec("torchft") is None:
        raise MissingExtra(library="torchft", extra="heal", purpose="--heal")
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
    """Return assignments of ``--set`` under which plans can heal. The user's own assignments stay.

    Raise RequestError for ranks of a launcher, because a launcher ends all ranks when one dies, and for an assignment of the
    user under which no plan can heal.
    """
    if launched:
        raise RequestError("--heal starts processes itself, and a launcher did here; use upshift train --nproc 2 --heal alone")
    user_values = {name: value for name, _, value in (text.partition("=") for text in fixed)}
    needed = {name: str(value).lower() for name, value in {**ALONE.model_dump(), "optimizer_in_backward": False}.items()}
    for name, value in needed.items():
        if user_values.get(name, value).strip().lower() != value:
            raise RequestError(
                f"--heal needs {name}={value}, because each process trains the whole model and can take a step again, and "
                f"{name}={user_values[name]} was given; leave it out, or --heal"
            )
    return (*fixed, *(f"{name}={value}" for name, value in needed.items() if name not in user_values))


class Replica:
    """A replica that is started again after each loss, by a fork of a process that has imported everything.

    Imports take most of the time of a start, and the imported modules are in memory only once.
    """

    def __init__(
        self, number: int, folder: Path, lighthouse: str, events: Queue[tuple[Replica, Event | None]], stack: ExitStack
    ) -> None:
        self.number = number
        self._folder = folder
        self._lighthouse = lighthouse
        self._events = events
        self._stack = stack
        self._server: ForkServer | None = None
        self._ending: ChildExit | None = None
        self._failed_starts = 0
        self.start(first=True)

    def start(self, *, first: bool) -> None:
        """Start a process of the replica. A thread passes its events on."""
        if self._server is None or not self._server.runs:
            self._server = self._stack.enter_context(fork_server(WORKER, own_session=True))
        self._joined_at_step = 0 if first else None
        request = ReplicaRequest(folder=str(self._folder), number=self.number, lighthouse=self._lighthouse, first=first)
        threading.Thread(target=self._listen, args=(self._server, request), daemon=True).start()

    def _listen(self, server: ForkServer, request: ReplicaRequest) -> None:
        self._ending = None
        with suppress(JobFailed):  # the server died, and the replica with it
            for answer in server.ask(request, SentEvent, limit_seconds=ENDLESS_SECONDS):
                if isinstance(answer, ChildExit):
                    self._ending = answer
                else:
                    self._events.put((self, answer.event))
        self._events.put((self, None))

    def interrupt(self) -> None:
        assert self._server is not None
        self._server.interrupt()

    def joined(self, step: int) -> None:
        """Record that the replica came back at a step, with the state of the others."""
        self._joined_at_step = step

    @property
    def was_killed(self) -> bool:
        return not (self._folder / result_name(self.number)).exists()

    def may_restart(self, step: int) -> bool:
        """Return whether the replica may start again. ``step`` is the last step that counted."""
        took_part = self._joined_at_step is not None and step > self._joined_at_step
        self._failed_starts = 0 if took_part else self._failed_starts + 1
        return self._failed_starts < MAX_FAILED_STARTS

    def result(self) -> Record:
        """Return the replica's Record. Raise the error with which the replica failed."""
        return read_result(self._folder, 0, interrupted=False, name=result_name(self.number))

    def last_words(self) -> str:
        """Return how the last process ended, for a message."""
        if self._ending is None:
            return "died with the process that it was forked from"
        if self._ending.signal is not None:
            return f"was killed ({signal.Signals(self._ending.signal).name})"
        return f"died (exit code {self._ending.exit}: {self._ending.last_words})"


def run_healing(job: Job, data: TrainingData, on_event: OnEvent) -> Record:
    """Run the replicas until all have ended. Raise JobFailed if one fails, with its message, or if none is left."""
    quiet_torchft()
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
        quorum_tick_ms=50,
    )
    events: Queue[tuple[Replica, Event | None]] = Queue()
    numbers = range(job.plan.num_processes)
    with job_folder(job, data) as folder, ExitStack() as stack:
        stack.callback(lighthouse.shutdown)
        for number in numbers:
            _write_job(folder, number, job)
        address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"  # a host may not be able to resolve its own name
        replicas = [Replica(number, folder, address, events, stack) for number in numbers]
        with StopRequest(on_request=partial(_interrupt_all, replicas)) as stop:
            return _supervise(job, folder, replicas, events, on_event, stop)


def _write_job(folder: Path, number: int, job: Job) -> None:
    """Write the job of one replica. It has every micro-batch of the global batch, and computes its share of them."""
    plan = job.plan
    accumulation = plan.gradient_accumulation_steps * plan.num_processes
    replica_plan = plan.changed(num_processes=1, gradient_accumulation_steps=accumulation)
    replica_job = job.changed(plan=replica_plan, whole_plan=plan, heal=False)
    (folder / job_name(number)).write_text(replica_job.to_json(), encoding="utf-8")


def _interrupt_all(replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.interrupt()


def _supervise(
    job: Job,
    folder: Path,
    replicas: list[Replica],
    events: Queue[tuple[Replica, Event | None]],
    on_event: OnEvent,
    stop: StopRequest,
) -> Record:
    """Pass on the events of all replicas, restart lost ones, and return the record of the one that finishes."""
    running = list(replicas)
    step = 0
    finished: Replica | None = None
    interrupted: Interrupted | None = None
    while running:
        replica, event = events.get()
        if event is not None:
            step = event.step if isinstance(event, StepDone) else step
            finished = replica if isinstance(event, Finished) else finished
            if isinstance(event, Healed):
                replica.joined(event.step)
                event = Waited(event.step, f"copy {replica.number} is here, and has what the others have")
            on_event(event)
        elif not replica.was_killed:
            running.remove(replica)
            try:
                replica.result()
            except Interrupted as error:  # all replicas are interrupted at the same step, and one of them saves
                interrupted = error
        else:
            restarts = replica.may_restart(step) and not stop.requested and finished is None
            consequence = "it is started again" if restarts else "it stays away"
            loss = f"copy {replica.number} of {job.plan.num_processes} {replica.last_words()}"
            on_event(Waited(step, f"{loss}; the others go on, and {consequence}"))
            if restarts:
                _write_job(folder, replica.number, job.changed(resume=True, overwrite=False, checkpoint=None))
                replica.start(first=False)
            else:
                (folder / arrival_name(replica.number)).touch()  # so that no replica waits for it at the start
                running.remove(replica)
    if interrupted is not None:
        raise interrupted
    if finished is None or finished.was_killed:
        if stop.requested:
            raise Interrupted("interrupted before the first step; nothing new is saved, start again")
        last_loss = f"the last of them {replica.last_words()}"
        raise JobFailed(f"all {len(replicas)} copies are gone, {last_loss}; remove the cause, then --resume")
    return finished.result()
