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
from upshift.launching.torchrun import rank_count_lines


def mpi_script(launch: Launch) -> str:
    """Return a shell script that writes a host file and runs mpirun."""
    hosts = launch.hosts or ("localhost",)
    addresses = shlex.join(address(host) for host in hosts)
    variables = [f"-x {name}={shlex.quote(value)}" for name, value in launch.environment]
    command = " ".join(shlex.quote(word) for word in (launch.python, *launch.command))
    binding = '--map-by "ppr:$ranks:node" --bind-to none'
    cores = "A rank takes its share of cores."
    if launch.cpus:
        cores = "PE: cores of a rank."
        binding = f'--map-by "ppr:$ranks:node:PE=$(( {launch.cpus} > ranks ? {launch.cpus} / ranks : 1 ))" --bind-to core'
    lines = [
        "#!/bin/bash",
        "# Written by `upshift launch --mpi`, for Open MPI; run it with: bash THIS_FILE",
        "set -euo pipefail",
        *([f"cd {shlex.quote(launch.folder)}"] if launch.folder else []),
        "hostfile=$(mktemp)",
        "trap 'rm -f \"$hostfile\"' EXIT",
        *_rank_count(launch, addresses),
        f'printf "%s slots=$ranks\\n" {addresses} > "$hostfile"',
        "",
        "# The ranks speak gloo or nccl with each other, and MPI only starts them: MASTER_ADDR is where they meet, and each",
        f"# reads its number from what mpirun says. {cores}",
        f'mpirun --hostfile "$hostfile" -n $(( {len(hosts)} * ranks )) {binding} \\',
        "  " + " ".join([f"-x MASTER_ADDR={shlex.quote(address(hosts[0]))} -x MASTER_PORT={launch.port}", *variables]) + " \\",
        f"  {command}",
    ]
    return "\n".join(lines) + "\n"


def _rank_count(launch: Launch, addresses: str) -> list[str]:
    """Return the lines that set the shell's variable ``ranks``. If it is not given, each host counts, and all must agree."""
    lines = rank_count_lines(launch)
    if launch.has_rank_count:
        return lines
    return [
        f'printf "%s slots=1\\n" {addresses} > "$hostfile"',
        "read -r -d '' count <<'END' || true",
        *lines,
        'echo "ranks=$ranks"',
        "END",
        'counts=$(mpirun --hostfile "$hostfile" --map-by ppr:1:node --bind-to none bash -c "$count")',
        "ranks=$(grep -o '^ranks=[1-9][0-9]*$' <<<\"$counts\" | sort -u | cut -d= -f2 || true)",
        'if [ "$(wc -w <<<"$ranks")" -ne 1 ]; then',
        '  echo "the hosts have different numbers of GPUs or NUMA nodes:" $ranks"; write the file again with --nproc N" >&2',
        "  exit 2",
        "fi",
    ]


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
