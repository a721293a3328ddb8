"""A run whose ranks a launcher started (torchrun, mpirun, srun): rank 0 reads the data, plans, and tells the others.

Hosts share the output directory: checkpoints are read by all, and the tokens are. Started again by the launcher, with as many
ranks as before or others, the run goes on from its newest checkpoint: the global batch and the order of the data stay, only
the plan is made anew. Ranks that the global batch does not divide among wait, to take part when the launcher starts all again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store

from upshift import errors
from upshift.errors import Interrupted, JobFailed, RequestError, UpshiftError
from upshift.hardware.detect import detect
from upshift.hardware.spec import Host, Link
from upshift.planning.planner import find_host
from upshift.record import Record
from upshift.settings import Ranks, read_settings
from upshift.training.checkpoint.files import still_loadable
from upshift.training.data.training_data import TrainingData, load_data, save_data
from upshift.training.job.job import append_record, check_job, run_rank
from upshift.training.job.meeting import meet
from upshift.training.job.request import Job
from upshift.training.loop.events import OnEvent
from upshift.training.loop.run import SHARED_NAME, open_run
from upshift.training.loop.stop import StopRequest
from upshift.training.processes import joined

LAUNCH_NAME = "launch.json"
# Between hosts, where nobody says more: the least that hosts of a cluster have.
ASSUMED = Link(name="10 Gbit/s Ethernet (assumed)", bytes_per_second=1.25e9)
MakeJob = Callable[[Host, int], tuple[Job, TrainingData]]  # of the hosts, with so many processes


def is_restart(ranks: Ranks, output: Path) -> bool:
    """Whether the same launch began the run in ``output``: then it goes on, whatever was asked for at first."""
    path = output / SHARED_NAME / LAUNCH_NAME
    return ranks.launch is not None and path.exists() and json.loads(path.read_bytes()) == ranks.launch


def run_launched(ranks: Ranks, *, make_job: MakeJob, global_batch: int, on_event: OnEvent) -> Record | None:
    """On every rank; the Record is rank 0's. ``make_job`` is called there."""
    store = meet(ranks)
    if ranks.local_rank == 0:
        store.set(f"host/{ranks.rank}", detect(visible_devices=read_settings().cuda_visible_devices).to_json())
    store.set(f"local/{ranks.rank}", str(ranks.local_rank))
    data: TrainingData | None = None
    if ranks.rank == 0:
        job, data = _tell_job(store, ranks, make_job, global_batch)
    else:
        job = _told_job(store)
    record: Record | None = None
    if ranks.rank < job.plan.num_processes:
        record = _train(store, ranks, job, data or _shared_data(job), on_event)
    if ranks.rank > 0:
        store.wait(["done"])
        store.set(f"left/{ranks.rank}", "")
        return None
    shutil.rmtree(Path(job.output) / SHARED_NAME)
    store.set("done", "")
    store.wait([f"left/{rank}" for rank in range(1, ranks.size)])  # the store is in this process
    if record is not None:
        append_record(record)
    return record


def _tell_job(store: Store, ranks: Ranks, make_job: MakeJob, global_batch: int) -> tuple[Job, TrainingData]:
    try:
        host, processes = _hosts(store, ranks, global_batch)
        job, data = make_job(host, processes)
        check_job(job, data)
        open_run(job, data.training)
        _share(data, Path(job.output), ranks)
    except UpshiftError as error:
        kind = type(error) if type(error) in (RequestError, Interrupted) else JobFailed
        store.set("job", json.dumps({"error": kind.__name__}))
        raise
    store.set("job", job.to_json())
    return job, data


def _told_job(store: Store) -> Job:
    """An error has no words here: rank 0 says them."""
    told = store.get("job")
    if "error" in (answer := json.loads(told)):
        raise getattr(errors, answer["error"])("")
    return Job.from_json(told, origin="rank 0")


def _hosts(store: Store, ranks: Ranks, global_batch: int) -> tuple[Host, int]:
    """The ranks' hosts as one Host, and how many processes the job may have there."""
    firsts = [rank for rank in range(ranks.size) if store.get(f"local/{rank}") == b"0"]
    hosts = [Host.from_json(store.get(f"host/{rank}"), origin=f"rank {rank}") for rank in firsts]
    here, nodes = find_host(None), len(hosts)
    for rank, host in zip(firsts, hosts, strict=True):
        if host.fingerprint != hosts[0].fingerprint:
            raise RequestError(
                f"the host of rank {rank} ({host.name}) is not like that of rank 0 ({hosts[0].name}); plans are of equal hosts: "
                "start the ranks on those alone"
            )
    if here.gpus_per_node:
        if ranks.size != nodes * here.gpus_per_node:
            raise RequestError(
                f"{ranks.size} ranks on {nodes} hosts with {here.gpus_per_node} GPUs each; start one rank for each GPU"
            )
        processes = ranks.size
    else:
        processes = next(n for n in range(ranks.size, 0, -1) if global_batch % n == 0)
    if nodes == 1 or processes % nodes:  # ranks wait: those that work are planned as if one host had them
        return here, processes
    return here.changed(num_nodes=nodes, inter_node=ASSUMED), processes


def _share(data: TrainingData, output: Path, ranks: Ranks) -> None:
    folder = output / SHARED_NAME
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_data(replace(data, tokenizer=None), folder)
    (folder / LAUNCH_NAME).write_text(json.dumps(ranks.launch), encoding="utf-8")


def _shared_data(job: Job) -> TrainingData:
    folder = Path(job.output) / SHARED_NAME
    if not (folder / LAUNCH_NAME).exists():
        raise RequestError(
            f"the output directory {job.output} is not that of rank 0's host; give one that all hosts share, such as on NFS"
        )
    return load_data(folder)


def _train(store: Store, ranks: Ranks, job: Job, data: TrainingData, on_event: OnEvent) -> Record:
    if job.plan.device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    try:
        with StopRequest(notice=ranks.rank == 0) as stop:
            if job.plan.num_processes == 1:
                return run_rank(job, data, on_event, stop)
            with joined(job.plan, ranks.rank, store=PrefixStore("group", store)):
                return run_rank(job, data, on_event, stop)
    except Interrupted as error:
        raise Interrupted(str(error) if ranks.rank == 0 else "") from None
    except UpshiftError as error:
        raise type(error)(str(error) if ranks.rank == 0 else f"rank {ranks.rank}: {error}") from error
    except RuntimeError as error:
        if "gloo" not in str(error):
            raise
        raise JobFailed(
            f"rank {ranks.rank} of {job.plan.num_processes} lost another one; {still_loadable(Path(job.output))}"
        ) from error
