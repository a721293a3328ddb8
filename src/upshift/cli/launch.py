"""Run ``upshift launch``: start the ranks of a training on several hosts, from here or by the scheduler of a cluster."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from upshift.atomic_file import write_whole
from upshift.cli import tables
from upshift.cli.options import command_line_options
from upshift.errors import RequestError
from upshift.launching import hosts, kubernetes, mpi, ray, slurm
from upshift.launching.request import MAX_RESTARTS, RENDEZVOUS_PORT, Launch, current_folder

FILES = {  # by launcher: the default of --output, and the command that submits the file
    "slurm": ("upshift.sbatch", "sbatch {}"),
    "kubernetes": ("upshift.yaml", "kubectl apply -f {}"),
    "ray": ("upshift_ray.py", "ray job submit -- python {}"),
    "mpi": (None, "bash {}"),
    "hosts": (None, "bash {}"),
}
USED_BY = {  # the launchers that use an option, if not all do
    "image": ("kubernetes",), "node_selector": ("kubernetes",), "kind": ("kubernetes",),
    "partition": ("slurm",), "hours": ("slurm",), "memory": ("slurm", "kubernetes"),
    "cpus": ("slurm", "kubernetes", "mpi", "ray"), "port": ("hosts", "slurm", "mpi"),
    "name": ("hosts", "slurm", "kubernetes", "ray"), "max_restarts": ("hosts", "slurm", "kubernetes", "ray"),
}  # fmt: skip
OF_FIXED_SIZE = ("mpi", "ray")  # launchers whose jobs have a fixed number of hosts
IMAGE_PYTHON = "python"  # the interpreter in a container

Train = Annotated[list[str] | None, typer.Argument(metavar="-- train MODEL ...", help="the command of the ranks")]
Hosts = Annotated[str | None, typer.Option("--hosts", help="a,b,c: run torchrun on each, by ssh; localhost: on this machine")]
Slurm = Annotated[bool, typer.Option("--slurm", help="write a file for sbatch")]
Kubernetes = Annotated[bool, typer.Option("--kubernetes", help="write a PyTorchJob or TrainJob of Kubeflow")]
Mpi = Annotated[bool, typer.Option("--mpi", help="run by Open MPI's mpirun, on --hosts or here")]
Ray = Annotated[bool, typer.Option("--ray", help="write a Ray Train job")]
Kind = Annotated[str, typer.Option("--kind", help=f"of the Kubernetes object: {', '.join(kubernetes.KINDS)}")]
Nodes = Annotated[str | None, typer.Option("--nodes", help="hosts: N, or MIN:MAX where a run may go on with fewer")]
Nproc = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="ranks of a host; default: its GPUs, or its NUMA nodes where it can be looked at, or 1"),
]
Cpus = Annotated[int | None, typer.Option("--cpus", min=1, help="of a host")]
Memory = Annotated[str | None, typer.Option("--memory", help="of a host, such as 64Gi")]
Gpus = Annotated[int, typer.Option("--gpus", min=0, help="of a host")]
MaxRestarts = Annotated[int, typer.Option("--max-restarts", min=0, help="of all ranks, from the newest checkpoint")]
Env = Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE for the ranks (repeatable)")]
Image = Annotated[str | None, typer.Option("--image", help="of the container, for --kubernetes")]
NodeSelector = Annotated[list[str] | None, typer.Option("--node-selector", help="KEY=VALUE of Kubernetes nodes (repeatable)")]
Partition = Annotated[str | None, typer.Option("--partition", help="of --slurm")]
Hours = Annotated[float | None, typer.Option("--hours", min=0.01, help="limit of --slurm")]
Name = Annotated[str, typer.Option("--name", help="of the job")]
Port = Annotated[int, typer.Option("--port", min=1, max=65535, help="where the hosts meet, on the first")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print what would be run or written")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="write the file, or the script, here")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="an existing file that is not what would be written")]


def command(
    context: typer.Context, train: Train = None, hosts_: Hosts = None, slurm_: Slurm = False, kubernetes_: Kubernetes = False,
    mpi_: Mpi = False, ray_: Ray = False, kind: Kind = kubernetes.KINDS[0], nodes: Nodes = None, nproc: Nproc = None,
    cpus: Cpus = None, memory: Memory = None, gpus: Gpus = 0, max_restarts: MaxRestarts = MAX_RESTARTS, env: Env = None,
    image: Image = None, node_selector: NodeSelector = None, partition: Partition = None, hours: Hours = None,
    name: Name = "upshift", port: Port = RENDEZVOUS_PORT, dry_run: DryRun = False, output: Output = None,
    overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Start `upshift train` on several hosts, or write the job file that does; everything after -- is the ranks' command."""
    chosen = {"slurm": slurm_, "kubernetes": kubernetes_, "mpi": mpi_, "ray": ray_}
    launcher = _choose_launcher([key for key, is_chosen in chosen.items() if is_chosen], hosts_)
    host_names = tuple(hosts_.split(",")) if hosts_ is not None else ()
    _check_used(launcher, command_line_options(context), host_names)
    min_nodes, max_nodes = _node_range(nodes, host_names, launcher)
    in_image = launcher == "kubernetes"
    folder = "" if in_image or launcher == "ray" else current_folder()
    launch = Launch(
        train=tuple(train or ()), name=name, hosts=host_names, min_nodes=min_nodes, max_nodes=max_nodes, nproc=nproc, cpus=cpus,
        memory=memory, gpus=gpus, max_restarts=max_restarts, environment=_pairs("--env", env), image=image,
        node_selector=_pairs("--node-selector", node_selector), port=port, folder=folder,
        python=IMAGE_PYTHON if in_image else sys.executable,
    )  # fmt: skip
    writers = {
        "slurm": lambda: slurm.sbatch_file(launch, hours=hours, partition=partition),
        "kubernetes": lambda: kubernetes.manifest(launch, kind),
        "mpi": lambda: mpi.mpi_script(launch),
        "ray": lambda: ray.ray_file(launch),
        "hosts": lambda: hosts.launch_script(launch),
    }
    text = writers[launcher]()
    default, submit = FILES[launcher]
    path = output or (Path(default) if default else None)
    if dry_run:
        sys.stdout.write(text)
    elif path is not None:
        _write_file(path, text, overwrite=overwrite)
        tables.out.print(f"Wrote {path}; submit it with: {submit.format(path)}", highlight=False, soft_wrap=True)
    elif launcher == "mpi":
        mpi.run(launch)
    else:
        hosts.run(launch)


