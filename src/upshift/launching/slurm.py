"""Write a file for sbatch: one torchrun on each node. They meet at the first node of the allocation."""

from __future__ import annotations

import shlex

from upshift.launching.request import HostJob, Launch
from upshift.launching.torchrun import environment_lines, rank_count_lines, torchrun_command


def sbatch_file(launch: Launch, *, hours: float | None = None, partition: str | None = None) -> str:
    flags = (
        f"--nnodes={launch.nodes}",
        "--rdzv-backend=c10d",
        '--rdzv-id="$SLURM_JOB_ID"',
        f'--rdzv-endpoint="$first:{launch.port}"',
        "--rdzv-conf=is_host=$(( SLURM_NODEID == 0 ))",
        '--local-addr="$SLURMD_NODENAME"',
    )
    lines = [
        *_directives(launch, hours, partition),
        "",
        "set -euo pipefail",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)  # where the ranks meet',
        "export first",
        *folder_lines(launch),
        "",
        "# On each node; of a node that is lost, the others go on where --nodes gave a range.",
        "read -r -d '' of_node <<'END' || true",
        *rank_count_lines(launch),
        *environment_lines(launch),
        f"exec {torchrun_command(launch, *flags)}",
        "END",
        "",
        "# --kill-on-bad-exit=0: torchrun decides when the run is over, not the first node that fails.",
        'srun --ntasks-per-node=1 --kill-on-bad-exit=0 bash -c "$of_node"',
    ]
    return "\n".join(lines) + "\n"


def _directives(launch: Launch, hours: float | None, partition: str | None) -> list[str]:
    minimum = f"{launch.min_nodes}-" if launch.min_nodes != launch.max_nodes else ""
    return [
        *size_directives(launch, f"{minimum}{launch.max_nodes}", hours, partition),
        "#SBATCH --requeue                      # started again, it goes on from the newest checkpoint",
        "#SBATCH --no-kill                      # a lost node does not end the job",
        "#SBATCH --output=%x-%j.log",
    ]


def size_directives(launch: HostJob, nodes: str, hours: float | None, partition: str | None) -> list[str]:
    """Return the first lines of a file for sbatch: the number and the size of the nodes, with one task on each."""
    cores = "#SBATCH --exclusive                    # all cores of the nodes: neighbours share the memory's bandwidth"
    if launch.cpus:
        cores = f"#SBATCH --cpus-per-task={launch.cpus}             # of the node, and shared by its processes"
    memory = "0                      # 0: all of the node's memory"
    if launch.memory:
        memory = f"{launch.memory[:-1]}                      # of a node"
    optional_lines = {
        f"#SBATCH --gpus-per-node={launch.gpus}": launch.gpus > 0,
        f"#SBATCH --partition={shlex.quote(partition or '')}": partition is not None,
        f"#SBATCH --time={_time(hours or 0.0)}": hours is not None,
    }
    return [
        "#!/bin/bash",
        "# Written by `upshift launch --slurm`; submit it with: sbatch THIS_FILE",
        f"#SBATCH --job-name={launch.name}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1            # one process, which starts the others of its node",
        cores,
        f"#SBATCH --mem={memory}",
        *(line for line, is_used in optional_lines.items() if is_used),
    ]


def folder_lines(launch: HostJob) -> list[str]:
    """Return the line that changes to the working folder, if there is one."""
    return [f"cd {shlex.quote(launch.folder)}"] if launch.folder else []


def _time(hours: float) -> str:
    minutes = max(round(hours * 60), 1)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
