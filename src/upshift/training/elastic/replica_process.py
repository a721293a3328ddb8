"""Run one life of a copy, in a child of its fork server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from upshift.record import Record
from upshift.training.data.dataset import TrainingData
from upshift.training.elastic.replica import ReplicaGroup, ReplicaRequest, job_name, result_name
from upshift.training.job.job import make_record
from upshift.training.job.processes import run_from_folder
from upshift.training.job.request import Job
from upshift.training.loop.events import OnEvent, SentEvent, to_sent_event
from upshift.training.loop.loop import train
from upshift.training.loop.signals import StopRequest


def main(path: Path, answer: Callable[[SentEvent], None]) -> None:
    life = ReplicaRequest.from_file(path)
    copies = ReplicaGroup(life.number, lighthouse=life.lighthouse, folder=Path(life.folder), first=life.first)
    run = partial(run_copy, copies=copies)
    run_from_folder(
        Path(life.folder),
        run,
        lambda event: answer(to_sent_event(event)),
        names=(job_name(life.number), result_name(life.number)),
    )


def run_copy(job: Job, data: TrainingData, on_event: OnEvent, stop: StopRequest, *, copies: ReplicaGroup) -> Record:
    if job.plan.device == "cuda":
        torch.cuda.set_device(copies.number)
    if copies.first:
        copies.open(device=job.plan.device)
    return make_record(job, data, train(job, data, on_event=on_event, stop=stop, copies=copies))
