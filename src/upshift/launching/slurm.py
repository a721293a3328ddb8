"""Write the file that sbatch takes: one torchrun a node, which finds the others at the first node of the allocation."""

from __future__ import annotations

import shlex

from upshift.launching.request import Launch
from upshift.launching.torchrun import count_ranks, set_environment, torchrun


def sbatch_file(launch: Launch, *, hours: float | None = None, partition: str | None = None) -> str:
    flags = (
        f"--nnodes={launch.nodes}", "--rdzv-backend=c10d", '--rdzv-id="$SLURM_JOB_ID"', f'--rdzv-endpoint="$first:{launch.port}"',
        '--rdzv-conf=is_host=$(( SLURM_NODEID == 0 ))', '--local-addr="$SLURMD_NODENAME"',
    )  # fmt: skip
    lines = [
        *_directives(launch, hours, partition),
        "",
        "set -euo pipefail",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)  # where the ranks meet',
        "export first",
        *_folder(launch),
        "",
        "# On each node; of a node that is lost, the others go on where --nodes gave a range.",
        "read -r -d '' of_node <<'END' || true",
        *count_ranks(launch),
        *set_environment(launch),
        f"exec {torchrun(launch, *flags)}",
        "END",
        "",
        "# --kill-on-bad-exit=0: torchrun decides when the run is over, not the first node that fails.",
        'srun --ntasks-per-node=1 --kill-on-bad-exit=0 bash -c "$of_node"',
    ]
    return "\n".join(lines) + "\n"


def _directives(launch: Launch, hours: float | None, partition: str | None) -> list[str]:
    lowest = f"{launch.min_nodes}-" if launch.min_nodes != launch.max_nodes else ""
    cores = (
        f"#SBATCH --cpus-per-task={launch.cpus}             # of the node's torchrun, and shared by its ranks"
        if launch.cpus
        else "#SBATCH --exclusive                    # all cores of the nodes: neighbours share the memory's bandwidth"
    )
    memory = f"{launch.memory[:-1]}" if launch.memory else "0"
    wanted = {
        f"#SBATCH --gpus-per-node={launch.gpus}": launch.gpus > 0,
        f"#SBATCH --partition={shlex.quote(partition or '')}": partition is not None,
        f"#SBATCH --time={_time(hours or 0.0)}": hours is not None,
    }
    return [
        "#!/bin/bash",
        "# Written by `upshift launch --slurm`; submit it with: sbatch THIS_FILE",
        f"#SBATCH --job-name={launch.name}",
        f"#SBATCH --nodes={lowest}{launch.max_nodes}",
        "#SBATCH --ntasks-per-node=1            # one torchrun, which starts the ranks of its node",
        cores,
        f"#SBATCH --mem={memory}                      # " + ("of a node" if launch.memory else "0: all of the node's memory"),
        *(line for line, is_wanted in wanted.items() if is_wanted),
        "#SBATCH --requeue                      # started again, it goes on from the newest checkpoint",
        "#SBATCH --no-kill                      # a lost node does not end the job",
        "#SBATCH --output=%x-%j.log",
    ]


def _folder(launch: Launch) -> list[str]:
    return [f"cd {shlex.quote(launch.folder)}"] if launch.folder else []


def _time(hours: float) -> str:
    minutes = max(round(hours * 60), 1)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
