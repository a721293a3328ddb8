"""Coordinate one copy with the others in each step: which copies take part, which part of the batch each has, the sum of
gradients.

torchft's Manager and Lighthouse (https://github.com/meta-pytorch/torchft) agree on which copies are there before each step,
and after it on whether the step counts. The exchange of gradients is Upshift's. However many copies take part, gradients are
those of the whole global batch, because some copy has each micro-batch: deaths change the order of sums, and nothing else.
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
from torch import Tensor
from torch.distributed import TCPStore

from upshift.settings import quiet_torchft
from upshift.training.batches.sampler import GlobalBatch
from upshift.training.elastic.state_transfer import POLL_SECONDS, FolderTransport, TransferableRun
from upshift.units import MIB
from upshift.value import Value

STEP_TIMEOUT = timedelta(minutes=30)  # the first may compile; a death is noticed by its closed connection, at once
CONNECT_TIMEOUT = timedelta(seconds=60)
BUCKET_BYTES = 25 * MIB  # of gradients that are summed in one message


def job_name(number: int | str) -> str:
    return f"job-{number}.json"


def result_name(number: int) -> str:
    return f"result-{number}.json"


def arrival_name(number: int | str) -> str:
    return f"here-{number}"


class ReplicaRequest(Value):
    """The request for one process of a copy."""

    folder: str  # with the job
    number: int  # of the copy
    lighthouse: str  # where all meet
    first: bool


class RetryStep(Exception):
    """Another copy was lost in this step. The copies that are left take the step once more."""


class ReplicaGroup:
    """One copy's connection to the others.

    ``number`` is that of this copy, from 0, the same over its lives. All copies meet at ``lighthouse``. ``first`` says that
    this is the first of its lives.
    """

    def __init__(self, number: int, *, lighthouse: str, folder: Path, first: bool) -> None:
        self.number, self._lighthouse, self._folder, self.first = number, lighthouse, folder, first
        self._hand_over = FolderTransport(folder / f"copy-{number}")
        self._manager: Any = None  # torchft's, which has no types
        self._said = self._agreed = 0

    def open(self, *, device: str) -> None:
        """Connect this copy. From now on the others wait for it before a step."""
        quiet_torchft()
        from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

        logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)  # a lost copy is told by who started it
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        group = ProcessGroupNCCL if device == "cuda" else ProcessGroupGloo
        self._manager = Manager(
            pg=group(timeout=STEP_TIMEOUT), state_dict=dict, load_state_dict=self._hand_over.take,
            checkpoint_transport=self._hand_over, min_replica_size=1, use_async_quorum=False, timeout=STEP_TIMEOUT,
            quorum_timeout=STEP_TIMEOUT, connect_timeout=CONNECT_TIMEOUT, rank=0, world_size=1, store_addr="localhost",
            store_port=self._store.port, lighthouse_addr=self._lighthouse, replica_id=f"copy-{self.number}",
            hostname="localhost", init_sync=False,
        )  # fmt: skip

    def join(self, trained: TransferableRun, *, device: str) -> None:
        """Join the other copies once the model is there.

        A copy that comes back lets the others go on until then. At the start all wait for all: a copy that went ahead alone,
        and died before another had taken its state, would take its steps with it.
        """
        if self._manager is None:
            self.open(device=device)
        self._hand_over.trained, self._device = trained, device
        self._manager.load_state_dict({"step": trained.progress.step, "batches_committed": 0})
        (self._folder / arrival_name(self.number)).touch()
        copies = len(list(self._folder.glob(job_name("*"))))
        while len(list(self._folder.glob(arrival_name("*")))) < copies:
            time.sleep(POLL_SECONDS)

    def leave(self) -> None:
        self._manager.shutdown(wait=False)

    @property
    def leads(self) -> bool:
        """Return whether this copy reports and writes for all. Before they met copy 0 does."""
        rank = self._manager.participating_rank()
        return self.first and self.number == 0 if rank is None else rank == 0

    def meet(self) -> None:
        """Meet the other copies before a step. A copy that is behind then has the others' weights, step and place in the data."""
        self._manager.start_quorum()

    def part(self, batch: GlobalBatch) -> GlobalBatch:
        """Return the batch with this copy's micro-batches of the step."""
        rank = self._manager.participating_rank() or 0
        return replace(batch, micro_batches=batch.micro_batches[rank :: self._manager.num_participants()])

    def sum_up(self, parameters: Iterable[Tensor], loss: Tensor) -> None:
        """Sum gradients and loss of all copies, in place. Raise Again on all that are left if one was lost."""
        gradients = [_gradient(parameter) for parameter in parameters if parameter.requires_grad]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self._summed(flat)
            for gradient, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))
        self._summed(loss)
        said = torch.tensor(float(self._said), device=self._device)
        self._manager.allreduce(said, reduce_op=dist.ReduceOp.MAX).wait()
        if not self._manager.should_commit():
            raise RetryStep
        self._agreed = int(said)

    def highest(self, number: int) -> int:
        """Return the highest number that the copies gave before the last step that counted. This copy's number counts in the
        next."""
        self._said = number
        return self._agreed

    def _summed(self, tensor: Tensor) -> None:
        self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:  # no micro-batch was this copy's, or none used the parameter
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield buckets of gradients, each of one dtype."""
    for dtype in {gradient.dtype: None for gradient in gradients}:
        bucket: list[Tensor] = []
        for gradient in (one for one in gradients if one.dtype == dtype):
            if bucket and sum(one.nbytes for one in bucket) + gradient.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(gradient)
        if bucket:
            yield bucket
