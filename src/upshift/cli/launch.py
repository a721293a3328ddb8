"""Run ``upshift launch``: start a training or a server on several hosts, from here or by the scheduler of a cluster."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from upshift.atomic_file import write_whole
from upshift.cli import serve as serve_command
from upshift.cli import tables
from upshift.cli import train as train_command
from upshift.cli.options import Overwrite, argument, command_line_options, option, read_settings_of
from upshift.cli.usage.help_page import Panel
from upshift.errors import RequestError
from upshift.inference.engine_environment import read_arguments
from upshift.launching import hosts, kubeflow, mpi, ray, slurm, upshift_server, vllm_server
from upshift.launching.request import MAX_RESTARTS, OVERWRITES, RENDEZVOUS_PORT, Launch, current_folder
from upshift.text import join_names

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
SERVERS = ("slurm", "kubernetes", "ray")  # the launchers that start servers
OF_TRAININGS = ("nproc", "max_restarts", "port")  # options that only trainings use
GROUPS = "LeaderWorkerSet"  # the kind of object whose hosts share a model
KINDS = (*kubeflow.KINDS, GROUPS)
RAY_SERVE = ("upshift_serve.yaml", "serve deploy {}")  # as FILES, of a server
OF_FIXED_SIZE = ("mpi", "ray")  # launchers whose jobs have a fixed number of hosts
IMAGE_PYTHON = "python"  # the interpreter in a container

Train = Annotated[
    list[str] | None,
    argument(
        "-- train MODEL ...", "The command of each host, after --: train MODEL ..., or serve MODEL ...", panel=Panel.LAUNCHER
    ),
]
Hosts = Annotated[
    str | None,
    option(
        "--hosts", text="Start torchrun on each of these hosts by ssh. localhost is this machine.", panel=Panel.LAUNCHER,
        metavar="HOST,HOST",
    ),
]  # fmt: skip
Slurm = Annotated[bool, option("--slurm", text="Write a job file for Slurm (sbatch).", panel=Panel.LAUNCHER)]
Kubernetes = Annotated[bool, option("--kubernetes", text="Write a job file for Kubeflow on Kubernetes.", panel=Panel.LAUNCHER)]
Mpi = Annotated[bool, option("--mpi", text="Start the ranks with Open MPI, on --hosts or here.", panel=Panel.LAUNCHER)]
Ray = Annotated[bool, option("--ray", text="Write a job file for Ray Train.", panel=Panel.LAUNCHER)]
Kind = Annotated[
    str | None,
    option(
        "--kind", text="With --kubernetes: the kind of the object. A LeaderWorkerSet serves one model with several hosts",
        panel=Panel.JOB, metavar="NAME", default="PyTorchJob, or a Deployment", choices=KINDS,
    ),
]  # fmt: skip
Nodes = Annotated[
    str | None,
    option(
        "--nodes", text="The number of hosts, or MIN:MAX if the run may continue with fewer.", panel=Panel.PLAN, metavar="N",
        default="those of --hosts, or 1",
    ),
]  # fmt: skip
Nproc = Annotated[
    int | None,
    option(
        "--nproc", text="Ranks on each host.", panel=Panel.PLAN, metavar="N", default="one for each GPU or NUMA node",
        least=1,
    ),
]  # fmt: skip
Cpus = Annotated[
    int | None, option("--cpus", text="CPU cores of each host.", panel=Panel.PLAN, metavar="N", default="all", least=1)
]
Memory = Annotated[
    str | None, option("--memory", text="The memory of each host, such as 64Gi.", panel=Panel.PLAN, metavar="SIZE")
]
Gpus = Annotated[int, option("--gpus", text="GPUs of each host.", panel=Panel.PLAN, metavar="N", least=0)]
MaxRestarts = Annotated[
    int,
    option(
        "--max-restarts", text="How often all ranks may start again from the newest checkpoint.", panel=Panel.PLAN, metavar="N",
        least=0,
    ),
]  # fmt: skip
Env = Annotated[
    list[str] | None,
    option("--env", text="An environment variable for the ranks.", panel=Panel.JOB, metavar="NAME=VALUE"),
]
Image = Annotated[
    str | None, option("--image", text="With --kubernetes: the image of the container.", panel=Panel.JOB, metavar="NAME")
]
NodeSelector = Annotated[
    list[str] | None,
    option("--node-selector", text="With --kubernetes: a label of the nodes.", panel=Panel.JOB, metavar="KEY=VALUE"),
]
Partition = Annotated[str | None, option("--partition", text="With --slurm: the partition.", panel=Panel.JOB, metavar="NAME")]
Hours = Annotated[
    float | None,
    option(
        "--hours",
        text="With --slurm: the time limit of the job, in hours.",
        panel=Panel.JOB,
        metavar="HOURS",
        default="that of the partition",
        least=0.01,
    ),
]
Name = Annotated[str, option("--name", text="The name of the job.", panel=Panel.JOB, metavar="NAME")]
Port = Annotated[
    int,
    option(
        "--port", text="The port of the first host, where the hosts meet.", panel=Panel.JOB, metavar="N", least=1, most=65535
    ),
]  # fmt: skip
DryRun = Annotated[bool, option("--dry-run", text="Print what would be run or written.", panel=Panel.OUTPUT)]
Output = Annotated[
    Path | None,
    option(
        "--output", "-o", text="The file to write.", panel=Panel.OUTPUT, metavar="PATH", default="a name that fits the launcher"
    ),
]  # fmt: skip


def command(
    context: typer.Context, train: Train = None, hosts_: Hosts = None, slurm_: Slurm = False, kubernetes_: Kubernetes = False,
    mpi_: Mpi = False, ray_: Ray = False, kind: Kind = None, nodes: Nodes = None, nproc: Nproc = None,
    cpus: Cpus = None, memory: Memory = None, gpus: Gpus = 0, max_restarts: MaxRestarts = MAX_RESTARTS, env: Env = None,
    image: Image = None, node_selector: NodeSelector = None, partition: Partition = None, hours: Hours = None,
    name: Name = "upshift", port: Port = RENDEZVOUS_PORT, dry_run: DryRun = False, output: Output = None,
    overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Start a training or a server on several hosts, or write the job file that starts it. Its command stands after --."""
    chosen = {"slurm": slurm_, "kubernetes": kubernetes_, "mpi": mpi_, "ray": ray_}
    launcher = _choose_launcher([key for key, is_chosen in chosen.items() if is_chosen], hosts_)
    host_names = tuple(hosts_.split(",")) if hosts_ is not None else ()
    _check_used(launcher, command_line_options(context), host_names)
    min_nodes, max_nodes = _node_range(nodes, host_names, launcher)
    fields = {
        "name": name, "cpus": cpus, "memory": memory, "gpus": gpus, "environment": _pairs("--env", env), "image": image,
        "node_selector": _pairs("--node-selector", node_selector),
    }  # fmt: skip
    if train and train[0] == "serve":
        _check_serves(launcher, command_line_options(context), nodes, kind)
        fields["nodes"] = max_nodes
        if launcher == "ray" or kind == GROUPS:
            text = _vllm_file(launcher, train, fields)
        else:
            text = _server_file(launcher, train, fields, hours=hours, partition=partition)
        file = RAY_SERVE if launcher == "ray" else FILES[launcher]
        _write_or_print(text, file, output, dry_run=dry_run, overwrite=overwrite)
        return
    if kind == GROUPS:
        raise RequestError(f"--kind {GROUPS} is for servers, and the command after -- is no serve; leave it out")
    if train and train[0] == "train":
        options = train_command.parse(train[1:])  # a wrong option would stop the job only when it starts
        if options["overwrite"]:  # of the words, or of the file of --config
            raise RequestError(OVERWRITES)
        train = ["train", *train_command.expand(train[1:])]
    in_image = launcher == "kubernetes"
    folder = "" if in_image or launcher == "ray" else current_folder()
    launch = Launch(
        train=tuple(train or ()), hosts=host_names, min_nodes=min_nodes, max_nodes=max_nodes, nproc=nproc,
        max_restarts=max_restarts, port=port, folder=folder, python=IMAGE_PYTHON if in_image else sys.executable, **fields,
    )  # fmt: skip
    writers = {
        "slurm": lambda: slurm.sbatch_file(launch, hours=hours, partition=partition),
        "kubernetes": lambda: kubeflow.manifest(launch, kind or kubeflow.KINDS[0]),
        "mpi": lambda: mpi.mpi_script(launch),
        "ray": lambda: ray.ray_file(launch),
        "hosts": lambda: hosts.launch_script(launch),
    }
    if _write_or_print(writers[launcher](), FILES[launcher], output, dry_run=dry_run, overwrite=overwrite):
        return
    if launcher == "mpi":
        mpi.run(launch)
    else:
        hosts.run(launch)


