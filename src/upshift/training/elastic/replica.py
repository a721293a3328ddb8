"""Coordinate one replica with the others in each step: which of them take part, who has which micro-batches, and the sums.

torchft's Manager and Lighthouse (https://github.com/meta-pytorch/torchft) agree before each step on the replicas that are
there, and after it on whether the step counts. Upshift exchanges the gradients. However many replicas take part, the gradients
are those of the whole global batch, because each micro-batch is computed by some replica. The loss of a replica changes only
the order of sums.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore

from upshift.settings import quiet_torchft
from upshift.training.batches.sampler import GlobalBatch
from upshift.training.distributed.gradients import has_gradient, unused_parameters
from upshift.training.elastic.state_transfer import POLL_SECONDS, FolderTransport, TransferableRun
from upshift.units import MIB
from upshift.value import Value

STEP_TIMEOUT = timedelta(minutes=30)  # the first step may compile; a lost replica is noticed at once by its closed connection
CONNECT_TIMEOUT = timedelta(seconds=60)
BUCKET_BYTES = 25 * MIB  # of gradients that are summed in one message


def job_name(number: int | str) -> str:
    return f"job-{number}.json"


def result_name(number: int) -> str:
    return f"result-{number}.json"


def arrival_name(number: int | str) -> str:
    """Return the name of an empty file that says that the replica has its model, or will never come."""
    return f"here-{number}"


class ReplicaRequest(Value):
    """The request to start one process of a replica."""

    folder: str  # has the job
    number: int  # the replica's number
    lighthouse: str  # address at which all replicas meet
    first: bool  # the replica was never started before


class RetryStep(Exception):
    """An error: another replica was lost in this step. The remaining replicas repeat the step."""


class ReplicaGroup:
    """One replica's connection to the others.

    ``number`` is the replica's number from 0, the same each time it is started. All replicas meet at ``lighthouse``. ``first``
    means that it was never started before.
    """

    def __init__(self, number: int, *, lighthouse: str, folder: Path, first: bool) -> None:
        self.number = number
        self.first = first
        self._lighthouse = lighthouse
        self._folder = folder
        self._transport = FolderTransport(folder / f"copy-{number}")
        self._manager: Any = None  # a Manager of torchft, which has no types
        self._own_number = 0
        self._agreed_number = 0

    def open(self, *, device: str) -> None:
        """Connect this replica. From now on the others wait for it before each step."""
        quiet_torchft()
        from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

        logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)  # the process that started a replica reports its loss
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        group = ProcessGroupNCCL if device == "cuda" else ProcessGroupGloo
        self._manager = Manager(
            pg=group(timeout=STEP_TIMEOUT),
            state_dict=dict,
            load_state_dict=self._transport.load_state,
            checkpoint_transport=self._transport,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=STEP_TIMEOUT,
            quorum_timeout=STEP_TIMEOUT,
            connect_timeout=CONNECT_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self._store.port,
            lighthouse_addr=self._lighthouse,
            replica_id=f"copy-{self.number}",
            hostname="localhost",
            init_sync=False,
        )

    def join(self, training_run: TransferableRun, *, device: str) -> None:
        """Join the other replicas once the model is there.

        The others go on while a returning replica starts. At the start all replicas wait for all: if one went ahead alone, and
        was lost before another had its state, its steps would be lost with it.
        """
        if self._manager is None:
            self.open(device=device)
        self._transport.training_run = training_run
        self._device = device
        self._manager.load_state_dict({"step": training_run.progress.step, "batches_committed": 0})
        (self._folder / arrival_name(self.number)).touch()
        num_replicas = len(list(self._folder.glob(job_name("*"))))
        while len(list(self._folder.glob(arrival_name("*")))) < num_replicas:
            time.sleep(POLL_SECONDS)

    def leave(self) -> None:
        self._manager.shutdown(wait=False)

    @property
    def is_leader(self) -> bool:
        """Return whether this replica reports and writes for all. Before the first step, replica 0 does."""
        rank = self._manager.participating_rank()
        return self.first and self.number == 0 if rank is None else rank == 0

    def start_step(self) -> None:
        """Meet the other replicas before a step.

        A replica that is behind receives the weights, the step and the position in the data from another one.
        """
        self._manager.start_quorum()

    def select_micro_batches(self, batch: GlobalBatch) -> GlobalBatch:
        """Return the batch with only the micro-batches of this replica."""
        rank = self._manager.participating_rank() or 0
        return replace(batch, micro_batches=batch.micro_batches[rank :: self._manager.num_participants()])

    def sum_gradients(self, parameters: Iterable[nn.Parameter], loss: Tensor) -> None:
        """Sum the gradients and the loss of all replicas, in place. Raise RetryStep on the remaining ones if one was lost."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        unused = unused_parameters(trained, has_gradient, self._set_largest, self._device)
        gradients = [_gradient(parameter) for parameter in trained]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self._sum(flat)
            sizes = [gradient.numel() for gradient in bucket]
            for gradient, total in zip(bucket, flat.split(sizes), strict=True):
                gradient.copy_(total.view_as(gradient))
        self._sum(loss)
        number = torch.tensor(float(self._own_number), device=self._device)
        self._set_largest(number)
        if not self._manager.should_commit():
            raise RetryStep
        for parameter in unused:
            parameter.grad = None
        self._agreed_number = int(number)

    def agreed_max(self, number: int) -> int:
        """Return the highest number that the replicas passed before the last step that counted.

        ``number`` takes part in the next step.
        """
        self._own_number = number
        return self._agreed_number

    def _set_largest(self, tensor: Tensor) -> None:
        self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.MAX).wait()

    def _sum(self, tensor: Tensor) -> None:
        self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:  # this replica had no micro-batch, or none that used the parameter
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the gradients in buckets of one dtype and limited size."""
    for dtype in {gradient.dtype: None for gradient in gradients}:
        bucket: list[Tensor] = []
        num_bytes = 0
        for gradient in gradients:
            if gradient.dtype != dtype:
                continue
            if bucket and num_bytes + gradient.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
                num_bytes = 0
            bucket.append(gradient)
            num_bytes += gradient.nbytes
        if bucket:
            yield bucket
