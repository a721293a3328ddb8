"""Describe and check a launch: the command on each host, and the number and size of the hosts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import ClassVar, Self

from pydantic import model_validator

from upshift.errors import RequestError
from upshift.value import Value

MAX_RESTARTS = 8  # of all ranks together; one killed worker can cost two, if a peer connects to the group that just ended
RENDEZVOUS_PORT = 29400  # torchrun's own default
RESUME_HINT = "the same command goes on from the newest checkpoint"
OVERWRITES = "--overwrite would delete what a restart goes on from; leave it out, or give an empty --output"
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")  # Kubernetes appends a suffix to it
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MEMORY = re.compile(r"[1-9][0-9]*[KMGT]i")
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?")


def check_port(port: int) -> None:
    """Raise RequestError if a server on several hosts would take any port."""
    if port == 0:
        raise RequestError("--port 0 takes any port, and clients must know it; give one, such as --port 8000")


class HostJob(Value):
    """The size of the hosts of a job, and what the job's file says of them."""

    image_has: ClassVar[str] = "upshift"
    name: str = "upshift"
    cpus: int | None = None  # CPUs of one host; the next two fields are of one host, too
    memory: str | None = None  # as Kubernetes writes it: 64Gi
    gpus: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    image: str | None = None  # the container's image
    node_selector: tuple[tuple[str, str], ...] = ()
    python: str = sys.executable
    folder: str = ""  # the working folder; empty: that of the scheduler

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if not _NAME.fullmatch(self.name):
            raise RequestError(f"--name {self.name!r} is not a job's name; use up to 40 of a-z, 0-9 and -, as in upshift-7b")
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            raise RequestError(f"--memory {self.memory!r} is not an amount; use a whole number of Ki, Mi, Gi or Ti, as in 64Gi")
        self._check_pairs()
        return self

    def _check_pairs(self) -> None:
        for name, _ in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise RequestError(f"--env: {name!r} is not the name of a variable; write --env NAME=VALUE")
        for key, value in self.node_selector:
            if not _LABEL.fullmatch(key) or (value and not _LABEL.fullmatch(value)):
                raise RequestError(f"--node-selector {key}={value} is not a label; write KEY=VALUE, as kubectl shows it")

    @property
    def container(self) -> str:
        """Return the image of a pod. Raise RequestError without one, or without the size of the pod."""
        needed = {
            f"--image IMAGE, a container image with {self.image_has} in it, such as example.com/image:1": self.image,
            "--cpus N": self.cpus,
            "--memory AMOUNT, as in 64Gi": self.memory,
        }
        missing = [words for words, value in needed.items() if value is None]
        if missing or self.image is None:
            raise RequestError(
                f"--kubernetes needs {'; and '.join(missing)}; cpus and memory are the pod's requests and limits, and so its own"
            )
        return self.image


class Launch(HostJob):
    """A request to start ranks on hosts, which are named or only counted.

    ``train``: the command line of the ranks, starting with the word train."""

    train: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 1
    nproc: int | None = None  # ranks of a host; None: one for each of gpus, or else the host counts its GPUs or NUMA nodes
    max_restarts: int = MAX_RESTARTS
    port: int = RENDEZVOUS_PORT

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_command()
        self._check_hosts()
        return self

    def _check_command(self) -> None:
        if self.train[:1] != ("train",):
            command = " ".join(self.train) or "nothing"
            raise RequestError(
                f"after -- comes the command of each host: got {command!r}; write -- train MODEL ..., or -- serve MODEL ..."
            )
        if "--overwrite" in self.train:
            raise RequestError(OVERWRITES)

    def _check_hosts(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            given = str(self.min_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"
            raise RequestError(f"--nodes {given} is no range; give N, or MIN:MAX with 1 <= MIN <= MAX")
        repeated = [host for host in self.hosts if self.hosts.count(host) > 1]
        if repeated or "" in self.hosts:
            problem = f"names {repeated[0]} twice" if repeated else "has an empty name"
            raise RequestError(f"--hosts {','.join(self.hosts)} {problem}; name each host once, and its ranks with --nproc")
        loopback_names = [host for host in self.hosts if address(host) in LOOPBACK]
        if len(self.hosts) > 1 and loopback_names:
            raise RequestError(
                f"--hosts: other hosts cannot reach {loopback_names[0]}; name this machine by the address that they know"
            )
        for host in self.hosts:
            if host.startswith("-") or re.search(r"\s", host):
                raise RequestError(f"--hosts: {host!r} is not the name of a host; give names or addresses, as ssh takes them")

    @property
    def nodes(self) -> str:
        """Return the number of hosts as torchrun's argument: a number, or a range."""
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"

    @property
    def has_rank_count(self) -> bool:
        """Return whether the ranks of a host are given, so that the host need not count its GPUs or NUMA nodes."""
        return self.nproc is not None or self.gpus > 0

    @property
    def ranks_per_node(self) -> int:
        """Return the ranks of a host that cannot be examined: the requested number, or one for each GPU.

        Raise RequestError if neither is given."""
        if not self.has_rank_count:
            raise RequestError(
                "--kubernetes and --ray cannot count the GPUs or the NUMA nodes of a host; give --gpus N, or --nproc N with the "
                "ranks of each host, such as --nproc 1"
            )
        return self.nproc or self.gpus

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command of a rank, without the interpreter.

        It resumes from the newest checkpoint, so that a restarted rank goes on."""
        resume = () if "--resume" in self.train else ("--resume",)
        return ("-m", "upshift.cli.main", *self.train, *resume)


def address(host: str) -> str:
    """Return a host without the user name for ssh."""
    return host.rpartition("@")[2]


def current_folder() -> str:
    return str(Path.cwd())
