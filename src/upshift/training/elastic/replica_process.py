"""Run a replica once, in a child of its fork server."""

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
    request = ReplicaRequest.from_file(path)
    replicas = ReplicaGroup(request.number, lighthouse=request.lighthouse, folder=Path(request.folder), first=request.first)
    run_from_folder(
        Path(request.folder),
        partial(run_replica, replicas=replicas),
        lambda event: answer(to_sent_event(event)),
        names=(job_name(request.number), result_name(request.number)),
    )


def run_replica(job: Job, data: TrainingData, on_event: OnEvent, stop: StopRequest, *, replicas: ReplicaGroup) -> Record:
    if job.plan.device == "cuda":
        torch.cuda.set_device(replicas.number % torch.cuda.device_count())
    if replicas.first:
        replicas.open(device=job.plan.device)
    return make_record(job, data, train(job, data, on_event=on_event, stop=stop, copies=replicas))
