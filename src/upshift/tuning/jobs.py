"""Run trials of ``upshift tune``: each shape of run is planned once, and a trial starts only if its plan fits, in its own
process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upshift.errors import UpshiftError
from upshift.hardware.spec import Host
from upshift.planning.planner import find_host
from upshift.record import Record
from upshift.training.arguments import Arguments
from upshift.training.job.server import JobServer, job_server
from upshift.training.loop.events import Evaluated, Event
from upshift.training.run import Prepared, prepare_run
from upshift.training.train_request import TrainRequest
from upshift.tuning.folder import trial_folder
from upshift.tuning.servers import Servers
from upshift.tuning.space import OF_RUN
from upshift.tuning.study import Asked

STEPS = "steps"  # optimizer steps of a trial that were done, among its attributes


@dataclass
class Jobs:
    """A context that runs trials.

    ``run`` is called from as many threads as there are ``at_once``; each trial has its share of the cores and the memory."""

    request: TrainRequest  # the same for every trial, but for the values of its study
    output: Path
    arguments: dict[str, Any]  # fields of Arguments that the user gave, the same for every trial
    evaluations: int
    deciding: tuple[int, ...]  # which of these a trial may end at; the others but the last are not made
    at_once: int = 1
    host: Host | None = None  # this machine where not given
    on_step: Callable[[int, Event], None] = lambda number, event: None
    _planned: dict[TrainRequest, tuple[Prepared, int] | Exception] = field(default_factory=dict)
    _planning: threading.Lock = field(default_factory=threading.Lock)
    _servers: Servers[JobServer] = field(default_factory=lambda: Servers(job_server))

    def run(self, asked: Asked, values: dict[str, Any]) -> Record:
        """Run a trial and return its record. Raise NothingFits before anything is started, JobFailed if the run fails."""
        of_run = {name: values[name] for name in OF_RUN if name in values}
        arguments = self.arguments | {name: value for name, value in values.items() if name not in OF_RUN}
        prepared, steps = self._prepare(of_run, arguments)
        arguments |= {"max_steps": steps, "eval_steps": 0}
        job = prepared.job(
            Arguments.from_fields(arguments), output=self.folder(asked.number), evaluate_at_steps=self._evaluate_at(steps)
        )
        with self._servers.one() as server:
            return server.run(job, prepared.data, self._reporting(asked, steps))

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.__exit__()

    def folder(self, number: int) -> Path:
        return trial_folder(self.output, number)

    def _prepare(self, of_run: dict[str, Any], arguments: dict[str, Any]) -> tuple[Prepared, int]:
        """Return the plan of a trial. Trials of one shape share a plan, and a refusal."""
        clips = arguments.get("max_grad_norm", 1.0) > 0
        plain = Arguments(max_steps=1, max_grad_norm=1.0 if clips else 0.0)
        shape = {"max_steps": arguments.get("max_steps"), "arguments": plain}
        key = TrainRequest.from_fields({**self.request.model_dump(), **of_run, **shape})
        with self._planning:
            if key not in self._planned:
                try:
                    self._planned[key] = prepare_run(key, host=self._share())
                except UpshiftError as error:
                    self._planned[key] = error
        found = self._planned[key]
        if isinstance(found, Exception):
            raise found.with_traceback(None)  # which would keep the frames of every trial that met it
        return found

    def _share(self) -> Host | None:
        return self.host if self.at_once == 1 else share_of(self.host or find_host(None), self.at_once)

    def _every(self, steps: int) -> int:
        return max(steps // self.evaluations, 1)

    def _evaluate_at(self, steps: int) -> tuple[int, ...]:
        return tuple(number * self._every(steps) for number in self.deciding if number * self._every(steps) < steps)

    def _reporting(self, asked: Asked, steps: int) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            self.on_step(asked.number, event)
            if isinstance(event, Evaluated):
                asked.trial.set_user_attr(STEPS, event.step)
                if event.step < steps:
                    asked.report(event.loss, event.step // self._every(steps))

        return on_event


def share_of(host: Host, parts: int) -> Host:
    """Return the part of a host that one of several jobs may take, so that all fit side by side. GPUs are not divided."""
    if host.cpu is None or host.gpus_per_node:
        return host
    cores = max(host.cpu.usable_cores // parts, 1)
    sizes = {name: getattr(host.cpu, name) for name in ("memory_bytes", "free_memory_bytes")}
    divided = {name: size // parts for name, size in sizes.items() if size is not None}
    return host.changed(cpu=host.cpu.changed(usable_cores=cores, **divided))
