"""Run a job of several processes from a fresh Python process, which forks the ranks.

The ranks are not forks of the caller, which may have thread pools, because these do not survive a fork. The fresh process has
its own session, so that Ctrl-C reaches only the caller. The caller passes it on once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from upshift import errors, parent_process
from upshift.disk_full import FREE_SOME, disk_full_message
from upshift.errors import Interrupted, JobFailed, UpshiftError
from upshift.loading.output_lock import held_descriptors
from upshift.record import Record
from upshift.training.checkpoint.directory import still_loadable
from upshift.training.data.dataset import TrainingData, load_data
from upshift.training.data.tokenizer import load_tokenizer
from upshift.training.job.job_process import PROCESS
from upshift.training.job.request import Job
from upshift.training.loop.events import Event, OnEvent, event_from_json, event_to_json
from upshift.training.loop.signals import StopRequest
from upshift.training.rank_processes import join_processes, rank_environment

RunRank = Callable[[Job, TrainingData, OnEvent, StopRequest], Record]
JOB_NAME = "job.json"
RESULT_NAME = "result.json"
TOKENIZER_NAME = "tokenizer"


def run_in_processes(job: Job, data: TrainingData, on_event: OnEvent, *, module: str = "upshift.training.job.job") -> Record:
    """Run the job by ``module`` in a fresh process. Pass its events on, and return the record of rank 0."""
    with job_folder(job, data) as folder:
        process = subprocess.Popen(
            parent_process.command(PROCESS, module, str(folder)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=held_descriptors(Path(job.output)),
        )
        assert process.stdout is not None
        with StopRequest(on_request=partial(process.send_signal, signal.SIGINT)) as stop:
            try:
                for line in process.stdout:
                    on_event(event_from_json(line))
                process.wait()
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                process.stdout.close()
        return read_result(folder, process.returncode, interrupted=stop.requested)


@contextmanager
def job_folder(job: Job, data: TrainingData) -> Iterator[Path]:
    """Yield a temporary folder with all files that another process needs to run the job."""
    with tempfile.TemporaryDirectory(prefix="upshift-job-") as name:
        folder = Path(name)
        for path in data.folder.iterdir():
            (folder / path.name).symlink_to(path)
        (folder / JOB_NAME).write_text(job.to_json(), encoding="utf-8")
        yield folder


def read_result(folder: Path, exit_code: int, *, interrupted: bool, name: str = RESULT_NAME) -> Record:
    """Return the record that a process wrote into the folder, or raise the error that ended the job."""
    path = folder / name
    if not path.exists():
        if interrupted:
            raise Interrupted("interrupted before the first step; nothing new is saved, start again")
        raise JobFailed(f"the process that runs the job died (exit code {exit_code}); remove the cause, then --resume")
    content = json.loads(path.read_bytes())
    if "error" in content:
        raise getattr(errors, content["error"])(content["message"])
    return Record.from_json(path.read_bytes(), origin="the job's result")


def main(folder: Path, run_rank: RunRank, *, names: tuple[str, str] = (JOB_NAME, RESULT_NAME)) -> None:
    """Run the job in the fresh process. Write events as lines to standard output, and output of libraries to stderr."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write_event(event: Event) -> None:
        events.write(event_to_json(event) + "\n")
        events.flush()

    run_from_folder(folder, run_rank, write_event, names=names)


def run_from_folder(
    folder: Path, run_rank: RunRank, on_event: OnEvent, *, names: tuple[str, str] = (JOB_NAME, RESULT_NAME)
) -> None:
    """Run the job in ``folder``, and write its result there. ``names`` are the file names of the job and the result."""

    def run(job: Job) -> Record:
        data = load_data(folder)
        if rank_environment()[0] == 0 and (folder / TOKENIZER_NAME).exists():
            data = replace(data, tokenizer=load_tokenizer(folder / TOKENIZER_NAME))
        return run_rank(job, data, on_event, stop)

    job = Job.from_file(folder / names[0])
    with StopRequest(notice=False) as stop:
        try:
            result = join_processes(job.plan, run, job).to_json()
        except UpshiftError as error:
            error_class = type(error) if type(error) in (errors.RequestError, Interrupted) else JobFailed
            result = json.dumps({"error": error_class.__name__, "message": str(error)})
        except Exception as error:  # libraries raise their own classes of errors for a full disk
            reason = disk_full_message(error)
            if reason is None:
                raise
            message = f"a file could not be written ({reason}); {still_loadable(Path(job.output))}; {FREE_SOME}"
            result = json.dumps({"error": JobFailed.__name__, "message": message})
    (folder / names[1]).write_text(result, encoding="utf-8")
