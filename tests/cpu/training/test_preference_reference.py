"""The log-probabilities of pairs before the training: when they are computed, read again, interrupted, and not finite."""
# ruff: noqa: F811  fixtures of another file

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_preferences import a_job, data, home, losses  # noqa: F401  fixtures
from transformers import AutoModelForCausalLM

from upshift.benchmarking.meters import MemoryRecorder
from upshift.errors import Interrupted, JobFailed
from upshift.training import evaluate
from upshift.training.checkpoint.directory import REFERENCE_NAME
from upshift.training.data.dataset import TrainingData
from upshift.training.job.job import Job, open_job, run_job
from upshift.training.loop.events import Event, OutOfMemory, Referenced, ReferenceStarted, StepDone
from upshift.training.loop.signals import StopRequest
from upshift.training.preferences import reference_model
from upshift.training.profiling.worker import ProfiledLoop

TWO_STEPS = {"max_steps": 2, "lr_scheduler_type": "constant"}


def interrupting_at(kind: type[Event], events: list[Event]) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, kind):
            os.kill(os.getpid(), signal.SIGINT)

    return on_event


def kinds(events: list[Event]) -> list[type[Event]]:
    return [type(event) for event in events if isinstance(event, ReferenceStarted | Referenced | StepDone)]


def changed_copy(home: Path, folder: Path, value: float) -> Path:
    """Save the model with one weight changed."""
    model = AutoModelForCausalLM.from_pretrained(home / "model")
    with torch.no_grad():
        model.get_output_embeddings().weight[5, 0] = value
    model.save_pretrained(folder)
    for file in (home / "model").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_stop_request_ends_the_pass_between_batches(home: Path, data: TrainingData, tmp_path: Path) -> None:
    events: list[Event] = []
    with pytest.raises(Interrupted, match="before the first step"):
        run_job(a_job(home, tmp_path / "out", arguments=TWO_STEPS), data, on_event=interrupting_at(ReferenceStarted, events))
    assert kinds(events) == [ReferenceStarted] and not (tmp_path / "out" / REFERENCE_NAME).exists()


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_that_ended_before_its_first_checkpoint_reads_what_it_computed(
    changed: bool, home: Path, data: TrainingData, tmp_path: Path
) -> None:
    """But not for a model whose weights are others by now, although its config is the same."""
    job = a_job(home, tmp_path / "out", arguments=TWO_STEPS)
    with pytest.raises(Interrupted, match="nothing is saved"):
        run_job(job, data, on_event=interrupting_at(Referenced, []))
    (tmp_path / "out" / f"{REFERENCE_NAME}.tmp").write_bytes(b"of a process that was killed while it wrote")
    if changed:
        job = job.changed(model_reference=str(changed_copy(home, tmp_path / "model", 0.25)))
    events: list[Event] = []
    record = run_job(job.changed(resume=True), data, on_event=events.append)
    assert kinds(events) == [ReferenceStarted, Referenced] * changed + [StepDone] * 2
    whole = run_job(job.changed(output=str(tmp_path / "whole")), data)
    assert losses(record) == losses(whole)


def test_another_run_in_the_folder_computes_its_own(home: Path, data: TrainingData, tmp_path: Path) -> None:
    job = a_job(home, tmp_path / "out", arguments=TWO_STEPS)
    with pytest.raises(Interrupted):
        run_job(job, data, on_event=interrupting_at(Referenced, []))
    other = job.changed(resume=True, arguments=job.arguments.changed(seed=7))
    events: list[Event] = []
    run_job(other, data, on_event=events.append)
    assert kinds(events) == [ReferenceStarted, Referenced, StepDone, StepDone]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_log_probabilities_that_are_not_finite_end_the_run_before_it_trains(
    precision: str, home: Path, data: TrainingData, tmp_path: Path
) -> None:
    model = changed_copy(home, tmp_path / "model", float("nan"))
    job = a_job(home, tmp_path / "out", plan={"precision": precision}, arguments=TWO_STEPS)
    with pytest.raises(JobFailed) as caught:
        run_job(job.changed(model_reference=str(model)), data)
    assert "of 6 pairs no finite log-probability with precision=" + precision in str(caught.value)
    assert ("use --set precision=fp32" in str(caught.value)) == (precision != "fp32")
    assert "\n" not in str(caught.value) and not (tmp_path / "out" / REFERENCE_NAME).exists()


def test_a_profile_computes_none(home: Path, data: TrainingData, tmp_path: Path) -> None:
    job: Job = open_job(a_job(home, tmp_path / "out", arguments={"max_steps": 3}), data)
    events: list[Event] = []
    loop = ProfiledLoop(job, data, rank=0, on_event=events.append, stop=StopRequest(), recorder=MemoryRecorder())
    assert loop.profile().num_steps == 3
    assert kinds(events) == [] and not (tmp_path / "out" / REFERENCE_NAME).exists()


def test_out_of_memory_without_gradients_halves_these_passes_alone(
    home: Path, data: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator refuses more than one pair in the pass of the reference, and in the evaluation of the held-out pairs."""
    plain = run_job(a_job(home, tmp_path / "plain", arguments=TWO_STEPS), data)

    def of_one_pair(compute: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(model: Any, plan: Any, micro_batch: Any, *others: Any) -> Any:
            if micro_batch.shape[0] > 2:
                raise torch.OutOfMemoryError("simulated")
            return compute(model, plan, micro_batch, *others)

        return refuse

    for module, name in ((reference_model, "compute_log_probabilities"), (evaluate, "compute_loss")):
        monkeypatch.setattr(module, name, of_one_pair(getattr(module, name)))
    events: list[Event] = []
    halved = run_job(a_job(home, tmp_path / "halved", arguments=TWO_STEPS), data, on_event=events.append)
    (told,) = [event for event in events if isinstance(event, OutOfMemory)]
    assert (told.largest[0], told.smaller[0]) == (4, 2)
    assert losses(halved) == pytest.approx(losses(plain), abs=1e-6)
    assert halved.details["evaluations"][-1][1] == pytest.approx(plain.details["evaluations"][-1][1], abs=1e-6)
    assert halved.details["evaluation_rewards"] == [pytest.approx(row, abs=1e-5) for row in plain.details["evaluation_rewards"]]
