"""Run a job whose ranks a launcher started (torchrun, mpirun, srun): rank 0 reads the data, plans, and informs the others.

Hosts share the output directory, because all ranks read the checkpoints and the tokens there. If the launcher starts the ranks
again, as many as before or not, the run continues from its newest checkpoint. The global batch and the order of the data stay;
only the plan is new. If the global batch cannot be divided by the number of ranks, some ranks wait, and may take part after the
next start.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from upshift import errors
from upshift.errors import Interrupted, JobFailed, RequestError, UpshiftError
from upshift.hardware.cluster import VisibleGpus, check_equal_gpus, join_hosts, machine_id, measure_link, with_gpus_of_all_ranks
from upshift.hardware.cpu_affinity import bind_process
from upshift.hardware.detect import find_nvml
from upshift.hardware.nvml import visible_gpus
from upshift.hardware.spec import Host
from upshift.planning.planner import find_host
from upshift.record import Record
from upshift.settings import Ranks, read_settings
from upshift.training.checkpoint.directory import SHARED_NAME, still_loadable
from upshift.training.data.dataset import TrainingData, load_data, save_data
from upshift.training.job.job import append_record, check_job, run_rank
from upshift.training.job.rendezvous import meet
from upshift.training.job.request import Job
from upshift.training.loop.events import OnEvent
from upshift.training.loop.signals import StopRequest
from upshift.training.loop.state import open_run
from upshift.training.rank_processes import join_group, lost_connection

MAX_RUN_TIME = timedelta(days=365)  # a rank that does not take part waits for the whole run
LAUNCH_NAME = "launch.json"
MakeJob = Callable[[Host, int], tuple[Job, TrainingData]]  # from the hosts and the number of processes


def is_restart(ranks: Ranks, output: Path) -> bool:
    """Return whether the same launch began the run in ``output``. Such a run is resumed, even if that was not requested."""
    path = output / SHARED_NAME / LAUNCH_NAME
    return ranks.launch is not None and path.exists() and json.loads(path.read_bytes()) == ranks.launch


def run_launched(ranks: Ranks, *, make_job: MakeJob, global_batch: int, on_event: OnEvent) -> Record | None:
    """Run the job on every rank. Return the Record on rank 0, which calls ``make_job``, and None on the others."""
    store = meet(ranks)
    host = _describe_host(store, ranks)
    if host is not None:
        store.set(f"host/{ranks.rank}", host.to_json())
    data: TrainingData | None = None
    if ranks.rank == 0:
        job, data = _send_job(store, ranks, make_job, global_batch)
    else:
        job = _receive_job(store)
    record: Record | None = None
    if ranks.rank < job.plan.num_processes:
        record = _train(store, ranks, job, data or _shared_data(job), on_event)
    if ranks.rank > 0:
        store.wait(["done"], MAX_RUN_TIME)
        store.set(f"left/{ranks.rank}", "")
        return None
    shutil.rmtree(Path(job.output) / SHARED_NAME)
    store.set("done", "")
    store.wait([f"left/{rank}" for rank in range(1, ranks.size)])  # the store is in this process
    if record is not None:
        append_record(record)
    return record


def _send_job(store: Store, ranks: Ranks, make_job: MakeJob, global_batch: int) -> tuple[Job, TrainingData]:
    """Make the job on rank 0 and send it to the other ranks, or the class of an error, which is raised."""
    try:
        host, processes = _join_hosts(store, ranks, global_batch)
        job, data = make_job(host, processes)
        check_job(job, data)
        job = open_run(job, data)
        _share_data(data, Path(job.output), ranks)
    except UpshiftError as error:
        kind = type(error) if type(error) in (RequestError, Interrupted) else JobFailed
        store.set("job", json.dumps({"error": kind.__name__}))
        raise
    store.set("job", job.to_json())
    return job, data


def _receive_job(store: Store) -> Job:
    """Return the job from rank 0. If rank 0 failed, raise its error without a message, because rank 0 prints the message."""
    message = store.get("job")
    content = json.loads(message)
    if "error" in content:
        raise getattr(errors, content["error"])("")
    return Job.from_json(message, origin="rank 0")


def _describe_host(store: Store, ranks: Ranks) -> Host | None:
    """Return the host, with its measured link to the others, on the first rank of each host. Return None on other ranks."""
    store.set(f"local/{ranks.rank}", str(ranks.local_rank))
    gpus = visible_gpus(find_nvml(), read_settings().cuda_visible_devices)
    store.set(f"gpus/{ranks.rank}", VisibleGpus(machine=machine_id(), gpus=gpus).to_json())
    first_ranks = _first_ranks(store, ranks)
    if ranks.rank not in first_ranks:
        return None
    host = with_gpus_of_all_ranks(find_host(None), _gpus_of_ranks(store, ranks))
    if len(first_ranks) > 1:
        dist.init_process_group(
            "gloo", store=PrefixStore("hosts", store), rank=first_ranks.index(ranks.rank), world_size=len(first_ranks)
        )
        host = host.changed(inter_node=measure_link())
        dist.barrier()
        dist.destroy_process_group()
    return host


def _gpus_of_ranks(store: Store, ranks: Ranks) -> list[VisibleGpus]:
    return [VisibleGpus.from_json(store.get(f"gpus/{rank}"), origin=f"rank {rank}") for rank in range(ranks.size)]


def _first_ranks(store: Store, ranks: Ranks) -> list[int]:
    """Return the first rank of each host."""
    return [rank for rank in range(ranks.size) if store.get(f"local/{rank}") == b"0"]


def _join_hosts(store: Store, ranks: Ranks, global_batch: int) -> tuple[Host, int]:
    """Return the hosts of all ranks as one Host, and the number of processes that the job may have."""
    check_equal_gpus(_gpus_of_ranks(store, ranks))
    hosts = [Host.from_json(store.get(f"host/{rank}"), origin=f"rank {rank}") for rank in _first_ranks(store, ranks)]
    joined_hosts = join_hosts(hosts, hosts[0].inter_node)
    if joined_hosts.gpus_per_node:
        if ranks.size != joined_hosts.num_devices:
            raise RequestError(
                f"{ranks.size} ranks on {len(hosts)} hosts with {joined_hosts.gpus_per_node} GPUs each; start one rank for each"
            )
        return joined_hosts, ranks.size
    processes = next(count for count in range(ranks.size, 0, -1) if global_batch % count == 0)
    if processes % len(hosts):  # some ranks wait: plan for the others as if they were on one host
        return hosts[0].changed(inter_node=None), processes
    return joined_hosts, processes


def _share_data(data: TrainingData, output: Path, ranks: Ranks) -> None:
    """Write the data and the launch into the output directory, where the other ranks read them."""
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
        torch.cuda.set_device(ranks.local_rank % torch.cuda.device_count())  # under Slurm each rank may see only one device
    elif job.plan.num_processes == ranks.size:
        bind_process(ranks.local_rank, ranks.local_size)
    try:
        with StopRequest(notice=ranks.rank == 0) as stop:
            if job.plan.num_processes == 1:
                return run_rank(job, data, on_event, stop)
            with join_group(job.plan, ranks.rank, store=PrefixStore("group", store)):
                return run_rank(job, data, on_event, stop)
    except Interrupted as error:
        raise Interrupted(str(error) if ranks.rank == 0 else "") from None
    except UpshiftError as error:
        raise type(error)(str(error) if ranks.rank == 0 else f"rank {ranks.rank}: {error}") from error
    except RuntimeError as error:
        if not lost_connection(error):
            raise
        raise JobFailed(
            f"rank {ranks.rank} of {job.plan.num_processes} lost another one; {still_loadable(Path(job.output))}"
        ) from error
