"""A run that is killed at any change of a file, and resumed by the same line, ends as if it had never stopped."""

# ruff: noqa: F811  fixtures of another file
from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_models import write_jsonl
from segmenters import make_pictures, save_segmenter, write_masks
from snapshots import snapshots
from test_train import a_job, a_plan, home, prepared  # noqa: F401  fixtures
from text_models import named, save_text_model

import upshift
from upshift.errors import Interrupted, RequestError
from upshift.models.source import find_model
from upshift.record import Record
from upshift.training.checkpoint.checkpoint import check_output_directory
from upshift.training.checkpoint.directory import TASK_RUN_NAME
from upshift.training.data.data_options import DataOptions
from upshift.training.job.job import run_job
from upshift.training.loop.events import Evaluated
from upshift.training.run import Watcher, train
from upshift.training.tasks.contents import digest_of
from upshift.training.tasks.prepare import find_task_model, prepare_task
from upshift.training.tasks.rows import read_task_rows

CHECKPOINTS = "trainer-checkpoints"
WHAT_ENDS_ALIKE = ("loss_curve", "evaluations", "evaluation_metrics", "metrics", "end", "steps", "model_step")
OF_TASK = {  # the best model is that of step 4, and the run ends early after step 8
    "max_steps": 10, "eval_steps": 2, "learning_rate": 0.1, "lr_scheduler_type": "constant", "load_best": True,
    "early_stopping_patience": 2, "logging_steps": 3,
}  # fmt: skip
POINTS = {
    "before the first checkpoint": rf"open {CHECKPOINTS}/checkpoint-2\.tmp/optimizer\.pt",
    "between two checkpoints": rf"mkdir {CHECKPOINTS}/checkpoint-4\.tmp",
    "while an old checkpoint is removed": rf"rmdir {CHECKPOINTS}/checkpoint-2\.removed\.tmp",
    "after the last step": r"mkdir model\.tmp",
}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier with dropout, and texts with labels. Those that are held out have the opposite ones."""
    folder = tmp_path_factory.mktemp("labelled")
    save_text_model(folder / "model", "BertForSequenceClassification", hidden_dropout_prob=0.1, **named("good", "bad"))
    draws = random.Random(0)
    for split, number, labels in (("train", 24, ("good", "bad")), ("validation", 7, ("bad", "good"))):
        rows = []
        for _ in range(number):
            kind = draws.randrange(2)
            words = [*draws.choices(("lives", "in", "rome", "bob"), k=draws.randint(0, 4)), ("good", "bad")[kind]]
            rows.append({"text": " ".join(words), "label": labels[kind]})
        write_jsonl(folder / "rows" / f"{split}.jsonl", rows)
    return folder


def run_task(labelled: Path, output: Path, *, resume: bool = False, arguments: Any = OF_TASK, **options: Any) -> Record:
    options = {"global_batch": 4, "fixed": ("per_device_train_batch_size=2", "precision=fp32", "torch_compile=off")} | options
    record = upshift.train(
        str(labelled / "model"),
        str(labelled / "rows"),
        output=output,
        resume=resume,
        trial_seconds=0,
        arguments=arguments,
        **options,
    )
    assert record is not None
    return record


@pytest.fixture(scope="module")
def killed(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record, bytes]:
    """The folder with copies of a run, the run's record, and its final weights."""
    folder = tmp_path_factory.mktemp("killed")
    with snapshots(folder / "out", folder / "copies", POINTS):
        record = run_task(labelled, folder / "out")
    assert record.details["end"] == "early stopping" and record.details["model_step"] == 4
    return folder, record, (folder / "out" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("point", POINTS)
def test_a_task_ends_as_if_it_had_never_stopped(point: str, labelled: Path, killed: tuple[Path, Record, bytes]) -> None:
    """Losses, evaluations, the patience, the best model and the files, to the bit. A file of the user stays."""
    folder, whole, weights = killed
    output = folder / "out"  # the state of a checkpoint names the folder of the best one
    shutil.rmtree(output)
    shutil.copytree(folder / "copies" / point, output)
    has_checkpoint = any((output / CHECKPOINTS).glob("checkpoint-[0-9]"))
    if has_checkpoint:
        (output / "notes.txt").write_text("mine")
    resumed = run_task(labelled, output, resume=True)
    for name in WHAT_ENDS_ALIKE:
        assert resumed.details[name] == whole.details[name], name
    assert resumed.measured and whole.measured
    assert resumed.measured.loss == whole.measured.loss and resumed.measured.evaluation_loss == whole.measured.evaluation_loss
    assert (output / "model.safetensors").read_bytes() == weights
    assert not [path for path in output.rglob("*.tmp")] and (output / "notes.txt").exists() == has_checkpoint


def test_a_finished_task_takes_no_further_step(labelled: Path, tmp_path: Path) -> None:
    short = {"max_steps": 2, "learning_rate": 1e-2}
    whole = run_task(labelled, tmp_path / "whole", arguments={"max_steps": 3, "save_steps": 3, **{"learning_rate": 1e-2}})
    run_task(labelled, tmp_path / "out", arguments=short)
    with pytest.raises(RequestError, match="is finished and has no checkpoint"):
        run_task(labelled, tmp_path / "out", arguments=short, resume=True)
    again = run_task(
        labelled, tmp_path / "whole", arguments={"max_steps": 3, "save_steps": 3, "learning_rate": 1e-2}, resume=True
    )
    assert again.details["loss_curve"] == whole.details["loss_curve"]  # not a step more, as transformers would take


def test_a_stopped_task_without_saved_steps_keeps_its_patience(labelled: Path, tmp_path: Path) -> None:
    """Each evaluation is better than the one before, so that the patience never ends."""
    arguments = {"max_steps": 5, "eval_steps": 1, "learning_rate": 3e-3, "early_stopping_patience": 2}
    options: dict[str, Any] = {"arguments": arguments, "eval_data": str(labelled / "rows" / "train.jsonl"), "global_batch": 24}
    options["fixed"] = ("per_device_train_batch_size=24", "precision=fp32", "torch_compile=off")

    def interrupt(event: Any) -> None:
        if isinstance(event, Evaluated) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="after step 3 of 5"):
        run_task(labelled, tmp_path / "out", watcher=Watcher(event=interrupt), **options)
    resumed = run_task(labelled, tmp_path / "out", resume=True, **options)
    losses = [loss for _, loss in resumed.details["evaluations"]]
    assert losses == sorted(losses, reverse=True) and len(losses) == 5
    assert resumed.details["end"] == "finished" and resumed.details["steps"] == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arguments": {**OF_TASK, "learning_rate": 0.5}}, "learning_rate=0.5 differs .* has learning_rate=0.1"),
        ({"sequence_length": 7}, "sequence_length=7 differs .* has no sequence_length"),
        ({"lora_rank": 2}, "you gave --lora-rank 2, and the run in .* has no --lora-rank"),
        ({"long_rows": "drop"}, "long_rows=drop differs"),
    ],
    ids=str,
)
def test_a_task_with_another_option_is_refused_by_name(
    change: dict[str, Any], words: str, labelled: Path, killed: tuple[Path, Record, bytes], tmp_path: Path
) -> None:
    folder, _, _ = killed
    shutil.copytree(folder / "copies" / "between two checkpoints", tmp_path / "out")
    with pytest.raises(RequestError, match=words):
        run_task(labelled, tmp_path / "out", resume=True, **change)


