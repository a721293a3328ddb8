"""What a run is given beside its data: evaluation data, logged steps, an early end, its best model, noise, trackers."""
# ruff: noqa: F811  fixtures of another file

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from test_train import GLOBAL_BATCH, LENGTH, a_job, a_plan, home, prepared, sentences  # noqa: F401  fixtures
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.models.source import find_model
from upshift.record import Record
from upshift.training.arguments import Arguments, TrainRequest
from upshift.training.batches.collate import to_tensors
from upshift.training.checkpoint.directory import TENSORBOARD_FOLDER
from upshift.training.data.dataset import prepare_data
from upshift.training.job.job import TrainingData, run_job
from upshift.training.loop import loop
from upshift.training.loop.events import Doubted, Evaluated, Event, Finished, Saved, Started, StepDone
from upshift.training.loop.state import Run
from upshift.training.neftune import fixed_for_neftune
from upshift.training.step import TrainStep
from upshift.training.trackers import PACKAGES, RunTrackers

Prepare = Callable[[str], TrainingData]
# Steps this long go far beyond any minimum, on every processor: the held-out loss rises after the first evaluations.
RISING = {"learning_rate": 2.0, "warmup_steps": 0, "lr_scheduler_type": "constant"}
BEST: dict[str, Any] = {
    "eval_steps": 2,
    "save_steps": 2,
    "load_best": True,
    "early_stopping_patience": 3,
    "logging_steps": 3,
    **RISING,
}


