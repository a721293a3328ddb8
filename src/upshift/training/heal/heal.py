"""A job as whole copies in processes of their own: one that is killed is started again, and the others go on meanwhile."""

from __future__ import annotations

import importlib.util
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Literal

from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.planning.plan import ALONE, Plan
from upshift.record import Record
from upshift.settings import quiet_torchft
from upshift.training.data.training_data import TrainingData
from upshift.training.heal.copies import job_name, result_name
from upshift.training.job.processes import result_in, written
from upshift.training.job.request import Job
from upshift.training.loop.events import Event, Finished, OnEvent, StepDone, Waited, event_from_json
from upshift.training.loop.stop import StopRequest

LOST_MS = 1000  # without a sign of life a copy counts as gone; it gives one each 100 ms
JOINING_MS = 60_000  # those that are there wait so long for one that is, and has not come to the step
SOON_SECONDS, MOST_SOON = 60.0, 3  # a copy that dies so soon after its start, so often in turn, stays away


def check_healing(plan: Plan) -> None:
    """Raises RequestError where copies cannot heal each other, with what to do instead."""
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


def fixed_to_heal(fixed: tuple[str, ...], *, launched: bool) -> tuple[str, ...]:
    """Assignments of ``--set`` that leave plans which can heal; what was asked for stays. Raises RequestError among ranks of a
    launcher, which ends all of them when one dies."""
    if launched:
        raise RequestError("--heal starts processes itself, and a launcher did here; use upshift train --nproc 2 --heal alone")
    asked = {text.partition("=")[0] for text in fixed}
    plain = {**ALONE.model_dump(), "optimizer_in_backward": False}
    return (*fixed, *(f"{name}={str(value).lower()}" for name, value in plain.items() if name not in asked))


class Copy:
    """One process after the other."""

    def __init__(self, number: int, folder: Path, lighthouse: str, told: queue.Queue[tuple[Copy, Event | None]]) -> None:
        self.number, self._folder, self._lighthouse, self._told = number, folder, lighthouse, told
        self._soon = 0
        self.begin("first")

    def begin(self, life: Literal["first", "again"]) -> None:
        self._began = time.monotonic()
        command = [sys.executable, "-m", "upshift.training.heal.copy_process", str(self._folder), str(self.number)]
        self.process = subprocess.Popen(
            [*command, self._lighthouse, life], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._told.put((self, event_from_json(line)))
        process.wait()
        process.stdout.close()
        self._told.put((self, None))

    @property
    def was_killed(self) -> bool:
        return not (self._folder / result_name(self.number)).exists()

    def may_come_again(self) -> bool:
        soon = time.monotonic() - self._began < SOON_SECONDS
        self._soon = self._soon + 1 if soon else 0
        return self._soon < MOST_SOON

    def result(self) -> Record:
        """Raises what the copy failed with."""
        return result_in(self._folder, self.process.returncode, interrupted=False, name=result_name(self.number))

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run_healing(job: Job, data: TrainingData, on_event: OnEvent) -> Record:
    """Until all copies have ended. Raises JobFailed with the words of one that failed, or where none is left."""
    quiet_torchft()
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=JOINING_MS, heartbeat_timeout_ms=LOST_MS, quorum_tick_ms=50
    )
    told: queue.Queue[tuple[Copy, Event | None]] = queue.Queue()
    numbers = range(job.plan.num_processes)
    with written(job, data) as folder:
        for number in numbers:
            _write_job(folder, number, job)
        address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"  # hosts do not always know their own name
        copies = [Copy(number, folder, address, told) for number in numbers]
        try:
            with StopRequest(on_request=partial(_pass_on, copies)) as stop:
                return _watch(job, folder, copies, told, on_event, stop)
        finally:
            for copy in copies:
                copy.end()
            lighthouse.shutdown()


def _write_job(folder: Path, number: int, job: Job) -> None:
    """Each has every micro-batch of the global batch, and computes those that fall to it."""
    plan, ranks = job.plan, job.plan.num_processes
    alone = plan.changed(num_processes=1, gradient_accumulation_steps=plan.gradient_accumulation_steps * ranks)
    (folder / job_name(number)).write_text(job.changed(plan=alone, heal=False).to_json(), encoding="utf-8")


def _pass_on(copies: list[Copy]) -> None:
    for copy in copies:
        if copy.process.poll() is None:
            copy.process.send_signal(signal.SIGINT)


def _watch(
    job: Job, folder: Path, copies: list[Copy], told: queue.Queue[tuple[Copy, Event | None]], on_event: OnEvent, stop: StopRequest
) -> Record:
    left, step = list(copies), 0
    finished: Copy | None = None
    interrupted: Interrupted | None = None
    while left:
        copy, event = told.get()
        if event is not None:
            step = event.step if isinstance(event, StepDone) else step
            finished = copy if isinstance(event, Finished) else finished
            on_event(event)
        elif not copy.was_killed:
            left.remove(copy)
            try:
                copy.result()
            except Interrupted as error:  # all are, at the same step, and one of them saves
                interrupted = error
        else:
            again = copy.may_come_again() and not stop.requested and finished is None
            on_event(Waited(step, _lost(copy, job, again=again)))
            if again:
                _write_job(folder, copy.number, job.changed(resume=True, overwrite=False))
                copy.begin("again")
            else:
                left.remove(copy)
    if interrupted is not None:
        raise interrupted
    if finished is None or finished.was_killed:
        raise JobFailed(f"all {len(copies)} copies are gone; remove the cause, then --resume")
    return finished.result()


def _lost(copy: Copy, job: Job, *, again: bool) -> str:
    code = copy.process.returncode
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"died (exit code {code})"
    then = "it is started again" if again else "it stays away"
    return f"copy {copy.number} of {job.plan.num_processes} {how}; the others go on, and {then}"
