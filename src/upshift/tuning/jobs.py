"""Run the trials of ``upshift tune``, each in its own process, and manage the output folder of a study.

A pool holds the servers that trials are forked from. The output folder belongs to one study and holds the models of its trials;
only files that trials wrote are deleted. ``TrialRunner`` plans each shape of run once, and starts a trial only if its plan fits.
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
from upshift.loading.output_lock import shared_lock
from upshift.planning.planner import find_host
from upshift.record import Record
from upshift.training.arguments import Arguments, TrainRequest
from upshift.training.checkpoint.checkpoint import check_output_directory
from upshift.training.job.server import JobServer, job_server
from upshift.training.loop.events import Evaluated, Event
from upshift.training.loop.state import OWN_FILES
from upshift.training.run import PreparedRun, prepare_run
from upshift.tuning.space import RUN_FIELDS
from upshift.tuning.storage import folder_url, hide_password
from upshift.tuning.study import StudyTrial
from upshift.value import Value


class Server(Protocol):
    @property
    def runs(self) -> bool: ...


S = TypeVar("S", bound=Server)


@dataclass
class ServerPool(Generic[S]):
    """A context that owns servers. Threads that run trials at once take a server each with ``lease``."""

    start: Callable[[], AbstractContextManager[S]]
    _all: ExitStack = field(default_factory=ExitStack)
    _free: list[S] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def lease(self) -> Iterator[S]:
        """Yield a free server, or a new one. A server that died is not used again."""
        with self._lock:
            server = self._free.pop() if self._free else self._all.enter_context(self.start())
        try:
            yield server
        finally:
            if server.runs:
                self._free.append(server)

    def __enter__(self) -> ServerPool[S]:
        return self

    def __exit__(self, *_: object) -> None:
        self._all.close()


OWNER_NAME = "upshift_study.json"
LOCK_NAME = ".upshift_study.lock"
TRIAL_NAME = re.compile(r"trial-\d+")


class FolderOwner(Value):
    """The study that an output folder belongs to."""

    study: str
    storage: str | None  # None: in the folder itself, which may be moved


@contextmanager
def own_folder(output: Path, *, storage: str | None, study_name: str) -> Iterator[FolderOwner]:
    """Yield the study as owner of the folder, and keep other studies out while the context is open.

    Raise RequestError if the folder cannot be used, or has another study's models, or if another study runs there."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"output directory {output} cannot be used: {error.strerror}; give another --output") from None
    owner = FolderOwner(study=study_name, storage=None if storage in (None, folder_url(output)) else hide_password(storage))

    def take() -> None:
        if not _trial_names(output):  # the file is of a command that failed before its first trial
            write_whole(output / OWNER_NAME, owner.to_json())

    with shared_lock(output, output / LOCK_NAME, when_alone=take):
        _check_owner(output, owner)
        yield owner


def _trial_names(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir() if TRIAL_NAME.fullmatch(path.name))


def _check_owner(output: Path, owner: FolderOwner) -> None:
    path = output / OWNER_NAME
    present_owner = FolderOwner.from_file(path) if path.exists() else owner
    if present_owner != owner:
        location = "there" if present_owner.storage is None else f"in {present_owner.storage}"
        use = "has the models of" if _trial_names(output) else "is now used by"
        raise RequestError(
            f"{output} {use} the study {present_owner.study!r}, kept {location}; go on with that one, or give another --output"
        )


def claim_folder(output: Path, owner: FolderOwner, study: optuna.Study) -> None:
    """Mark a folder as the study's, which has trials and no mark.

    Raise RequestError if it has a folder ``trial-N`` that is of no trial of this study."""
    names = _trial_names(output)  # listed before the trials: other processes may begin trials
    trial_names = {trial_folder(output, trial.number).name for trial in study.get_trials(deepcopy=False)}
    foreign_names = [name for name in names if name not in trial_names]
    if foreign_names:
        raise RequestError(f"{output / foreign_names[0]} is not of this study's trials; move it away, or give another --output")
    if not (output / OWNER_NAME).exists():
        write_whole(output / OWNER_NAME, owner.to_json())


def trial_folder(output: Path, number: int) -> Path:
    return output / f"trial-{number}"


def remove_trial(folder: Path) -> None:
    """Remove a trial's folder with its model. Keep the folder if it has a file that no trial writes."""
    if folder.is_dir():
        with suppress(RequestError, OSError):  # OSError: another process of the study removes it at the same time
            check_output_directory(folder, overwrite=True, resume=False, own_files=OWN_FILES)
            folder.rmdir()