def held_out_loss(model_folder: Path, data: TrainingData) -> float:
    """Return the mean loss of the held-out sequences, each alone, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    assert data.evaluation is not None
    total, count = 0.0, 0
    for number in range(len(data.evaluation)):
        start, length = int(data.evaluation.starts[number]), int(data.evaluation.lengths[number])
        ids = torch.tensor(data.evaluation.tokens[start : start + length].astype("int64"))[None]
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=ids).loss) * (length - 1)
        count += length - 1
    return total / count


def evaluations(events: list[Event]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, Evaluated)}


@pytest.fixture(scope="module")
def best(home: Path, prepared: Prepare, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record, list[Event]]:
    output = tmp_path_factory.mktemp("best")
    events: list[Event] = []
    record = run_job(a_job(home, output, max_steps=40, **BEST), prepared("llama"), on_event=events.append)
    return output, record, events


def test_the_run_ends_early_with_its_best_model(best: tuple[Path, Record, list[Event]], prepared: Prepare) -> None:
    output, record, events = best
    losses = evaluations(events)
    step = min(losses, key=lambda number: losses[number])
    last = max(losses)
    assert record.measured and record.measured.evaluation_loss == losses[step] and record.details["model_step"] == step
    assert next(event for event in events if isinstance(event, Finished)).reason == record.details["end"] == "early stopping"
    assert last == step + 3 * 2 < 40 and losses[last] > losses[step]
    assert held_out_loss(output, prepared("llama")) == pytest.approx(losses[step], rel=1e-5)


def test_the_best_checkpoint_stays_beside_the_newest(best: tuple[Path, Record, list[Event]]) -> None:
    output, record, events = best
    steps = {int(path.name.rpartition("-")[2]) for path in output.glob("checkpoint-*")}
    last = record.details["steps"]
    assert steps == {record.details["model_step"], last - 2, last}
    assert len([event for event in events if isinstance(event, Saved)]) > len(steps)


def test_logged_steps_are_means_and_stand_in_the_record_and_the_run(best: tuple[Path, Record, list[Event]]) -> None:
    output, record, events = best
    steps = [event for event in events if isinstance(event, StepDone)]
    logged = [event for event in steps if event.logged_loss is not None]
    assert [event.step for event in logged] == list(range(3, len(steps) + 1, 3))
    for event, entry in zip(logged, record.details["logged_steps"], strict=True):
        mean = sum(step.loss for step in steps[event.step - 3 : event.step]) / 3
        assert event.logged_loss == entry["loss"] == pytest.approx(mean)
        assert (entry["step"], entry["tokens"], entry["learning_rate"]) == (event.step, event.tokens, event.learning_rate)
        assert entry["gradient_norm"] == event.gradient_norm and entry["tokens_per_second"] == event.tokens_per_second
    assert [entry.model_dump() for entry in Run.read(output).logged_steps] == record.details["logged_steps"]


def test_a_stopped_run_goes_on_to_the_same_end(
    best: tuple[Path, Record, list[Event]],
    home: Path,
    prepared: Prepare,
    tmp_path: Path,
) -> None:
    _, whole, _ = best
    job = a_job(home, tmp_path / "run", max_steps=40, **BEST)
    stopped_at = whole.details["model_step"] + 3

    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == stopped_at:
            raise Interrupted("here")

    with pytest.raises(Interrupted):
        run_job(job, prepared("llama"), on_event=stop)
    record = run_job(job.changed(resume=True), prepared("llama"))
    assert record.measured and whole.measured and record.measured.evaluation_loss == whole.measured.evaluation_loss
    for name in ("steps", "model_step", "end", "evaluations", "loss_curve"):
        assert record.details[name] == whole.details[name], name
    without_speed = [
        [{key: value for key, value in entry.items() if key != "tokens_per_second"} for entry in details["logged_steps"]]
        for details in (record.details, whole.details)
    ]
    assert without_speed[0] == without_speed[1]


def set_losses(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """Let the evaluations of the runs that follow give these losses, one after the other."""
    remaining = iter(losses)
    monkeypatch.setattr(loop, "evaluate", lambda *_: next(remaining))


@pytest.mark.parametrize(
    ("damaged", "model_step"), [({4: "a byte"}, 2), ({4: "the folder"}, 2), ({4: "the folder", 2: "a byte"}, 8)], ids=str
)
def test_without_its_best_checkpoint_a_run_saves_the_best_model_that_is_left(
    damaged: dict[int, str],
    model_step: int,
    home: Path,
    prepared: Prepare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = {2: 2.0, 4: 1.0, 6: 3.0, 8: 4.0}
    set_losses(monkeypatch, *losses.values())
    output = tmp_path / "run"
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, Evaluated) and event.step == max(losses):
            for step, damage in damaged.items():
                path = output / f"checkpoint-{step}" / "model.safetensors"
                if damage == "a byte":
                    path.write_bytes(path.read_bytes()[:-1] + b"!")
                else:
                    shutil.rmtree(path.parent)

    job = a_job(home, output, max_steps=8, eval_steps=2, load_best=True)
    record = run_job(job, prepared("llama"), on_event=on_event)
    assert record.details["model_step"] == model_step
    assert record.measured and record.measured.evaluation_loss == losses[model_step]
    assert [event.step for event in events if isinstance(event, Saved)] == [2, 4, model_step]
    (warning,) = [event.words for event in events if isinstance(event, Doubted)]
    assert warning.startswith("the held-out loss was lowest after step 4 (1.0000), and its checkpoint cannot be loaded (")
    assert ("neither can those of the next lowest, after steps 2, 6;" in warning) == (2 in damaged)
    assert warning.endswith(f"the final model is that of step {model_step}")
    saved = load_file(output / "model.safetensors")
    checkpoint = output / "checkpoint-2" / "model.safetensors"
    same = [torch.equal(tensor, saved[name]) for name, tensor in load_file(checkpoint).items()]
    assert all(same) if model_step == 2 else not any(same)


def test_a_resumed_run_says_at_once_that_its_best_checkpoint_is_gone_and_keeps_the_next_best(
    home: Path,
    prepared: Prepare,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_losses(monkeypatch, 2.0, 1.0, 2.5, 1.5, 3.0)  # after steps 2, 4, 5, 6, 8
    output = tmp_path / "run"
    job = a_job(home, output, max_steps=5, eval_steps=2, save_steps=5, load_best=True)
    run_job(job, prepared("llama"))
    shutil.rmtree(output / "checkpoint-4")
    warnings_at: list[int] = []
    longer = job.arguments.changed(max_steps=8)
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, Started):
            warnings_at.append(sum("checkpoint-4 does not exist" in message for message in caplog.messages))

    record = run_job(job.changed(resume=True, arguments=longer), prepared("llama"), on_event=on_event)
    assert warnings_at == [1]
    assert record.details["model_step"] == 6 and Run.read(output).lost_steps == (4, 2)  # that of step 2 made room
    assert [event.step for event in events if isinstance(event, Saved)] == [6, 6]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_held_out_loss_that_is_no_number_ends_the_run_with_words(
    loss: float,
    home: Path,
    prepared: Prepare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_losses(monkeypatch, loss)
    job = a_job(home, tmp_path / "run", max_steps=3, eval_steps=2)
    words = r"^evaluation of the held-out data after step 2: the loss became (NaN|infinite); .*; there is no earlier checkpoint$"
    with pytest.raises(JobFailed, match=words):
        run_job(job, prepared("llama"))


def test_a_logged_loss_is_the_mean_since_the_previous_logged_step_after_another_interval(
    home: Path,
    prepared: Prepare,
    tmp_path: Path,
) -> None:
    job = a_job(home, tmp_path / "run", max_steps=4, save_steps=4, logging_steps=3)
    run_job(job, prepared("llama"))
    changed = job.changed(resume=True, arguments=job.arguments.changed(max_steps=10, logging_steps=5))
    record = run_job(changed, prepared("llama"))
    losses = [loss for _, loss in record.details["loss_curve"]]
    logged = {entry["step"]: entry["loss"] for entry in record.details["logged_steps"]}
    expected = {3: sum(losses[:3]) / 3, 5: sum(losses[3:5]) / 2, 10: sum(losses[5:]) / 5}
    assert logged == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"load_best": True}, "--load-best needs evaluations during the run, and --eval-steps is 0; add for example"),
        ({"early_stopping_patience": 2}, "--early-stopping-patience needs evaluations during the run"),
    ],
)
def test_what_needs_evaluations_is_refused_without(
    options: dict[str, Any],
    words: str,
    home: Path,
    prepared: Prepare,
    tmp_path: Path,
) -> None:
    with pytest.raises(RequestError, match=words):
        run_job(a_job(home, tmp_path / "run", **options), prepared("llama"))
    assert not (tmp_path / "run" / "upshift_run.json").exists()


def test_what_needs_held_out_data_is_refused_without(home: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "the quick brown fox"}))
    data = prepare_data(find_model(str(home / "llama")), tmp_path / "one.jsonl", sequence_length=LENGTH)
    job = a_job(home, tmp_path / "run", load_best=True, eval_steps=1).changed(global_batch=1)
    words = r"--load-best needs held-out data, and none of .*one\.jsonl is held out; add --eval-data"
    with pytest.raises(RequestError, match=words):
        run_job(job, data)


# Evaluation data.


def rows(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def test_the_evaluation_data_are_evaluated_and_nothing_is_held_out(home: Path, tmp_path: Path) -> None:
    source = find_model(str(home / "llama"))
    training, other = sentences(30), sentences(35)[30:]
    path, other_path = rows(tmp_path / "data.jsonl", training), rows(tmp_path / "other.jsonl", other)
    data = prepare_data(source, path, eval_data=other_path, sequence_length=LENGTH)
    alone = prepare_data(source, other_path, eval_data=path, sequence_length=LENGTH)
    whole = prepare_data(source, path, sequence_length=LENGTH)
    assert data.evaluation and alone.evaluation and whole.evaluation
    assert data.evaluation.tokens.tolist() == alone.training.tokens.tolist()
    assert alone.evaluation.tokens.tolist() == data.training.tokens.tolist()
    assert len(data.training) == len(whole.training) + len(whole.evaluation)


def test_evaluation_data_of_every_form_are_read_as_the_data_are(home: Path, tmp_path: Path) -> None:
    source = find_model(str(home / "llama"))
    texts = sentences(12)
    expected = prepare_data(source, home / "data.jsonl", eval_data=rows(tmp_path / "e.jsonl", texts), sequence_length=LENGTH)
    folder = tmp_path / "folder"
    folder.mkdir()
    rows(folder / "train.jsonl", texts[:3])
    rows(folder / "validation.jsonl", texts)
    (tmp_path / "e.csv").write_text("text\n" + "\n".join(texts))
    for path in (folder, tmp_path / "e.csv"):
        data = prepare_data(source, home / "data.jsonl", eval_data=path, sequence_length=LENGTH)
        assert data.evaluation and expected.evaluation
        assert data.evaluation.tokens.tolist() == expected.evaluation.tokens.tolist()


def test_evaluation_data_of_a_folder_are_those_of_its_validation_split(home: Path, tmp_path: Path) -> None:
    source = find_model(str(home / "llama"))
    texts = [f"row number {number}" for number in range(3)]
    alone = prepare_data(source, home / "data.jsonl", eval_data=rows(tmp_path / "alone.jsonl", texts), sequence_length=LENGTH)
    assert alone.evaluation
    for names in (("validation",), ("train", "dev", "test"), ("eval",), ("train",)):
        for is_saved in (False, True):
            folder = tmp_path / f"{' '.join(names)} {is_saved}"
            split = next((name for name in names if name in ("validation", "dev")), names[0])
            contents = {name: texts if name == split else ["another text"] for name in names}
            if is_saved:
                splits = {name: Dataset.from_dict({"text": members}) for name, members in contents.items()}
                DatasetDict(splits).save_to_disk(folder)
            else:
                folder.mkdir()
                for name, members in contents.items():
                    rows(folder / f"{name}.jsonl", members)
            data = prepare_data(source, home / "data.jsonl", eval_data=folder, sequence_length=LENGTH)
            assert data.evaluation and data.evaluation.tokens.tolist() == alone.evaluation.tokens.tolist(), folder
    for folder in ("saved", "files"):
        (tmp_path / folder).mkdir()
    DatasetDict({name: Dataset.from_dict({"text": texts}) for name in ("train", "test")}).save_to_disk(tmp_path / "saved")
    for name in ("train", "test"):
        rows(tmp_path / "files" / f"{name}.jsonl", texts)
    for name in ("saved", "files"):
        with pytest.raises(RequestError, match="no split 'validation' to evaluate on; it.* train, test; give"):
            prepare_data(source, home / "data.jsonl", eval_data=tmp_path / name, sequence_length=LENGTH)


def test_evaluation_data_that_cannot_be_used_are_refused(home: Path, tmp_path: Path) -> None:
    source = find_model(str(home / "llama"))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}))
    (tmp_path / "nothing.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}))
    (tmp_path / "train.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}))
    for data, other, words in (
        (home / "data.jsonl", "empty.jsonl", r"empty\.jsonl holds no documents"),
        (home / "data.jsonl", "none.jsonl", r"none\.jsonl' does not exist"),
        (
            home / "data.jsonl",
            "ids.jsonl",
            r"the evaluation data .*ids\.jsonl holds token ids, and the training data .* holds text",
        ),
        (tmp_path / "train.jsonl", "ids.jsonl", "has labels, the other has none"),
        (
            tmp_path / "train.jsonl",
            "nothing.jsonl",
            r"nothing\.jsonl has no sequence of two or more tokens with something to learn",
        ),
    ):
        with pytest.raises(RequestError, match=words):
            prepare_data(source, data, eval_data=tmp_path / other, sequence_length=LENGTH)


def test_a_run_resumes_with_its_own_evaluation_data(home: Path, prepared: Prepare, tmp_path: Path) -> None:
    job = a_job(home, tmp_path / "run", max_steps=2, save_steps=1)
    run_job(job, prepared("llama"))
    other = prepare_data(
        find_model(str(home / "llama")), home / "data.jsonl", eval_data=home / "data.jsonl", sequence_length=LENGTH
    )
    with pytest.raises(RequestError, match="data=.* differs from the run in"):
        run_job(job.changed(resume=True), other)


# Noise on the embeddings.


def test_the_noise_is_that_of_the_trainer_step_by_step(home: Path, prepared: Prepare, tmp_path: Path, monkeypatch: Any) -> None:
    """Both draw the noise of a step from one seed, and get the same micro-batches."""
    alpha, num_steps = 5.0, 3
    batches: list[dict[str, torch.Tensor]] = []
    real_queue, real_passes = TrainStep.queue, TrainStep.accumulate

    def seeded_queue(self: TrainStep, batch: Any, **options: Any) -> Any:
        torch.manual_seed(len(batches))
        return real_queue(self, batch, **options)

    def recorded_passes(self: TrainStep, micro_batch: Any, *arguments: Any, **options: Any) -> Any:
        batches.append({name: tensor.clone() for name, tensor in to_tensors(micro_batch, "cpu").items()})
        return real_passes(self, micro_batch, *arguments, **options)

    monkeypatch.setattr(TrainStep, "queue", seeded_queue)
    monkeypatch.setattr(TrainStep, "accumulate", recorded_passes)
    plan = a_plan(per_device_train_batch_size=GLOBAL_BATCH, gradient_accumulation_steps=1)
    options = {"max_steps": num_steps, "warmup_steps": 0, "lr_scheduler_type": "constant", "max_grad_norm": 1.0}
    source = tmp_path / "start"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(find_model(str(home / "llama")).hf_config).save_pretrained(source)
    job = a_job(home, tmp_path / "run", plan=plan, neftune_noise_alpha=alpha, **options)
    record = run_job(job.changed(model_reference=str(source), from_config=False), prepared("llama"))
    quiet = run_job(
        job.changed(
            model_reference=str(source),
            from_config=False,
            output=str(tmp_path / "quiet"),
            arguments=job.arguments.changed(neftune_noise_alpha=None),
        ),
        prepared("llama"),
    )
    recorded = batches[:num_steps]

    class Seeding(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            torch.manual_seed(state.global_step)

    class FixedBatches(Trainer):
        def get_train_dataloader(self) -> Any:
            return recorded

    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"), use_cpu=True, report_to=[], logging_steps=1, save_strategy="no",
        max_steps=num_steps, neftune_noise_alpha=alpha, learning_rate=job.arguments.learning_rate, lr_scheduler_type="constant",
        disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(source)
    trainer = FixedBatches(model=model, args=arguments, train_dataset=[{}] * 3, callbacks=[Seeding()])
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses = [loss for _, loss in record.details["loss_curve"]]
    assert losses == pytest.approx(expected, abs=2e-5)
    assert all(abs(one - other) > 1e-4 for one, (_, other) in zip(losses, quiet.details["loss_curve"], strict=True))
    assert record.measured and record.measured.evaluation_loss == pytest.approx(
        held_out_loss(tmp_path / "run", prepared("llama")), abs=1e-4
    )


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (
            {"packing": True, "attention": "block"},
            "--neftune-noise-alpha 5 depends on the length of a row, .*--set packing=false",
        ),
        ({"num_processes": 2, "layout": {"tensor_parallel": 2}}, "tensor_parallel=2 divides .* use --tensor-parallel 1"),
        ({"num_processes": 2, "layout": {"context_parallel": 2}}, "context_parallel=2 divides"),
        ({"num_processes": 2, "layout": {"pipeline_parallel": 2}}, "pipeline_parallel=2 divides"),
    ],
)
def test_a_plan_with_other_noise_is_refused(
    choices: dict[str, Any],
    words: str,
    home: Path,
    prepared: Prepare,
    tmp_path: Path,
) -> None:
    job = a_job(home, tmp_path / "run", plan=a_plan(**choices), neftune_noise_alpha=5.0)
    with pytest.raises(RequestError, match=words):
        run_job(job, prepared("llama"))


@pytest.mark.parametrize("text", ["packing=true", "tensor_parallel=2", "context_parallel=2", "pipeline_parallel=2"])
def test_an_assignment_with_other_noise_is_refused_before_planning(text: str) -> None:
    with pytest.raises(RequestError, match=f"^--neftune-noise-alpha needs {text.partition('=')[0]}=.*, and {text} is set"):
        fixed_for_neftune(("precision=fp32", text))
    fixed = fixed_for_neftune(("packing=False", "num_processes=2"))
    assert {*fixed} == {
        "packing=False", "num_processes=2", "tensor_parallel=1", "context_parallel=1", "pipeline_parallel=1",
    }  # fmt: skip


# Trackers.


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return the scalars of TensorBoard's event files, by name and step. A file holds records of length, checksum, event."""
    from tensorboardX.proto.event_pb2 import Event as BoardEvent

    values: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = BoardEvent.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    values.setdefault(value.tag, {})[event.step] = value.simple_value
    return values


