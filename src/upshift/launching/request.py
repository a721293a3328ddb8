"""Describe a launch: the ranks' command, the number and size of the hosts. Check that it is possible."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Self

from pydantic import model_validator

from upshift.errors import RequestError
from upshift.value import Value

MAX_RESTARTS = 8  # of all ranks together; one killed worker can use two, when a peer connects to the world that just ended
RENDEZVOUS_PORT = 29400  # torchrun's own default
GOES_ON = "the same command goes on from the newest checkpoint"
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")  # of Kubernetes objects, with room for what is appended to it
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MEMORY = re.compile(r"[1-9][0-9]*[KMGT]i")
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?")


class Launch(Value):
    """A request to start ranks on hosts, which are named, or only counted.

    ``train``: the command line of the ranks, from the word train on."""

    train: tuple[str, ...]
    name: str = "upshift"
    hosts: tuple[str, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 1
    nproc: int | None = None  # ranks of a host; None: one for each GPU, or for each NUMA node
    cpus: int | None = None  # of a host, as are the next two
    memory: str | None = None  # as Kubernetes writes it: 64Gi
    gpus: int = 0
    max_restarts: int = MAX_RESTARTS
    environment: tuple[tuple[str, str], ...] = ()
    image: str | None = None  # of a container
    node_selector: tuple[tuple[str, str], ...] = ()
    python: str = sys.executable
    folder: str = ""  # where the ranks start; empty: where they are put
    port: int = RENDEZVOUS_PORT

    @model_validator(mode="after")
    def _reasonable(self) -> Self:
        if self.train[:1] != ("train",):
            given = " ".join(self.train) or "nothing"
            raise RequestError(f"after -- comes the ranks' command, which is train: got {given!r}; write -- train MODEL ...")
        if "--overwrite" in self.train:
            raise RequestError("--overwrite would delete what a restart goes on from; leave it out, or give an empty --output")
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise RequestError(f"--nodes {self.min_nodes}:{self.max_nodes} is no range; give N, or MIN:MAX with 1 <= MIN <= MAX")
        if not _NAME.fullmatch(self.name):
            raise RequestError(f"--name {self.name!r} is not a job's name; use up to 40 of a-z, 0-9 and -, as in upshift-7b")
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            raise RequestError(f"--memory {self.memory!r} is not an amount; use a whole number of Ki, Mi, Gi or Ti, as in 64Gi")
        twice = [host for host in self.hosts if self.hosts.count(host) > 1]
        if twice or "" in self.hosts:
            what = f"names {twice[0]} twice" if twice else "has an empty name"
            raise RequestError(f"--hosts {','.join(self.hosts)} {what}; name each host once, and its ranks with --nproc")
        own = [host for host in self.hosts if address(host) in LOOPBACK]
        if len(self.hosts) > 1 and own:
            raise RequestError(f"--hosts: other hosts cannot reach {own[0]}; name this machine by the address that they know")
        for host in self.hosts:
            if host.startswith("-") or re.search(r"\s", host):
                raise RequestError(f"--hosts: {host!r} is not the name of a host; give names or addresses, as ssh takes them")
        for name, _ in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise RequestError(f"--env: {name!r} is not the name of a variable; write --env NAME=VALUE")
        for key, value in self.node_selector:
            if not _LABEL.fullmatch(key) or (value and not _LABEL.fullmatch(value)):
                raise RequestError(f"--node-selector {key}={value} is not a label; write KEY=VALUE, as kubectl shows it")
        return self

    @property
    def nodes(self) -> str:
        """Return the number of hosts as torchrun takes it: a number, or a range."""
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"

    @property
    def ranks_of_a_node(self) -> int:
        """Return the ranks of a host if the hosts cannot be looked at: the given number, or one for each GPU, or one."""
        return self.nproc or self.gpus or 1

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command of a rank, without the interpreter.

        A rank that is started again goes on from the newest checkpoint."""
        resume = () if "--resume" in self.train else ("--resume",)
        return ("-m", "upshift.cli.main", *self.train, *resume)


def address(host: str) -> str:
    """Return a host without the user that ssh is told."""
    return host.rpartition("@")[2]


def here() -> str:
    return str(Path.cwd())
