"""The training loop: a signal to any rank stops all after the same step, and a copy that comes back needs no checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_train import a_job, home, prepared  # noqa: F401  fixtures

from upshift.benchmarking.meters import MemoryRecorder
from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.training.data.dataset import TrainingData
from upshift.training.distributed import host_copy
from upshift.training.job.request import Job
from upshift.training.loop import loop as loop_module
from upshift.training.loop import stop_vote
from upshift.training.loop.loop import TrainingLoop, train
from upshift.training.loop.signals import StopRequest
from upshift.training.loop.state import open_run
from upshift.training.loop.stop_vote import REASONS, StopVote


def a_loop(rank: int, *, requested: bool) -> Any:
    plan: Any = SimpleNamespace(num_processes=3, device="cpu")
    return SimpleNamespace(
        rank=rank, plan=plan, _stop_vote=StopVote(plan, None), stop=SimpleNamespace(requested=requested),
        job=SimpleNamespace(stop_after_tokens=None, stop_after_seconds=None), saver=SimpleNamespace(has_failed=False),
        progress=SimpleNamespace(tokens=[0], patience_is_over=False),
    )  # fmt: skip


@pytest.mark.parametrize("signalled", [(), (0,), (1,), (2,), (1, 2)])
def test_a_signal_to_any_rank_stops_all(signalled: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    loops = [a_loop(rank, requested=rank in signalled) for rank in range(3)]
    numbers: list[int] = []

    def contribute(number: int, plan: Any) -> int:
        numbers.append(number)
        return 0

    monkeypatch.setattr(stop_vote, "all_reduce_max", contribute)
    monkeypatch.setattr(loop_module, "all_reduce_max", contribute)
    for loop in loops:
        TrainingLoop._reason_to_stop(loop)
        TrainingLoop._stop_reference(loop)
    monkeypatch.setattr(stop_vote, "all_reduce_max", lambda number, plan: max(numbers[::2]))
    assert {TrainingLoop._reason_to_stop(loop) for loop in loops} == {"interrupted" if signalled else REASONS[0]}
    monkeypatch.setattr(loop_module, "all_reduce_max", lambda number, plan: max(numbers[1::2]))
    for loop in loops:
        if signalled:
            with pytest.raises(Interrupted, match="before the first step"):
                TrainingLoop._stop_reference(loop)
        else:
            TrainingLoop._stop_reference(loop)


def test_a_largest_number_that_is_read_late_is_that_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    of_others = [0, 5, 1, 0]

    def exchange(tensor: torch.Tensor, op: Any) -> None:
        assert op == host_copy.dist.ReduceOp.MAX
        tensor.clamp_(min=of_others.pop(0))

    monkeypatch.setattr(host_copy.dist, "all_reduce", exchange)
    plan: Any = SimpleNamespace(device="cpu")
    late_max = host_copy.LateMax(plan)
    assert [late_max.exchange(own) for own in (2, 3, 4, 0)] == [0, 2, 5, 4]


def loop_of(job: Job, data: TrainingData, **copies: Any) -> TrainingLoop:
    group: Any = SimpleNamespace(**copies, is_leader=False, start_step=lambda: None, select_micro_batches=lambda batch: batch)
    return TrainingLoop(
        job, data, rank=0, on_event=lambda event: None, stop=StopRequest(), recorder=MemoryRecorder(), copies=group
    )


@pytest.mark.parametrize("lost", ["", "upshift_state.json", "model.safetensors", "optimizer.safetensors", "config.json"])
def test_a_copy_that_comes_back_needs_no_checkpoint(
    lost: str,
    home: Path,  # noqa: F811
    prepared: Callable[[str], TrainingData],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another copy deletes it, or a part of it, after this one has found it."""
    data = prepared("llama")
    (tmp_path / "run").mkdir()
    job = open_run(a_job(home, tmp_path / "run", max_steps=2, save_steps=1), data)
    train(job, data, on_event=lambda event: None, stop=StopRequest())
    checkpoint = tmp_path / "gone" / "checkpoint-1"
    if lost:
        shutil.copytree(tmp_path / "run" / "checkpoint-1", checkpoint)
        (checkpoint / lost).unlink()
    monkeypatch.setattr(loop_module, "newest_checkpoint", lambda folder: checkpoint)
    returning = job.changed(resume=True)
    with pytest.raises(RequestError):
        loop_of(returning, data, first=True)
    loop = loop_of(returning, data, first=False)
    assert loop.checkpoint is None and loop.progress.step == 0
    loop._batches = loop.source.batches(loop.progress.position)
    with pytest.raises(JobFailed, match="no other copy is left, and this one could not read its checkpoint: .*checkpoint-1"):
        loop._run_step()
    monkeypatch.undo()
    other = loop_of(returning, data, first=False)
    assert other.checkpoint == tmp_path / "run" / "checkpoint-2"
    folder = tmp_path / "passed on"
    folder.mkdir()
    other.write_to(folder)
    loop.read_from(folder)
    assert loop.progress.step == 2 and loop._unread_checkpoint is None
