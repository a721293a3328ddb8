"""Import what upshift's own processes import, and the scripts of ranks, for the server of warm_processes.py."""

from __future__ import annotations

import importlib

import parallel_runs
import torch
from warm_processes import WarmProcesses

from upshift import fork_server
from upshift.training import job

WORKERS = (
    "upshift.benchmarking.meters", "upshift.cli.main", "upshift.inference.encoding.raced_setup",
    "upshift.inference.generation.raced_setup", "upshift.training.elastic.replica_process", "upshift.training.job.job",
    "upshift.training.job.processes", "upshift.training.job.server", "upshift.training.trials.worker", "upshift.tuning.mup_check",
    "upshift.tuning.trainer_trial",
)  # fmt: skip
THREADS = torch.get_num_threads()  # the scripts of ranks set another number

parallel_runs.import_all()
for worker in WORKERS:
    importlib.import_module(worker)


def begin(is_command: bool) -> None:
    """Let a command start processes of upshift as forks, too."""
    torch.set_num_threads(THREADS)
    if is_command:
        fork_processes(WarmProcesses.forked(begin))


def fork_processes(processes: WarmProcesses) -> None:
    """Start upshift's own processes as these for the rest of this process."""
    fork_server.subprocess = processes  # type: ignore[assignment]
    job.processes.subprocess = processes  # type: ignore[assignment]