@pytest.mark.parametrize("logging_steps", [0, 2])
def test_a_tracker_gets_the_numbers_of_the_run(logging_steps: int, home: Path, prepared: Prepare, tmp_path: Path) -> None:
    output = tmp_path / "run"
    arguments = Arguments(max_steps=1, logging_steps=logging_steps, eval_steps=3)
    request = TrainRequest(model="MODEL", data="DATA", output=output, report_to=("tensorboard",), arguments=arguments)
    events: list[Event] = []
    job = a_job(home, output, max_steps=6, logging_steps=logging_steps, eval_steps=3)
    with RunTrackers(request, events.append) as trackers:
        trackers.begin()
        run_job(job, prepared("llama"), on_event=trackers.event)
    values = scalars(output / TENSORBOARD_FOLDER)
    steps = [event for event in events if isinstance(event, StepDone)]
    logged = {event.step: event for event in steps if event.logged_loss is not None or not logging_steps}
    expected = {
        "train/loss": {step: event.logged_loss or event.loss for step, event in logged.items()},
        "train/learning_rate": {step: event.learning_rate for step, event in logged.items()},
        "train/grad_norm": {step: event.gradient_norm or math.nan for step, event in logged.items()},
        "train/tokens_per_second": {step: event.tokens_per_second for step, event in logged.items()},
        "eval/loss": evaluations(events),
    }
    assert len(logged) == (3 if logging_steps else 6) and len(expected["eval/loss"]) == 2
    for name, by_step in expected.items():
        assert values[name] == pytest.approx(by_step, rel=1e-6), name
    run_job(job.changed(overwrite=True), prepared("llama"))  # the folder of the events is the run's own
    assert not (output / TENSORBOARD_FOLDER).exists()


def test_a_tracker_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "mlflow", ("no_such_package",))
    request = TrainRequest(model="MODEL", data="DATA", output=tmp_path / "run", report_to=("mlflow",))
    with pytest.raises(RequestError, match=r"--report-to mlflow needs the package no_such_package; pip install no_such_package"):
        RunTrackers(request, lambda event: None).begin()
    assert not (tmp_path / "run").exists()