def _choose_launcher(chosen: list[str], host_list: str | None) -> str:
    """Return the launcher that the options name. Raise RequestError unless it is exactly one."""
    if host_list is not None and chosen not in ([], ["mpi"]):
        raise RequestError(f"--hosts names hosts, and --{chosen[0]} finds them itself; leave one of them out")
    if len(chosen) > 1 or (not chosen and host_list is None):
        options = ", ".join(f"--{name}" for name in chosen) or "nothing"
        raise RequestError(f"one starts the ranks, got {options}; use one of --hosts a,b, --slurm, --kubernetes, --mpi, --ray")
    return chosen[0] if chosen else "hosts"


def _check_used(launcher: str, options: Mapping[str, str], host_names: tuple[str, ...]) -> None:
    unused = next((name for name in USED_BY if name in options and launcher not in USED_BY[name]), None)
    if unused is not None:
        users = ", ".join(f"--{name}" for name in USED_BY[unused])
        raise RequestError(f"{options[unused]} is of {users}, and --{launcher} does not use it; leave it out")
    if "port" in options and launcher == "hosts" and host_names == ("localhost",):
        raise RequestError("--port is where several hosts meet, and localhost is one; leave it out")


def _node_range(nodes: str | None, host_names: tuple[str, ...], launcher: str) -> tuple[int, int]:
    """Return the fewest and the most hosts that the job may have."""
    if nodes is None:
        return max(len(host_names), 1), max(len(host_names), 1)
    if not re.fullmatch(r"[0-9]+(:[0-9]+)?", nodes):
        raise RequestError(f"--nodes {nodes!r} is not a number of hosts; give N, or MIN:MAX")
    minimum, _, maximum = nodes.partition(":")
    min_nodes = int(minimum)
    max_nodes = int(maximum or minimum)
    num_named = len(host_names)
    if launcher == "mpi" and not host_names:
        raise RequestError(f"--nodes {nodes} of --mpi are not named; use --hosts a,b for them, or leave it out to run here")
    if launcher in OF_FIXED_SIZE and min_nodes != max_nodes:
        raise RequestError(f"--{launcher} starts a fixed number of hosts, not {nodes}; use --nodes {max_nodes}")
    if host_names and max_nodes != num_named:
        raise RequestError(f"--nodes {nodes} is not the {num_named} of --hosts; give --nodes MIN:{num_named}, or leave it out")
    return min_nodes, max_nodes


def _pairs(option: str, texts: list[str] | None) -> tuple[tuple[str, str], ...]:
    pairs = [text.partition("=") for text in texts or ()]
    for name, sign, value in pairs:
        if not (name and sign):
            raise RequestError(f"{option} {name + sign + value!r} is not a pair; write {option} NAME=VALUE")
    return tuple((name, value) for name, _, value in pairs)


def _write_file(path: Path, text: str, *, overwrite: bool) -> None:
    try:
        if path.is_file() and not overwrite and path.read_bytes() != text.encode():
            raise RequestError(f"{path} exists, and is not what would be written; give another --output, or --overwrite")
        write_whole(path, text)
    except OSError as error:
        raise RequestError(f"--output {path} cannot be written: {error.strerror}; give another path") from None
