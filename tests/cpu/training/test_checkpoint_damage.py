"""A checkpoint whose files are not as they were saved is never resumed: any file, any kind of damage, and a line that says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import Run, adamw, gpt2, save, tokenizer
from test_train import Stop, a_job, a_plan, curve, home, prepared  # noqa: F401  fixtures

from upshift.errors import Interrupted, RequestError
from upshift.training.checkpoint.checkpoint import (
    check_output_directory,
    find_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_model,
)
from upshift.training.checkpoint.state import STATE_NAME, SavedState
from upshift.training.data.dataset import TrainingData
from upshift.training.job.job import run_job
from upshift.training.loop.state import OWN_FILES, RUN_NAME


def flipped(place: float) -> Callable[[Path], None]:
    """One bit of one byte."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(int(place * len(content)), len(content) - 1)] ^= 1
        path.write_bytes(content)

    return damage


def half_zeroed(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "first byte": flipped(0.0),
    "a byte at a third": flipped(1 / 3),
    "a byte at 0.9": flipped(0.9),
    "last byte": flipped(1.0),
    "half zeroed": half_zeroed,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "empty": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def peft_gpt2() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


@pytest.mark.parametrize("make", [gpt2, peft_gpt2], ids=["whole", "adapter"])
def test_no_damage_of_any_file_is_resumed(tmp_path: Path, make: Callable[[], Any]) -> None:
    run = Run(make(), adamw)
    for step in (1, 2):
        run.train(range(step - 1, step))
        save(tmp_path, run.model, run.optimizer, step, tokenizer=tokenizer())
    whole = tmp_path / "whole"
    (tmp_path / "checkpoint-2").rename(whole)
    names = sorted(path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file())
    assert {STATE_NAME, "optimizer.safetensors", "rng.safetensors", "tokenizer.json"} < set(names)
    changed = whole.with_name("checkpoint-2")
    for name in names:
        for words, damage in DAMAGES.items():
            shutil.rmtree(changed, ignore_errors=True)
            shutil.copytree(whole, changed)
            damage(changed / name)
            found = find_checkpoints(tmp_path)
            assert found.newest is not None and found.newest.name == "checkpoint-1", (name, words)
            (path, reason), *_ = found.damaged
            assert path == changed and name in reason and reason.isprintable(), (name, words, reason)
            before = [tensor.clone() for tensor in run.model.state_dict().values()]
            with pytest.raises(RequestError):
                load_checkpoint(changed, model=run.model, optimizer=run.optimizer)
            assert all(torch.equal(a, b) for a, b in zip(before, run.model.state_dict().values(), strict=True)), (name, words)
    shutil.rmtree(changed)
    shutil.copytree(whole, changed)
    assert find_checkpoints(tmp_path).newest == changed


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pieces-00000.json", "adapter_model.safetensors", "vocab.txt"])
def test_a_file_that_was_not_saved_there(name: str, tmp_path: Path) -> None:
    model = gpt2()
    for step in (1, 2):
        save(tmp_path, model, adamw(model), step)
    (tmp_path / "checkpoint-2" / name).write_text("{}")
    found = find_checkpoints(tmp_path)
    assert found.newest is not None and found.newest.name == "checkpoint-1" and name in found.damaged[0][1]
    (tmp_path / "checkpoint-2" / name).rename(tmp_path / "checkpoint-2" / "notes")
    assert find_checkpoints(tmp_path).damaged == ()


def test_files_of_another_checkpoint(tmp_path: Path) -> None:
    """Of the same shapes, and so of the same lengths."""
    run = Run(gpt2(), adamw)
    for step in (1, 2):
        run.train(range(step - 1, step))
        save(tmp_path, run.model, run.optimizer, step)
    one, two = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (one / name).stat().st_size == (two / name).stat().st_size
        kept = (two / name).read_bytes()
        shutil.copyfile(one / name, two / name)
        assert find_checkpoints(tmp_path).newest == one
        (two / name).write_bytes(kept)
    one.rename(tmp_path / "checkpoint-3")
    found = find_checkpoints(tmp_path)
    assert found.newest == two and "state of step 1" in found.damaged[0][1]


def interrupted(home: Path, data: TrainingData, output: Path, **options: Any) -> Any:  # noqa: F811
    job = a_job(home, output, model="gpt2", max_steps=5, save_steps=1, **options)
    with pytest.raises(Interrupted):
        run_job(job, data, on_event=Stop(3))
    return job.changed(resume=True)


def test_a_run_goes_on_from_the_whole_one_or_is_refused(
    home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path, caplog: Any  # noqa: F811
) -> None:
    data = prepared("gpt2")
    straight = run_job(a_job(home, tmp_path / "one", model="gpt2", max_steps=5), data)
    job = interrupted(home, data, tmp_path / "two")
    newest = newest_checkpoint(tmp_path / "two")
    assert newest is not None and newest.name == "checkpoint-3"
    half_zeroed(newest / "model.safetensors")
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    resumed = run_job(job, data)
    assert resumed.details["resumed_from_step"] == 2 and curve(resumed) == curve(straight)
    assert "checkpoint-3" in caplog.text and "goes on from checkpoint-2" in caplog.text

    flipped(0.5)(tmp_path / "three" / "checkpoint-2" / "optimizer.safetensors")
    left = sorted(path.name for path in (tmp_path / "three").rglob("*"))
    refused = job.changed(output=str(tmp_path / "three"))
    words = r"no checkpoint in .* is whole .*model.safetensors.*optimizer.safetensors.*--overwrite"
    with pytest.raises(RequestError, match=words):
        run_job(refused, data)
    assert sorted(path.name for path in (tmp_path / "three").rglob("*")) == left


@pytest.mark.parametrize("damage", ["empty", "truncated", "a byte at a third", "deleted"])
def test_a_damaged_run_file_says_what_to_do(
    damage: str, home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path  # noqa: F811
) -> None:
    job = interrupted(home, prepared("gpt2"), tmp_path / "run")
    DAMAGES[damage](tmp_path / "run" / RUN_NAME)
    with pytest.raises(RequestError, match=rf"{RUN_NAME}.*; copy it back from a backup, or train on from the weights"):
        run_job(job, prepared("gpt2"))
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    again = job.changed(resume=False, overwrite=True, stop_after_tokens=1)
    assert run_job(again, prepared("gpt2")).details["steps"] == 1


def test_a_checkpoint_of_another_run_is_refused(
    home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path  # noqa: F811
) -> None:
    data = prepared("gpt2")
    job = interrupted(home, data, tmp_path / "one")
    interrupted(home, data, tmp_path / "two", seed=7)
    shutil.rmtree(tmp_path / "one" / "checkpoint-3")
    shutil.copytree(tmp_path / "two" / "checkpoint-3", tmp_path / "one" / "checkpoint-3")
    with pytest.raises(RequestError, match="checkpoint-3 is of another run than .*move it away"):
        run_job(job, data)
    shutil.rmtree(tmp_path / "one" / "checkpoint-3")
    assert run_job(job, data).details["resumed_from_step"] == 2


def test_files_of_ranks(
    home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path  # noqa: F811
) -> None:
    """Every rank's own checksums are in the list, and hold."""
    plan = a_plan(num_processes=2, layout={"fully_shard": "weights", "shard_size": 2}, per_device_train_batch_size=2)
    run_job(a_job(home, tmp_path, plan=plan, max_steps=2, save_steps=1), prepared("llama"))
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "checkpoint-2"
    saved = SavedState.read(newest)
    assert {"weights-00001.safetensors", "optimizer-00001.safetensors", "pieces-00001.json"} < set(saved.checksums)
    assert saved.checksums.keys() == saved.files.keys()
    for name in saved.files:
        kept = (newest / name).read_bytes()
        flipped(0.7)(newest / name)
        found = find_checkpoints(tmp_path).newest
        assert found is not None and found.name == "checkpoint-1", name
        (newest / name).write_bytes(kept)
    assert find_checkpoints(tmp_path).newest == newest


def test_a_damaged_list_of_the_final_model(tmp_path: Path) -> None:
    save_model(tmp_path, gpt2(), None)
    for content in (b"", b"{", b"\xff", b"7"):
        (tmp_path / "upshift_model.json").write_bytes(content)
        with pytest.raises(RequestError, match=r"upshift_model.json is damaged.*another output directory"):
            check_output_directory(tmp_path, overwrite=True, resume=False, own_files=OWN_FILES)
        assert json.loads((tmp_path / "config.json").read_text())