def _check_serves(launcher: str, options: Mapping[str, str], nodes: str | None, kind: str | None) -> None:
    """Raise RequestError for a launcher that starts no servers, and for options of a training."""
    if launcher not in SERVERS:
        raise RequestError(
            f"--{launcher} starts trainings, and the command after -- is serve; use --slurm, --kubernetes or --ray, or start it "
            "on each host"
        )
    of_trainings = (*OF_TRAININGS, "cpus") if launcher == "ray" else OF_TRAININGS
    unused = next((options[name] for name in of_trainings if name in options), None)
    if unused is not None:
        raise RequestError(f"{unused} is for trainings, and the command after -- is serve; leave it out")
    if kind in kubeflow.KINDS:
        raise RequestError(f"--kind {kind} is for trainings, and the command after -- is serve; leave it out, or use {GROUPS}")
    if nodes is not None and ":" in nodes:
        raise RequestError(f"--nodes {nodes} is a range, and a server runs on a fixed number of hosts; give one number")


def _server_file(launcher: str, words: list[str], fields: dict[str, Any], *, hours: float | None, partition: str | None) -> str:
    """Return the file that starts servers. ``words``: the command after --. ``fields``: of the ServerJob."""
    options = serve_command.parse(words[1:]).params  # a wrong option would stop the server only when it starts
    engine_settings = read_settings_of("--engine-set", options["engine_settings"] or [], example="tensor_parallel_size=2")
    num_devices = read_arguments(engine_settings).ranks * (options["tensor_parallel"] or 1) * (options["replicas"] or 1)
    in_image = launcher == "kubernetes"
    job = upshift_server.ServerJob(
        serve=tuple(words), port=options["port"], is_encrypted=options["ssl_certfile"] is not None,
        num_devices=num_devices, folder="" if in_image else current_folder(),
        python=IMAGE_PYTHON if in_image else sys.executable, **fields,
    )  # fmt: skip
    return upshift_server.deployment(job) if in_image else upshift_server.sbatch_file(job, hours=hours, partition=partition)


