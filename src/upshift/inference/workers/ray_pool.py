"""Run the workers of a job as actors of a Ray cluster, which may have many hosts.

Ray places the actors and carries tasks and results. The process that gives the tasks reads and writes the files, so only it must
reach them. The model must be at the same path, or have the same hub id, on each host."""

from __future__ import annotations

import logging
import math
import os
from importlib.util import find_spec
from typing import Any, NamedTuple

from upshift.errors import JobFailed, MissingExtra, RequestError
from upshift.hardware.cpu_affinity import bind_process
from upshift.inference.workers.dispatcher import Answer, Job, Task
from upshift.inference.workers.worker import Worker

PLACE_SECONDS = 300.0  # until Ray has started an actor; other jobs may have the devices


class Place(NamedTuple):
    """The host of an actor, and the actor's process."""

    node: str
    pid: int


class RayWorker:
    """The actor of one worker."""

    def __init__(self, job: Job) -> None:
        self._worker = Worker(job)

    def find_place(self) -> Place:
        import ray

        return Place(ray.get_runtime_context().get_node_id(), os.getpid())

    def take_cores(self, number: int, count: int) -> None:
        """Bind the process to its share of the host's cores. Ray counts cores, and does not bind."""
        bind_process(number, count)

    def compute(self, task: Task) -> Answer:
        return self._worker.compute(task)


class RayPool:
    """Workers on a Ray cluster: the one that RAY_ADDRESS names or that runs here, or else a new one on this machine.

    ``size``: the number of workers. None: one for each GPU, or without GPUs for each host. ``devices``: the GPUs of each
    worker."""

    def __init__(self, job: Job, size: int | None, *, devices: int = 1) -> None:
        if find_spec("ray") is None:
            raise MissingExtra(library="ray", extra="ray", purpose="--ray")
        import ray

        self._ray: Any = ray
        self._workers: list[Any] = []
        self._places: dict[int, Place] = {}
        self._numbers: dict[int, int] = {}  # of each worker among those of its host
        self._pending: dict[Any, int] = {}  # the worker of each running task
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            ray.init(logging_level=logging.ERROR, log_to_driver=False)
        try:
            self._start_all(job, size, devices)
        except BaseException:
            self.close()
            raise

    def _start_all(self, job: Job, size: int | None, devices: int) -> None:
        nodes = {
            node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")
        }
        gpus = int(sum(node.get("GPU", 0) for node in nodes.values()))
        cores = min((int(node["CPU"]) for node in nodes.values()), default=0)
        limit = gpus // devices if gpus else cores // devices * len(nodes)
        if not limit or (size is not None and size > limit):
            unit = f"{gpus} GPUs" if gpus else f"{cores * len(nodes)} cores"
            of_each = f", with {devices} of them for each," if devices > 1 else ""
            raise RequestError(
                f"--replicas {size or 1}{of_each} is more than the Ray cluster has room for, whose {len(nodes)} hosts have "
                f"{unit}; ask for at most {limit}, or add hosts"
            )
        self.size = size or (limit if gpus else len(nodes))
        # A host has as many workers as its share of all workers, and divides its cores among them.
        self._cores = 1 if gpus else max(cores // math.ceil(self.size / len(nodes)), 1)
        self._has_gpus = bool(gpus)
        self._actor = self._ray.remote(RayWorker).options(
            num_cpus=self._cores, num_gpus=devices if gpus else 0, scheduling_strategy="SPREAD", max_restarts=0
        )
        self._job = job
        self._cores_of_node = {name: int(node["CPU"]) for name, node in nodes.items()}
        self._workers = [self._actor.remote(job) for _ in range(self.size)]
        for worker in range(self.size):
            self._place(worker)

    @property
    def pids(self) -> list[int]:
        return [self._places[worker].pid for worker in range(self.size)]

    def send(self, worker: int, task: Task) -> None:
        self._pending[self._workers[worker].compute.remote(task)] = worker

    def receive(self) -> tuple[int, Answer | None]:
        (done, *_), _ = self._ray.wait(list(self._pending), num_returns=1)
        worker = self._pending.pop(done)
        try:
            return worker, self._ray.get(done)
        except self._ray.exceptions.RayTaskError as error:
            raise JobFailed(f"a worker failed: {error.cause}") from None
        except self._ray.exceptions.RayError:  # its process, or its host, has ended
            return worker, None

    def restart(self, worker: int) -> str:
        place = self._places.pop(worker)
        self._numbers.pop(worker, None)
        self._workers[worker] = self._actor.remote(self._job)
        self._place(worker)
        return f"its process {place.pid} on the Ray host {place.node[:8]}"

    def close(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker)
        if self._owns_connection:
            self._ray.shutdown()

    def _place(self, worker: int) -> None:
        """Wait until Ray has started an actor, and give it a share of the cores of its host."""
        actor = self._workers[worker]
        try:
            place = self._ray.get(actor.find_place.remote(), timeout=PLACE_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            raise JobFailed(
                f"Ray started no worker with {self._cores} cores in {PLACE_SECONDS:.0f} s; end other jobs of the cluster, or ask "
                "for fewer --replicas"
            ) from None
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise JobFailed(f"a worker on Ray did not start: {reason}; install upshift on each host") from None
        self._places[worker] = place
        if self._has_gpus:
            return
        taken = {self._numbers[other] for other, at in self._places.items() if at.node == place.node and other in self._numbers}
        self._numbers[worker] = next(number for number in range(self.size) if number not in taken)
        count = max(self._cores_of_node.get(place.node, self._cores) // self._cores, 1)
        self._ray.get(actor.take_cores.remote(self._numbers[worker] % count, count))