def test_a_task_may_find_its_rows_elsewhere_and_no_others(
    labelled: Path, killed: tuple[Path, Record, bytes], tmp_path: Path
) -> None:
    folder, whole, _ = killed
    shutil.copytree(labelled, tmp_path / "moved")
    output = tmp_path / "out"
    shutil.copytree(folder / "copies" / "between two checkpoints", output)
    for split in ("train", "validation"):
        file = tmp_path / "moved" / "rows" / f"{split}.jsonl"
        rows = file.read_text()
        file.write_text(rows.replace("good", "bad", 1))
        with pytest.raises(RequestError, match=f"--data {file.parent} has other rows, labels, images or sounds than the run"):
            run_task(tmp_path / "moved", output, resume=True)
        file.write_text(rows)
    resumed = run_task(tmp_path / "moved", output, resume=True)
    assert resumed.details["loss_curve"] == whole.details["loss_curve"]


def change_bytes(file: Path) -> None:
    """Change one byte, so that the size of the file stays."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


CHANGES: dict[str, Any] = {
    "a file has other bytes": change_bytes,
    "a file is longer": lambda file: file.write_bytes(file.read_bytes() + b"0"),
    "a file is gone": lambda file: file.unlink(),
    "a file has another name": lambda file: file.rename(file.with_stem("other")),
    "a file has another label": lambda file: file.parent.rename(file.parents[1] / "dog"),
}


@pytest.mark.parametrize("suffix", [".png", ".wav"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_image_or_sound_is_found(change: str, suffix: str, tmp_path: Path) -> None:
    """In a folder for each label, and in a table, whose rows have the same text. A copy of the folder has the same digest."""
    for label in ("cat", "owl"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "data" / label / f"{number}{suffix}").write_bytes(f"content of {label} {number}".encode())
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    tables = [write_jsonl(tmp_path / name / "rows.json", [{"file": {"path": f"cat/1{suffix}"}}]) for name in ("data", "copy")]
    table, copied_table = (digests(file) for file in tables)
    for file in tables:
        file.unlink()
    before = digests(tmp_path / "data")
    assert digests(tmp_path / "copy") == before and table == copied_table
    CHANGES[change](tmp_path / "data" / "cat" / f"1{suffix}")
    assert digests(tmp_path / "data") != before
    write_jsonl(tables[0], [{"file": {"path": f"cat/1{suffix}"}}])
    assert digests(tables[0]) != table


VALUES: tuple[Any, ...] = (
    [1, 11], [11, 1], [111], [1, 1, 1], [[1], 11], [[1, 11]], ["1", 11], ["1, 11"], {"1": 11}, {"a": 1}, {"a": [1]}, None, True,
    1, 1.0, "1", "", [], {},
)  # fmt: skip


def test_rows_with_other_values_have_other_digests(tmp_path: Path) -> None:
    found = {digests(write_jsonl(tmp_path / "rows.jsonl", [{"x": value, "y": [1]}])) for value in VALUES}
    found |= {digests(write_jsonl(tmp_path / "rows.jsonl", [{"x": value}, {"x": [1]}])) for value in VALUES}
    assert len(found) == 2 * len(VALUES)


def test_the_order_of_columns_does_not_count(tmp_path: Path) -> None:
    sorted_row = {"a": {"p": 1, "q": [2, {"x": 1, "y": 2}]}, "b": 3}
    other_order = {"b": 3, "a": {"q": [2, {"y": 2, "x": 1}], "p": 1}}
    one, other = (digests(write_jsonl(tmp_path / "rows.jsonl", [row])) for row in (sorted_row, other_order))
    assert one == other


@pytest.mark.parametrize(
    "row",
    [
        {"image": "1.jfif"},
        {"audio": "1.opus"},
        {"image": {"bytes": None, "path": "1"}},
        {"images": ["other.png", "1.heic"]},
        {"messages": [{"role": "user", "content": [{"type": "image", "path": "file://1.avif"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "1.jxl"}}]}]},
    ],
    ids=str,
)
def test_a_file_of_any_suffix_counts_in_a_column_of_files(row: dict[str, Any], tmp_path: Path) -> None:
    name = next(name for name in ("1.jfif", "1.opus", "1.heic", "1.avif", "1.jxl", "1") if f"{name}'" in str(row))
    (tmp_path / name).write_bytes(b"a file")
    table = write_jsonl(tmp_path / "rows.jsonl", [row])
    before = digests(table)
    change_bytes(tmp_path / name)
    assert digests(table) != before


def test_names_of_classes_beside_label_images_are_of_the_data(tmp_path: Path) -> None:
    """Files are read for it only where it is asked for."""
    pytest.importorskip("PIL")
    model = find_model(save_segmenter(tmp_path / "model", "segformer", "sky", "road"))
    data = write_masks(tmp_path / "data", make_pictures(tmp_path / "data", *[(32, 32)] * 3, classes=2))
    options = DataOptions(eval_size=1)
    identities = []
    for names in (["sky", "road"], ["road", "sky"]):
        (tmp_path / "data" / "id2label.json").write_text(json.dumps(dict(enumerate(names))))
        task = find_task_model(model, str(data), options)
        assert task is not None
        steps: list[tuple[int, int]] = []
        prepared = prepare_task(model, task, str(data), options, identifying=lambda *step: steps.append(step))  # noqa: B023
        assert steps == [(1, 3), (2, 3), (3, 3)]
        identities.append(prepared.data_identity)
        assert not prepare_task(model, task, str(data), options).data_identity
    assert identities[0]["rows"] != identities[1]["rows"] and identities[0]["labels"] == identities[1]["labels"]


def test_a_run_file_of_the_version_before_names_its_data(
    labelled: Path, killed: tuple[Path, Record, bytes], tmp_path: Path
) -> None:
    """It has paths, and no digests of rows."""
    output = tmp_path / "out"
    shutil.copytree(killed[0] / "copies" / "between two checkpoints", output)
    file = output / TASK_RUN_NAME
    run = {name: value for name, value in json.loads(file.read_text()).items() if name not in ("rows", "held_out_rows", "labels")}
    for other in ({"data": str(tmp_path)}, {"data": str((labelled / "rows").resolve()), "eval_data": str(tmp_path)}):
        file.write_text(json.dumps({**run, "eval_data": None, **other}))
        with pytest.raises(RequestError, match=f"differs from the run in .* which has [a-z_]*={tmp_path}"):
            run_task(labelled, output, resume=True)
    file.write_text(json.dumps({**run, "data": str((labelled / "rows").resolve()), "eval_data": None}))
    assert run_task(labelled, output, resume=True).details["loss_curve"] == killed[1].details["loss_curve"]


@pytest.mark.parametrize(("content", "words"), [("{}", "has no learning rate"), ("[]", "is not the file of a run")])
def test_a_run_file_without_a_learning_rate_is_refused(
    content: str, words: str, labelled: Path, killed: tuple[Path, Record, bytes], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    shutil.copytree(killed[0] / "copies" / "between two checkpoints", output)
    (output / TASK_RUN_NAME).write_text(content)
    arguments = {name: value for name, value in OF_TASK.items() if name != "learning_rate"}
    with pytest.raises(RequestError, match=words):
        run_task(labelled, output, resume=True, find_learning_rate=True, arguments=arguments)


def digests(data: Path) -> str:
    return digest_of(read_task_rows(str(data), DataOptions(eval_size=0)).training, None)


LOOP_POINTS = {
    "while a checkpoint gets its name": r"rename checkpoint-2\.tmp",
    "while the run file is replaced": r"rename upshift_run\.json\.tmp",
    "while the final model is written": r"rename model\.tmp/.*",
}


@pytest.fixture(scope="module")
def stopped_loop(home: Path, prepared: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Record]:
    folder = tmp_path_factory.mktemp("loop")
    job = a_job(
        home, folder / "out", model="gpt2", plan=a_plan(), max_steps=6, eval_steps=2, load_best=True, logging_steps=2,
        early_stopping_patience=2,
    )  # fmt: skip
    with snapshots(folder / "out", folder / "copies", LOOP_POINTS):
        record = run_job(job, prepared("gpt2"))
    return folder, job, record


@pytest.mark.parametrize("point", LOOP_POINTS)
def test_the_loop_ends_as_if_it_had_never_stopped(
    point: str,
    prepared: Any,
    stopped_loop: tuple[Path, Any, Record],
    tmp_path: Path,
) -> None:
    folder, job, whole = stopped_loop
    shutil.copytree(folder / "copies" / point, tmp_path / "out")
    if point == "while the final model is written":  # and, as after a kill a moment earlier, the last checkpoint is not named yet
        (tmp_path / "out" / "latest").replace(tmp_path / "out" / "latest.tmp")
        (tmp_path / "out" / "latest").write_text("checkpoint-4\n")
    resumed = run_job(job.changed(output=str(tmp_path / "out"), resume=True), prepared("gpt2"))
    for name in ("loss_curve", "evaluations", "end", "steps", "model_step"):
        assert resumed.details[name] == whole.details[name], name
    assert [entry["loss"] for entry in resumed.details["logged_steps"]] == [
        entry["loss"] for entry in whole.details["logged_steps"]
    ]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "out" / "model.safetensors").read_bytes()
    assert not [path for path in (tmp_path / "out").rglob("*.tmp")]
    assert (tmp_path / "out" / "latest").read_text() == (folder / "out" / "latest").read_text()


@pytest.fixture
def failed_run(tmp_path: Path) -> Iterator[Path]:
    """A folder as a run leaves it that died before its first checkpoint."""
    folder = tmp_path / "out"
    (folder / "upshift_report").mkdir(parents=True)
    (folder / "checkpoint-2.tmp").mkdir()
    (folder / "upshift_tensorboard").mkdir()
    (folder / "upshift_tensorboard" / "events").write_text("curves")
    for name in ("upshift_run.json", "upshift_out_of_memory.jsonl", "upshift_report/rank-0.json", "checkpoint-2.tmp/config.json"):
        (folder / name).write_text("{}")
    yield folder


def test_a_run_that_failed_before_its_first_checkpoint_leaves_the_folder_to_the_next(
    failed_run: Path,
    home: Path,
    prepared: Any,
) -> None:
    job = a_job(home, failed_run, model="gpt2", max_steps=1)
    assert run_job(job, prepared("gpt2")).details["steps"] == 1
    assert not (failed_run / "upshift_out_of_memory.jsonl").exists() and not (failed_run / "checkpoint-2.tmp").exists()
    assert (failed_run / "upshift_tensorboard" / "events").read_text() == "curves"


@pytest.mark.parametrize("kept", ["notes.txt", "checkpoint-1", "upshift_reference.npz", "model.safetensors"])
def test_a_folder_with_something_of_value_is_not_taken(kept: str, failed_run: Path, home: Path) -> None:
    (failed_run / kept).write_text("of value")
    with pytest.raises(RequestError, match=rf"is not empty \({kept}\); use --resume .*--overwrite"):
        train(str(home / "llama"), str(home / "data.jsonl"), output=failed_run, from_config=True)
    assert (failed_run / "upshift_report" / "rank-0.json").exists()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("own_files", [("upshift_run.json",), ("trainer-checkpoints", "trainer_run.json")])
def test_a_run_of_another_kind_takes_the_folder_too(own_files: tuple[str, ...], resume: bool, failed_run: Path) -> None:
    """The loop and the tasks write files of other names. A task writes its findings beside its checkpoints."""
    (failed_run / "trainer-checkpoints" / "upshift_report").mkdir(parents=True)
    for name in ("trainer_run.json", "trainer-checkpoints/upshift_out_of_memory.jsonl"):
        (failed_run / name).write_text("{}")
    check_output_directory(failed_run, overwrite=False, resume=resume, own_files=own_files)
    assert resume or [path.name for path in failed_run.iterdir()] == ["upshift_tensorboard"]
    (failed_run / "trainer-checkpoints").mkdir(exist_ok=True)
    (failed_run / "trainer-checkpoints" / "checkpoint-2").mkdir()
    with pytest.raises(RequestError, match=r"is not empty \(trainer-checkpoints\)"):
        check_output_directory(failed_run, overwrite=False, resume=False, own_files=own_files)
