"""Write Kubeflow objects: a PyTorchJob (training operator), which may be elastic, or a TrainJob (trainer v2), of a fixed size.

The YAML is written as text, so that it has comments. Every value in it is JSON, which is valid YAML.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from upshift.errors import RequestError
from upshift.launching.request import HostJob, Launch

KINDS = ("PyTorchJob", "TrainJob")
RUNTIME = "torch-distributed"  # the runtime that Kubeflow's trainer installs


def manifest(launch: Launch, kind: str) -> str:
    """Return the YAML file of a job. Raise RequestError for options that it lacks, and for an unknown kind."""
    image = launch.container
    if kind == "PyTorchJob":
        return _pytorch_job(launch, image=image)
    if kind == "TrainJob":
        return _train_job(launch, image=image)
    raise RequestError(f"--kind {kind!r} is no kind of job; use one of {', '.join(KINDS)}")


def _pytorch_job(launch: Launch, *, image: str) -> str:
    return f"""\
# Written by `upshift launch --kubernetes`; submit it with: kubectl apply -f THIS_FILE
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {as_yaml(launch.name)}
spec:
  nprocPerNode: {as_yaml(str(launch.ranks_per_node))}  # ranks of a pod
  elasticPolicy:  # the operator tells torchrun where the pods meet, by variables that begin with PET_
    rdzvBackend: "c10d"
    minReplicas: {launch.min_nodes}  # fewer pods wait; more join when they can
    maxReplicas: {launch.max_nodes}
    maxRestarts: {launch.max_restarts}
  runPolicy:
    cleanPodPolicy: "None"  # keep the pods' logs
  pytorchReplicaSpecs:
    Worker:
      replicas: {launch.max_nodes}
      restartPolicy: "OnFailure"  # it goes on from the newest checkpoint, which must lie on a volume that all pods see
      template:
        spec:
{selector_lines(launch, " " * 10)}\
          containers:
            - name: "pytorch"  # the operator looks for this name
              image: {as_yaml(image)}
              command: {as_yaml(["python", "-m", "torch.distributed.run", *launch.command])}
{_env(launch, " " * 14)}\
              resources:
{resource_lines(launch, " " * 16)}\
              volumeMounts:
                - {{name: "shm", mountPath: "/dev/shm"}}
          volumes:
            - name: "shm"  # ranks of a pod, and loaders of data, exchange through it; the default of 64 MiB is too small
              emptyDir: {{medium: "Memory"}}
"""


def _train_job(launch: Launch, *, image: str) -> str:
    if launch.min_nodes != launch.max_nodes:
        raise RequestError(
            f"a TrainJob has a fixed number of nodes, not {launch.nodes}; use --nodes {launch.max_nodes}, or --kind PyTorchJob"
        )
    return f"""\
# Written by `upshift launch --kubernetes --kind TrainJob`; submit it with: kubectl apply -f THIS_FILE
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {as_yaml(launch.name)}
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: ClusterTrainingRuntime
    name: {as_yaml(RUNTIME)}
  trainer:
    image: {as_yaml(image)}
    numNodes: {launch.max_nodes}
    numProcPerNode: {launch.ranks_per_node}  # ranks of a pod
    # The runtime tells torchrun where the pods meet, by variables that begin with PET_.
    command: {as_yaml(["python", "-m", "torch.distributed.run", f"--max-restarts={launch.max_restarts}", *launch.command])}
{_env(launch, " " * 4)}\
    resourcesPerNode:
{resource_lines(launch, " " * 6)}\
  runtimePatches:
    - manager: "upshift.dev/launch"
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: "node"  # of the runtime
                template:
                  spec:
                    template:
                      spec:
{selector_lines(launch, " " * 24)}\
                        containers:
                          - name: "node"
                            volumeMounts:
                              - {{name: "shm", mountPath: "/dev/shm"}}
                        volumes:
                          - name: "shm"  # ranks of a pod, and loaders of data, exchange through it; 64 MiB are too small
                            emptyDir: {{medium: "Memory"}}
"""


def as_yaml(value: object) -> str:
    """Return a value as JSON, which is valid YAML."""
    return json.dumps(value, ensure_ascii=False)


def resource_lines(launch: HostJob, indent: str) -> str:
    """Return equal requests and limits, which make the pod "Guaranteed".

    Such a pod has its cores to itself if the kubelet's CPU manager policy is static."""
    amounts: dict[str, str] = {"cpu": str(launch.cpus), "memory": str(launch.memory)}
    if launch.gpus:
        amounts["nvidia.com/gpu"] = str(launch.gpus)
    comment = "  # as the limits: the cores are the pod's own, and it is the last to be evicted"
    return f"{indent}requests: {as_yaml(amounts)}{comment}\n{indent}limits: {as_yaml(amounts)}\n"


def _env(launch: Launch, indent: str) -> str:
    threads = ("OMP_NUM_THREADS", str(max((launch.cpus or 1) // launch.ranks_per_node, 1)))  # a rank's share of the cores
    return variable_lines((threads, *launch.environment), indent)


def variable_lines(variables: Iterable[tuple[str, str]], indent: str) -> str:
    """Return the environment variables of a container."""
    lines = [f"  - {{name: {as_yaml(name)}, value: {as_yaml(value)}}}" for name, value in variables]
    return "".join(f"{indent}{line}\n" for line in ("env:", *lines)) if lines else ""


def selector_lines(launch: HostJob, indent: str) -> str:
    """Return the labels of the nodes, or nothing."""
    if not launch.node_selector:
        return ""
    labels = "".join(f"{indent}  {as_yaml(key)}: {as_yaml(value)}\n" for key, value in launch.node_selector)
    return f"{indent}nodeSelector:\n{labels}"
