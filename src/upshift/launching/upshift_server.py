"""Write the files that start ``upshift serve`` on hosts: a Deployment with a Service on Kubernetes, or a Slurm job.

Each host has the whole model, in one or several replicas. Behind the Service, clients see one address.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from upshift.errors import RequestError
from upshift.launching.kubeflow import as_yaml, resource_lines, selector_lines, variable_lines
from upshift.launching.request import HostJob, check_port
from upshift.launching.slurm import folder_lines, size_directives

START_PROBES = 180  # of 10 s each: a first start reads the model and races the engines
STOP_SECONDS = 60  # a stopping server answers its requests for up to 30 s
ALL_ADDRESSES = "0.0.0.0"


class ServerJob(HostJob):
    """A request to start the same server on each of several hosts.

    ``serve``: the command line, starting with the word serve. ``port``: the port that it listens on, with HTTPS if
    ``is_encrypted``. ``num_devices``: the GPUs that it takes on a host."""

    serve: tuple[str, ...]
    port: int
    is_encrypted: bool = False
    nodes: int = 1
    num_devices: int = 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_port(self.port)
        if self.gpus and self.num_devices > self.gpus:
            raise RequestError(
                f"the server takes {self.num_devices} GPUs of a host, and --gpus gives {self.gpus}; give more, fewer --replicas, "
                "or smaller degrees of --engine-set"
            )
        return self

    def command(self, python: str) -> list[str]:
        """Return the command of a host."""
        listens = [] if any(word.partition("=")[0] == "--host" for word in self.serve) else ["--host", ALL_ADDRESSES]
        return [python, "-m", "upshift.cli.main", *self.serve, *listens]


def deployment(job: ServerJob) -> str:
    """Return the YAML file of a Deployment and its Service."""
    scheme = "HTTPS" if job.is_encrypted else "HTTP"
    probe = f'httpGet: {{path: "/health", port: {job.port}, scheme: {scheme}}}'
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(job.port), "prometheus.io/path": "/metrics"}
    return f"""\
# Written by `upshift launch --kubernetes`; start it with: kubectl apply -f THIS_FILE
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {as_yaml(job.name)}
spec:
  replicas: {job.nodes}  # pods, each with the whole model
  selector:
    matchLabels: {as_yaml({"app": job.name})}
  template:
    metadata:
      labels: {as_yaml({"app": job.name})}
      annotations: {as_yaml(annotations)}
    spec:
{selector_lines(job, " " * 6)}\
      terminationGracePeriodSeconds: {STOP_SECONDS}  # a pod that stops answers its requests first
      containers:
        - name: "server"
          image: {as_yaml(job.container)}
          command: {as_yaml(job.command(job.python))}
{variable_lines(job.environment, " " * 10)}\
          ports:
            - {{name: "http", containerPort: {job.port}}}
          startupProbe:  # it listens when its models are ready; the first start races the engines
            {probe}
            periodSeconds: 10
            failureThreshold: {START_PROBES}
          readinessProbe:
            {probe}
            periodSeconds: 5
          livenessProbe:  # the server itself restarts an engine that dies
            {probe}
            periodSeconds: 10
            failureThreshold: 6
          resources:
{resource_lines(job, " " * 12)}\
          volumeMounts:
            - {{name: "shm", mountPath: "/dev/shm"}}
      volumes:
        - name: "shm"  # the ranks of an engine exchange through it; the default of 64 MiB is too small
          emptyDir: {{medium: "Memory"}}
---
apiVersion: v1
kind: Service
metadata:
  name: {as_yaml(job.name)}
spec:
  selector: {as_yaml({"app": job.name})}
  ports:
    - {{name: "http", port: {job.port}, targetPort: "http"}}
"""


def sbatch_file(job: ServerJob, *, hours: float | None = None, partition: str | None = None) -> str:
    """Return a file for sbatch that starts a server on each node, and prints their addresses."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.environment]
    lines: Sequence[str] = (
        *size_directives(job, str(job.nodes), hours, partition),
        "#SBATCH --output=%x-%j.log",
        "",
        "set -euo pipefail",
        *folder_lines(job),
        *exports,
        f'for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do echo "$node:{job.port}"; done  # for clients',
        "",
        "# --kill-on-bad-exit=0: the servers of other nodes go on when one ends. srun hands a signal on to all of them.",
        f"exec srun --ntasks-per-node=1 --kill-on-bad-exit=0 {shlex.join(job.command(job.python))}",
    )
    return "\n".join(lines) + "\n"