def _vllm_file(launcher: str, words: list[str], fields: dict[str, Any]) -> str:
    """Return the file that starts vLLM's own server. ``words``: the command after --. ``fields``: of the VllmJob."""
    context = serve_command.parse(words[1:])
    options = context.params
    vllm_server.check_taken(command_line_options(context), "--ray" if launcher == "ray" else f"--kind {GROUPS}")
    if options["engine"] not in (None, "vllm"):
        raise RequestError(f"--engine {options['engine']} is for upshift serve, and this starts vLLM's own server; leave it out")
    settings = read_settings_of("--engine-set", options["engine_settings"] or [], example="tensor_parallel_size=2")
    arguments = read_arguments(settings)
    names = serve_command.models_by_name(options["models"])
    if len(names) != 1:
        raise RequestError(f"vLLM's own server has one model, and serve is given {len(names)}; write one launch for each")
    ((served_name, model),) = names.items()
    job = vllm_server.VllmJob(
        model=model, served_name=served_name, port=options["port"], arguments=tuple(arguments.fixed.items()),
        ranks=arguments.shards, python=IMAGE_PYTHON, **fields,
    )  # fmt: skip
    return vllm_server.serve_config(job) if launcher == "ray" else vllm_server.leader_worker_set(job)


def _write_or_print(text: str, file: tuple[str | None, str], output: Path | None, *, dry_run: bool, overwrite: bool) -> bool:
    """Print the text, or write it to the file of ``--output`` or of the launcher. Return whether either was done.

    ``file``: the launcher's of FILES."""
    default, submit = file
    path = output or (Path(default) if default else None)
    if dry_run:
        sys.stdout.write(text)
    elif path is not None:
        _write_file(path, text, overwrite=overwrite)
        tables.out.print(f"Wrote {path}; submit it with: {submit.format(path)}", highlight=False, soft_wrap=True)
    return dry_run or path is not None


def _choose_launcher(chosen: list[str], host_list: str | None) -> str:
    """Return the launcher that the options name. Raise RequestError unless it is exactly one."""
    if host_list is not None and chosen not in ([], ["mpi"]):
        raise RequestError(f"--hosts names hosts, and --{chosen[0]} finds them itself; leave one of them out")
    if len(chosen) > 1 or (not chosen and host_list is None):
        problem = f"takes one launcher, not {join_names(f'--{name}' for name in chosen)}" if chosen else "needs a launcher"
        raise RequestError(f"upshift launch {problem}; use one of --hosts a,b, --slurm, --kubernetes, --mpi, --ray")
    return chosen[0] if chosen else "hosts"


def _check_used(launcher: str, options: Mapping[str, str], host_names: tuple[str, ...]) -> None:
    unused = next((name for name in USED_BY if name in options and launcher not in USED_BY[name]), None)
    if unused is not None:
        users = ", ".join(f"--{name}" for name in USED_BY[unused])
        raise RequestError(f"{options[unused]} is of {users}, and --{launcher} does not use it; leave it out")
    if "overwrite" in options and launcher in ("hosts", "mpi") and "output" not in options:
        raise RequestError(
            "--overwrite replaces the file of --output, and no file is written; add --output PATH, or leave it out"
        )
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