STEPS = "steps"  # attribute of a trial: the optimizer steps that it has done


@dataclass
class TrialRunner:
    """A context that runs trials.

    Up to ``at_once`` threads call ``run``. Each trial has its share of the cores and the memory."""

    request: TrainRequest  # the request of all trials, without the searched values
    output: Path
    arguments: dict[str, Any]  # fields of Arguments that all trials share
    evaluations: int
    deciding: tuple[int, ...]  # numbers of the evaluations at which a trial may end; others, but the last, are not made
    at_once: int = 1
    host: Host | None = None  # None: this machine
    on_step: Callable[[int, Event], None] = lambda number, event: None
    _planned: dict[TrainRequest, tuple[PreparedRun, int] | Exception] = field(default_factory=dict)
    _planning: threading.Lock = field(default_factory=threading.Lock)
    _servers: ServerPool[JobServer] = field(default_factory=lambda: ServerPool(job_server))

    def run(self, trial: StudyTrial, values: dict[str, Any]) -> Record:
        """Run a trial and return its record. Raise NothingFits before it starts if no plan fits, JobFailed if the run fails."""
        run_fields = {name: values[name] for name in RUN_FIELDS if name in values}
        arguments = self.arguments | {name: value for name, value in values.items() if name not in RUN_FIELDS}
        prepared, steps = self._prepare(run_fields, arguments)
        arguments |= {"max_steps": steps, "eval_steps": 0}
        of_trial = Arguments.from_fields(arguments).for_steps(steps)
        job = prepared.job(of_trial, output=self.folder(trial.number), evaluate_at_steps=self._evaluate_at(steps))
        with self._servers.lease() as server:
            return server.run(job, prepared.data, self._event_callback(trial, steps))

    def __enter__(self) -> TrialRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.__exit__()

    def folder(self, number: int) -> Path:
        return trial_folder(self.output, number)

    def _prepare(self, run_fields: dict[str, Any], arguments: dict[str, Any]) -> tuple[PreparedRun, int]:
        """Return the prepared run of a trial, and its steps. Trials of one shape share it, or the error."""
        clips = arguments.get("max_grad_norm", 1.0) > 0
        noise = 1.0 if arguments.get("neftune_noise_alpha") is not None else None  # with noise, rows are not packed
        default_arguments = Arguments(max_steps=1, max_grad_norm=1.0 if clips else 0.0, neftune_noise_alpha=noise)
        shape = {"max_steps": arguments.get("max_steps"), "arguments": default_arguments}
        request = TrainRequest.from_fields({**self.request.model_dump(), **run_fields, **shape})
        with self._planning:
            if request not in self._planned:
                try:
                    self._planned[request] = prepare_run(request, host=self._share())
                except UpshiftError as error:
                    self._planned[request] = error
        planned = self._planned[request]
        if isinstance(planned, Exception):
            raise planned.with_traceback(None)  # a traceback would keep the frames of all trials that raised it
        return planned

    def _share(self) -> Host | None:
        return self.host if self.at_once == 1 else divide_host(self.host or find_host(None), self.at_once)

    def _evaluation_interval(self, steps: int) -> int:
        return max(steps // self.evaluations, 1)

    def _evaluate_at(self, steps: int) -> tuple[int, ...]:
        """Return the steps, before the last one, at which the trial evaluates."""
        interval = self._evaluation_interval(steps)
        return tuple(number * interval for number in self.deciding if number * interval < steps)

    def _event_callback(self, trial: StudyTrial, steps: int) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            self.on_step(trial.number, event)
            if isinstance(event, Evaluated):
                trial.trial.set_user_attr(STEPS, event.step)
                if event.step < steps:
                    trial.report(event.loss, event.step // self._evaluation_interval(steps))

        return on_event


def divide_host(host: Host, num_jobs: int) -> Host:
    """Return a host with the cores and the memory for one of several jobs at once. GPUs are not divided."""
    if host.cpu is None or host.gpus_per_node:
        return host
    cores = max(host.cpu.usable_cores // num_jobs, 1)
    memory_sizes = {name: getattr(host.cpu, name) for name in ("memory_bytes", "free_memory_bytes")}
    divided = {name: size // num_jobs for name, size in memory_sizes.items() if size is not None}
    return host.changed(cpu=host.cpu.changed(usable_cores=cores, **divided))
