"""Replicas sum their gradients: weights that none of them used keep none, as in one process, and a lost step is repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from upshift.training.elastic.replica import ReplicaGroup, RetryStep

REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0),
    dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
}
WAIT_SECONDS = 20


class Meeting:
    """Replicas that are threads of this process: each waits for the others in every exchange."""

    def __init__(self, size: int, *, commits: bool) -> None:
        self.tensors: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=WAIT_SECONDS)
        self.commits = commits


class Manager:
    """A Manager of torchft, as far as a step uses it."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        self.meeting = meeting
        self.number = number

    def allreduce(self, tensor: Tensor, *, reduce_op: Any) -> Manager:
        self.meeting.tensors[self.number] = tensor.clone()
        self.meeting.barrier.wait()
        operands = [one for one in self.meeting.tensors if one is not None]
        assert len({(one.shape, one.dtype) for one in operands}) == 1
        tensor.copy_(REDUCTIONS[reduce_op](torch.stack(operands)))
        self.meeting.barrier.wait()
        return self

    def wait(self) -> None:
        pass

    def should_commit(self) -> bool:
        return self.meeting.commits


def a_model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3)])


def add_gradients(model: nn.ModuleList, used: tuple[int, ...], seed: int) -> None:
    for number in used:
        layer: Any = model[number]
        given = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).to(layer.weight.dtype)
        layer(given).float().sum().backward()


def step_of_replicas(models: list[nn.ModuleList], *, commits: bool, tmp_path: Path) -> list[bool]:
    """Return for each replica whether its step counts."""
    meeting = Meeting(len(models), commits=commits)

    def step(number: int) -> bool:
        group = ReplicaGroup(number, lighthouse="", folder=tmp_path, first=True)
        group._manager = Manager(meeting, number)
        group._device = "cpu"
        try:
            group.sum_gradients(models[number].parameters(), torch.tensor(float(number)))
        except RetryStep:
            return False
        return True

    with ThreadPoolExecutor(len(models)) as threads:
        return list(threads.map(step, range(len(models))))


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("uses", [((0, 1, 2), (0, 1, 2)), ((0, 1), (0,)), ((0,), ()), ((), (1, 2)), ((), ())], ids=str)
def test_only_weights_that_no_replica_used_have_no_gradient(
    uses: tuple[tuple[int, ...], ...], commits: bool, tmp_path: Path
) -> None:
    """In steps that use other weights each: nothing is left of the step before."""
    models = [a_model(), a_model()]
    for used_in_step in (((0, 1, 2), (0, 1, 2)), uses):
        one_process = a_model()
        for seed, (model, used) in enumerate(zip(models, used_in_step, strict=True)):
            model.zero_grad()
            add_gradients(model, used, seed)
            add_gradients(one_process, used, seed)
        assert step_of_replicas(models, commits=commits, tmp_path=tmp_path) == [commits, commits]
        if not commits:
            continue
        for model in models:
            for ours, theirs in zip(model.parameters(), one_process.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                if ours.grad is not None and theirs.grad is not None:
                    assert torch.equal(ours.grad, theirs.grad)
