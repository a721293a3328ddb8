"""Run trials of ``upshift tune``: each shape of run is planned once, and a trial starts only if its plan fits, in its own
process.

Hold processes that trials are forked from: as many as trials run at once, each used again while it lives.

Manage the output folder of a search: one study's trials leave their models there. Only files that they wrote are deleted.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import optuna

from upshift.atomic_file import write_whole
from upshift.errors import RequestError, UpshiftError
from upshift.hardware.spec import Host
from upshift.planning.planner import find_host
from upshift.record import Record
from upshift.training.arguments import Arguments, TrainRequest
from upshift.training.checkpoint.checkpoint import check_output_directory
from upshift.training.job.server import JobServer, job_server
from upshift.training.loop.events import Evaluated, Event
from upshift.training.loop.state import OWN_FILES
from upshift.training.run import PreparedRun, prepare_run
from upshift.tuning.space import OF_RUN
from upshift.tuning.storage import in_folder, shown
from upshift.tuning.study import Asked
from upshift.value import Value


class Server(Protocol):
    @property
    def runs(self) -> bool: ...


S = TypeVar("S", bound=Server)


@dataclass
class Servers(Generic[S]):
    """A context of servers. ``one`` is called from as many threads as there are trials at once."""

    start: Callable[[], AbstractContextManager[S]]
    _all: ExitStack = field(default_factory=ExitStack)
    _free: list[S] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def one(self) -> Iterator[S]:
        """Yield a free server, or a new one. A server that died is not used again."""
        with self._lock:
            server = self._free.pop() if self._free else self._all.enter_context(self.start())
        try:
            yield server
        finally:
            if server.runs:
                self._free.append(server)

    def __enter__(self) -> Servers[S]:
        return self

    def __exit__(self, *_: object) -> None:
        self._all.close()


OWNER_NAME = "upshift_study.json"
OF_TRIAL = re.compile(r"trial-\d+")


class Owner(Value):
    study: str
    storage: str | None  # None: in the folder itself, wherever that is moved to


def owner_of(output: Path, *, storage: str | None, study_name: str) -> Owner:
    """Return the study of that name. Raise RequestError if the folder cannot be used, or holds models of another study."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"output directory {output} cannot be used: {error.strerror}; give another --output") from None
    owner = Owner(study=study_name, storage=None if storage in (None, in_folder(output)) else shown(storage))
    _check_owner(output, owner)
    return owner


def _check_owner(output: Path, owner: Owner) -> None:
    path = output / OWNER_NAME
    found = Owner.from_file(path) if path.exists() else owner
    if found != owner:
        kept = "there" if found.storage is None else f"in {found.storage}"
        raise RequestError(
            f"{output} has the models of the study {found.study!r}, kept {kept}; go on with that one, or give another --output"
        )


def claim(output: Path, owner: Owner, study: optuna.Study) -> None:
    """Take the folder for a study, before its first trial.

    Raise RequestError if it belongs to another study, or if a folder with a trial's name is not of this study."""
    there = sorted(path.name for path in output.iterdir())  # before its trials are read: other processes may begin some
    known = {trial_folder(output, trial.number).name for trial in study.get_trials(deepcopy=False)}
    foreign = [name for name in there if OF_TRIAL.fullmatch(name) and name not in known]
    if foreign:
        raise RequestError(f"{output / foreign[0]} is not of this study's trials; move it away, or give another --output")
    if OWNER_NAME not in there:
        write_whole(output / OWNER_NAME, owner.to_json())
    _check_owner(output, owner)  # two studies may have come at once


def trial_folder(output: Path, number: int) -> Path:
    return output / f"trial-{number}"


def remove(folder: Path) -> None:
    """Remove a trial's folder with its model. The folder stays if a file is in it that no trial writes."""
    if folder.is_dir():
        with suppress(RequestError, OSError):  # OSError: another process of the study removes it, too
            check_output_directory(folder, overwrite=True, resume=False, own_files=OWN_FILES)
            folder.rmdir()


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
    _planned: dict[TrainRequest, tuple[PreparedRun, int] | Exception] = field(default_factory=dict)
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

    def _prepare(self, of_run: dict[str, Any], arguments: dict[str, Any]) -> tuple[PreparedRun, int]:
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
