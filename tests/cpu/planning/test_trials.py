"""A trial computes what the run will: the same batches, the memory that the run then holds; and waits for a quiet machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from upshift.benchmarking.timing import LoadMeter, Timing
from upshift.errors import JobFailed
from upshift.models.source import find_model
from upshift.planning.cost.uncertainty import AGAIN_INTERVALS
from upshift.planning.plan import Plan
from upshift.planning.trials.runner import TrialRequest, TrialResult, trial_server
from upshift.training.arguments import Arguments
from upshift.training.batches.sampler import GlobalBatch
from upshift.training.data.dataset import TrainingData, prepare_data, save_data
from upshift.training.job.job import Job, run_job
from upshift.training.step import TrainStep
from upshift.training.trials import worker
from upshift.units import GIB

LENGTH, GLOBAL_BATCH, STEPS, VOCABULARY = 48, 6, 8, 300
CONFIG = LlamaConfig(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, num_hidden_layers=2,
    vocab_size=VOCABULARY, architectures=["LlamaForCausalLM"],
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(folder)
    return str(folder / "config.json")


@pytest.fixture(scope="module")
def data(model: str, tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.0, 0.8, 90), 2, 3 * LENGTH).astype(int)
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": rng.integers(0, VOCABULARY, n).tolist()}) + "\n" for n in lengths))
    return prepare_data(find_model(model), path, sequence_length=LENGTH)


@pytest.fixture(scope="module")
def stored(data: TrainingData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    save_data(data, folder)
    return folder


def a_plan(model: str, **fields: Any) -> Plan:
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "sequence_length": LENGTH} | fields
    return Plan.model_validate({"device": "cpu", "host": "", "model": find_model(model).model_hash} | given)


def a_request(model: str, stored: Path, plan: Plan, **fields: Any) -> TrialRequest:
    given = {"seconds": 0.5, "limit_seconds": 300.0, "total_steps": STEPS, "seed": 42} | fields
    return TrialRequest(model_reference=model, from_config=True, plan=plan, global_batch=GLOBAL_BATCH, data=str(stored), **given)


def tried(request: TrialRequest, folder: Path) -> TrialResult:
    """In this process."""
    path = folder / "request.json"
    path.write_text(request.to_json())
    answers: list[TrialResult] = []
    worker.main(path, answers.append)
    assert answers[-1].failure is None
    return answers[-1]


def a_job(model: str, plan: Plan, output: Path, *, seed: int = 42) -> Job:
    arguments = Arguments(max_steps=STEPS, seed=seed)
    return Job(
        model_reference=model, from_config=True, plan=plan, arguments=arguments, data="", global_batch=GLOBAL_BATCH,
        output=str(output),
    )  # fmt: skip


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[GlobalBatch]:
    """What every optimizer step computes from now on."""
    seen: list[GlobalBatch] = []
    queue = TrainStep.queue

    def watched(self: TrainStep, batch: GlobalBatch, **options: Any) -> Any:
        seen.append(batch)
        return queue(self, batch, **options)

    monkeypatch.setattr(TrainStep, "queue", watched)
    return seen


def same(one: GlobalBatch, other: GlobalBatch) -> bool:
    pairs = list(zip(one.micro_batches, other.micro_batches, strict=True))
    return all(
        first.arrays.keys() == second.arrays.keys()
        and all(np.array_equal(first.arrays[name], second.arrays[name]) for name in first.arrays)
        for first, second in pairs
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_trial_whose_loss_is_no_number_says_so(
    loss: float, model: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "evaluate", lambda *_: loss)
    path = tmp_path / "request.json"
    path.write_text(a_request(model, stored, a_plan(model)).to_json())
    answers: list[TrialResult] = []
    worker.main(path, answers.append)
    assert answers[-1].failure is not None and "the loss became" in answers[-1].failure
    assert all(answer.check_loss is None for answer in answers)


@pytest.mark.parametrize(("packing", "seed"), [(False, 42), (True, 7)])
def test_a_trial_steps_over_the_first_batches_of_the_run(
    packing: bool, seed: int, model: str, data: TrainingData, stored: Path, tmp_path: Path, stepped: list[GlobalBatch]
) -> None:
    plan = a_plan(model, packing=packing)
    run_job(a_job(model, plan, tmp_path / "out", seed=seed), data)
    of_run = list(stepped)
    stepped.clear()
    found = tried(a_request(model, stored, plan, seed=seed, seconds=2.0), tmp_path)
    num_steps = min(len(stepped), len(of_run))
    assert num_steps >= worker.WARM_STEPS + worker.MIN_TIMED
    assert all(same(one, other) for one, other in zip(stepped[:num_steps], of_run, strict=False))
    assert found.largest_of_run and found.peak_bytes


def test_a_step_that_is_too_long_is_stood_for_by_some_of_its_micro_batches(model: str, stored: Path, tmp_path: Path) -> None:
    found = tried(a_request(model, stored, a_plan(model), seconds=1e-4), tmp_path)
    assert found.tokens_per_second and found.step_seconds and not found.rough


class ColdForward(LoadMeter):
    """Adds 60 s to the first micro-batch, as a library would that prepares its kernels then. Two updates come before it."""

    count = 0

    def time(self, work: Any) -> Timing:
        timing = super().time(work)
        ColdForward.count += 1
        return replace(timing, seconds=timing.seconds + 60.0) if ColdForward.count == 3 else timing


@pytest.mark.parametrize(("batch", "accumulation"), [(2, 3), (6, 1)])
def test_a_rough_speed_is_that_of_a_warm_micro_batch(
    batch: int, accumulation: int, model: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that ends at its limit leaves the last result that it sent."""
    monkeypatch.setattr(worker, "LoadMeter", ColdForward)
    monkeypatch.setattr(ColdForward, "count", 0)
    plan = a_plan(model, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
    path = tmp_path / "request.json"
    path.write_text(a_request(model, stored, plan, seconds=50.0).to_json())
    monkeypatch.setattr(worker, "MAX_TIMED", 2)
    answers: list[TrialResult] = []
    worker.main(path, answers.append)
    rough = [answer.step_seconds.p50 for answer in answers if answer.rough and answer.step_seconds]
    assert rough[0] > 40.0 and rough[-1] < 10.0


class Beside(LoadMeter):
    """Other programs take half of each of the first timings."""

    count = 0
    disturbed = 40

    def time(self, work: Any) -> Timing:
        found = super().time(work)
        Beside.count += 1
        busy = Beside.count <= Beside.disturbed
        return replace(found, waited=0.5 * found.seconds if busy else 0.0, other_cores=0.0)


@pytest.mark.parametrize(("disturbed", "busy"), [(0, False), (12, False), (1000, True)])
def test_what_was_timed_beside_other_programs_is_timed_again(
    disturbed: int, busy: bool, model: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some timings are not steps: updates and looks at the longest micro-batch."""
    monkeypatch.setattr(worker, "LoadMeter", Beside)
    monkeypatch.setattr(worker, "BUSY_FACTOR", 1e9)
    monkeypatch.setattr(Beside, "count", 0)
    monkeypatch.setattr(Beside, "disturbed", disturbed)
    found = tried(a_request(model, stored, a_plan(model), seconds=2.0), tmp_path)
    assert found.busy is busy
    assert found.waited_share == pytest.approx(0.5 if busy else 0.0)
    if disturbed == 12:
        assert Beside.count >= 12 + worker.MIN_TIMED


@pytest.mark.usefixtures("new_processes")  # a fork has the libraries' pages from its parent, which are not counted
def test_a_run_of_mixed_lengths_holds_what_its_trial_said(model: str, data: TrainingData, stored: Path, tmp_path: Path) -> None:
    plan = a_plan(model, packing=True, loss_chunk_tokens=64)
    with trial_server() as server:
        found = server.run(a_request(model, stored, plan))
    record = run_job(a_job(model, plan, tmp_path / "out"), data, fresh_process=True)
    assert found.failure is None and found.resident_bytes and found.peak_bytes
    assert record.measured is not None and record.measured.resident_gib and record.measured.peak_gib
    low, high = AGAIN_INTERVALS["held"]
    assert low <= record.measured.resident_gib * GIB / found.resident_bytes <= high
    assert 0.5 * found.peak_bytes < record.measured.peak_gib * GIB <= 1.001 * found.peak_bytes
    assert 0.0 <= record.details["waited_share"] <= 1.0 and record.details["cpu_seconds_per_step"] > 0.0


@pytest.mark.parametrize(
    ("compiled", "eager", "factor"), [(2.0, 2.0, 1.0), (2.05, 2.0, 1.0), (3.0, 2.0, 1.5), (0.0, 2.0, 0.0), (0.0, 0.0, 1.0)]
)
def test_a_compiled_loss_is_compared_with_the_eager_one(compiled: float, eager: float, factor: float) -> None:
    assert worker.loss_factor(compiled, eager, tolerance=0.05) == factor


@pytest.mark.parametrize(
    ("compiled", "eager", "words"),
    [(0.1, 0.0, "is 0, and 0.1 with compiled"), (math.nan, 2.0, "became NaN"), (2.0, math.inf, "became infinite")],
)
def test_a_loss_without_a_factor_is_said(compiled: float, eager: float, words: str) -> None:
    with pytest.raises(JobFailed, match=words):
        worker.loss_factor(compiled, eager, tolerance=0.05)


def test_a_trial_whose_compiled_layers_compute_no_loss_has_no_loss(
    model: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its factor is 0, which is not the same as no factor."""
    monkeypatch.setattr(worker.Trial, "run", lambda self: TrialResult(check_loss=0.0))
    assert tried(a_request(model, stored, a_plan(model)), tmp_path).check_loss == 0.0
