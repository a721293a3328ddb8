"""A process that runs one copy: ``python -m upshift.training.heal.copy_process FOLDER NUMBER LIGHTHOUSE first|again``."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from pathlib import Path

import torch

from upshift.record import Record
from upshift.training.data.training_data import TrainingData
from upshift.training.heal.copies import Copies, job_name, result_name
from upshift.training.job.job import record_of
from upshift.training.job.processes import main
from upshift.training.job.request import Job
from upshift.training.loop.events import OnEvent
from upshift.training.loop.loop import train
from upshift.training.loop.stop import StopRequest


def run_copy(job: Job, data: TrainingData, on_event: OnEvent, stop: StopRequest, *, copies: Copies, first: bool) -> Record:
    if job.plan.device == "cuda":
        torch.cuda.set_device(copies.number)
    if first:
        copies.open(device=job.plan.device)
    return record_of(job, data, train(job, data, on_event=on_event, stop=stop, copies=copies))


def end_with_parent() -> None:
    """Whose death closes the standard input; copies without who starts them again would wait for each other."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    copies = Copies(number, lighthouse=sys.argv[3], folder=folder)
    run = partial(run_copy, copies=copies, first=sys.argv[4] == "first")
    main(folder, run, names=(job_name(number), result_name(number)))
