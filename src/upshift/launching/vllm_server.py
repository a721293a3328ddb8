"""Write the files that start vLLM's own server: a LeaderWorkerSet on Kubernetes, or an application of Ray Serve.

In a LeaderWorkerSet a group of hosts shares one model, which may be larger than a host. Ray Serve places each replica on the
GPUs of a cluster."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import model_validator

from upshift.errors import RequestError
from upshift.launching.kubeflow import as_yaml, resource_lines, selector_lines, variable_lines
from upshift.launching.request import HostJob, check_port

START_PROBES = 180  # of 10 s each: vLLM reads the model, and compiles
MASTER_PORT = 29501  # where the ranks of a group meet


class VllmJob(HostJob):
    """A request to start vLLM's server for one model.

    ``arguments``: engine arguments by vLLM's names. ``ranks``: the devices of one replica. ``nodes``: all hosts."""

    image_has: ClassVar[str] = "vLLM"
    model: str
    served_name: str
    port: int
    arguments: tuple[tuple[str, Any], ...] = ()
    ranks: int = 1
    nodes: int = 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_port(self.port)
        return self

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        if "data_parallel_size" in dict(self.arguments):
            raise RequestError(
                "--engine-set data_parallel_size is not possible here, because further hosts are further replicas; leave it out"
            )
        return self

    @property
    def group_size(self) -> int:
        """Return the hosts of one replica. Raise RequestError if its ranks, or all hosts, do not divide."""
        if self.gpus < 1:
            raise RequestError("a LeaderWorkerSet divides a model among the GPUs of several hosts; give --gpus N, of each host")
        size = math.ceil(self.ranks / self.gpus)
        if self.ranks % size or self.ranks // size != self.gpus:
            raise RequestError(
                f"tensor_parallel_size x pipeline_parallel_size is {self.ranks}, which does not fill hosts with --gpus "
                f"{self.gpus}; let it be a multiple"
            )
        if self.nodes % size:
            raise RequestError(
                f"--nodes {self.nodes} is not a multiple of the {size} hosts that {self.ranks} ranks of a model take; give "
                f"--nodes {size * math.ceil(self.nodes / size)}"
            )
        return size


def leader_worker_set(job: VllmJob) -> str:
    """Return the YAML file of a LeaderWorkerSet and its Service.

    The fields are those of its API (kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go)."""
    size = job.group_size
    meet = '--master-addr "$LWS_LEADER_ADDRESS" --node-rank "$LWS_WORKER_INDEX"'
    words = " ".join(shlex.quote(word) for word in _vllm_words(job))
    command = f"exec vllm serve {words} --nnodes {size} --master-port {MASTER_PORT} {meet}"
    port = f"--host 0.0.0.0 --port {job.port} --served-model-name {shlex.quote(job.served_name)}"
    probe = f'httpGet: {{path: "/health", port: {job.port}}}'
    return f"""\
# Written by `upshift launch --kubernetes --kind LeaderWorkerSet`; start it with: kubectl apply -f THIS_FILE
# The cluster needs the LeaderWorkerSet controller (https://lws.sigs.k8s.io), and the image vLLM 0.11 or newer.
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {as_yaml(job.name)}
spec:
  replicas: {job.nodes // size}  # groups of hosts, each with the whole model
  leaderWorkerTemplate:
    size: {size}  # hosts of a group
    restartPolicy: "RecreateGroupOnPodRestart"  # the ranks of a group start together
    leaderTemplate:
      metadata:
        labels: {as_yaml({"app": job.name, "role": "leader"})}
      spec:
{_pod(job, f"{command} {port}", probe, "        ")}
    workerTemplate:
      metadata:
        labels: {as_yaml({"app": job.name, "role": "worker"})}
      spec:
{_pod(job, f"{command} --headless", None, "        ")}
---
apiVersion: v1
kind: Service
metadata:
  name: {as_yaml(job.name)}
spec:
  selector: {as_yaml({"app": job.name, "role": "leader"})}  # only leaders answer requests
  ports:
    - {{name: "http", port: {job.port}, targetPort: {job.port}}}
"""


def _pod(job: VllmJob, command: str, probe: str | None, indent: str) -> str:
    """Return the spec of a pod. ``probe``: how Kubernetes asks a leader whether it is ready. None: a worker is not asked."""
    probes = ""
    if probe is not None:
        probes = f"""\
{indent}    ports:
{indent}      - {{name: "http", containerPort: {job.port}}}
{indent}    startupProbe:  # it listens when all ranks have loaded the model
{indent}      {probe}
{indent}      periodSeconds: 10
{indent}      failureThreshold: {START_PROBES}
{indent}    readinessProbe:
{indent}      {probe}
{indent}      periodSeconds: 5
"""
    return f"""\
{selector_lines(job, indent)}\
{indent}containers:
{indent}  - name: "vllm"
{indent}    image: {as_yaml(job.container)}
{indent}    command: {as_yaml(["sh", "-c", command])}
{variable_lines(job.environment, indent + "    ")}\
{probes}\
{indent}    resources:
{resource_lines(job, indent + "      ")}\
{indent}    volumeMounts:
{indent}      - {{name: "shm", mountPath: "/dev/shm"}}
{indent}volumes:
{indent}  - name: "shm"  # the ranks of a host exchange through it; the default of 64 MiB is too small
{indent}    emptyDir: {{medium: "Memory"}}"""


def serve_config(job: VllmJob) -> str:
    """Return the YAML config of an application of Ray Serve with OpenAI's API (ray.serve.llm), for ``serve deploy``."""
    devices = job.nodes * job.gpus
    if not devices:
        raise RequestError("Ray Serve places vLLM on GPUs; give --gpus N, of each host")
    if devices < job.ranks or devices % job.ranks:
        raise RequestError(
            f"a replica takes {job.ranks} GPUs, and --nodes {job.nodes} with --gpus {job.gpus} have {devices}; "
            "let it be a multiple"
        )
    variables = {"env_vars": dict(job.environment)} if job.environment else {}
    runtime = f"          runtime_env: {as_yaml(variables)}\n" if variables else ""
    return f"""\
# Written by `upshift launch --ray`; start it on the cluster with: serve deploy THIS_FILE
# Each host needs Ray with its extra llm, and vLLM.
http_options: {{host: "0.0.0.0", port: {job.port}}}
applications:
  - name: {as_yaml(job.name)}
    route_prefix: "/"
    import_path: "ray.serve.llm:build_openai_app"
    args:
      llm_configs:
        - model_loading_config: {as_yaml({"model_id": job.served_name, "model_source": job.model})}
          engine_kwargs: {as_yaml(dict(job.arguments))}
          deployment_config: {{num_replicas: {devices // job.ranks}}}  # each on {job.ranks} of {devices} GPUs
{runtime}"""


def check_taken(options: Mapping[str, str], launcher: str) -> None:
    """Raise RequestError with all options of ``upshift serve`` that vLLM's own server does not take. By parameter name."""
    untaken = [shown for name, shown in options.items() if name not in TAKEN]
    if untaken:
        raise RequestError(
            f"{launcher} starts vLLM's own server, which does not take {', '.join(untaken)}; leave out what is named, or use a "
            "Deployment or --slurm, which start upshift serve"
        )


TAKEN = {"models", "port", "engine", "engine_settings"}


def _vllm_words(job: VllmJob) -> list[str]:
    """Return the model and the engine arguments as words of a command line."""
    words = [job.model]
    for name, value in job.arguments:
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value is True else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words
