"""Start the ranks by Open MPI's mpirun, which binds each rank to its cores.

There are no restarts: mpirun ends all ranks when the first one dies.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from upshift.errors import JobFailed, RequestError
from upshift.launching.request import RESUME_HINT, Launch, address


def mpi_script(launch: Launch) -> str:
    """Return a shell script that writes a host file and runs mpirun."""
    hosts = launch.hosts or ("localhost",)
    ranks = launch.ranks_per_node
    slots = f" slots={launch.ranks_per_node}"
    variables = [f"-x {name}={shlex.quote(value)}" for name, value in launch.environment]
    command = " ".join(shlex.quote(word) for word in (launch.python, *launch.command))
    cores = launch.cpus // ranks if launch.cpus else None
    binding = f"--map-by ppr:{ranks}:node:PE={cores} --bind-to core" if cores else f"--map-by ppr:{ranks}:node --bind-to none"
    lines = [
        "#!/bin/bash",
        "# Written by `upshift launch --mpi`, for Open MPI; run it with: bash THIS_FILE",
        "set -euo pipefail",
        *([f"cd {shlex.quote(launch.folder)}"] if launch.folder else []),
        "hostfile=$(mktemp)",
        "trap 'rm -f \"$hostfile\"' EXIT",
        "# slots: the ranks of a host",
        "cat > \"$hostfile\" <<'END'",
        *(f"{address(host)}{slots}" for host in hosts),
        "END",
        "",
        "# The ranks speak gloo or nccl with each other, and MPI only starts them: MASTER_ADDR is where they meet, and each",
        f"# reads its number from what mpirun says. {'PE: cores of a rank.' if cores else 'A rank takes its share of cores.'}",
        f'mpirun --hostfile "$hostfile" -n {ranks * len(hosts)} {binding} \\',
        "  " + " ".join([f"-x MASTER_ADDR={shlex.quote(address(hosts[0]))} -x MASTER_PORT={launch.port}", *variables]) + " \\",
        f"  {command}",
    ]
    return "\n".join(lines) + "\n"


def run(launch: Launch) -> None:
    """Run mpirun. Raise JobFailed if it fails."""
    if shutil.which("mpirun") is None:
        raise RequestError("--mpi needs mpirun, which is not here; install Open MPI, or write the script with --output FILE")
    with tempfile.TemporaryDirectory(prefix="upshift-mpi-") as folder:
        script = Path(folder) / "launch.sh"
        script.write_text(mpi_script(launch), encoding="utf-8")
        code = subprocess.run(["bash", str(script)], check=False).returncode
    if code:
        raise JobFailed(f"mpirun ended with exit code {code}; its words stand above; {RESUME_HINT}")
