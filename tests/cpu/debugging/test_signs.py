"""Faults that a run survives, planted in upshift.Trainer: a slow data loader, a recompile storm, a callback that keeps memory.
Each is told while the run goes on, and by `upshift doctor RUN_DIR` afterwards."""

from __future__ import annotations

import json
import mmap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import upshift
from upshift.debugging.step_faults import CHECK_INTERVAL, LEAK_BYTES, LEAK_STEPS, MIN_STEPS, SETTLING
from upshift.training.loop.monitor import ATTRIBUTED_STEPS, RunMonitor
from upshift.units import GIB, MIB


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, count: int, *, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        tokens = [(row + place) % 60 for place in range(8)]
        return {"input_ids": tokens, "labels": tokens}


class Tagged(LlamaForCausalLM):
    """Its graph depends on a word, which a callback changes."""

    tag = "begin"

    def forward(self, *arguments: Any, **named: Any) -> Any:
        output = super().forward(*arguments, **named)
        output.loss = output.loss * (2.0 if self.tag.endswith("never") else 1.0)
        return output


class Tags(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **named: Any) -> None:
        getattr(model, "_orig_mod", model).tag = f"step {state.global_step}"


class KeepsTensors(TrainerCallback):
    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def on_step_end(self, *_: Any, **named: Any) -> None:
        fresh = mmap.mmap(-1, 3 * LEAK_BYTES // LEAK_STEPS)  # not of what a process that ran other tests has free
        self.kept.append(torch.frombuffer(fresh, dtype=torch.uint8).fill_(1))


def run(output: Path, *, steps: int, rows: Rows, callbacks: tuple[TrainerCallback, ...] = (), **more: Any) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    arguments = TrainingArguments(
        output_dir=str(output), max_steps=steps, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False, **more,
    )  # fmt: skip
    model = Tagged(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=32))
    upshift.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks), trial_seconds=0.0).train()


def found(upshift_command: Command, output: Path) -> list[dict[str, Any]]:
    answer = upshift_command("doctor", output, "--json")
    assert answer.code == 0, answer.err
    return list(json.loads(answer.out)["findings"])


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path_factory.getbasetemp() / "signs-cache"))


def test_a_slow_data_loader_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str], upshift: Command) -> None:
    run(tmp_path, steps=SETTLING + MIN_STEPS + CHECK_INTERVAL, rows=Rows(64, seconds=0.06))
    assert "data loader: " in capfd.readouterr().err
    [finding] = found(upshift, tmp_path)
    assert finding["subject"] == "data loader" and "dataloader_num_workers" in finding["fix"]


def test_a_recompile_storm_is_named_with_the_reason(tmp_path: Path, upshift: Command) -> None:
    run(tmp_path, steps=13, rows=Rows(64), callbacks=(Tags(),), torch_compile=True, torch_compile_backend="eager")
    findings = {finding["subject"]: finding for finding in found(upshift, tmp_path)}
    assert "tag" in findings["recompiles"]["evidence"], findings
    assert "torch_compile=off" in findings["recompiles"]["fix"]


def test_a_callback_that_keeps_tensors_is_named(tmp_path: Path, upshift: Command) -> None:
    callback = KeepsTensors()
    run(tmp_path, steps=SETTLING + 2 * LEAK_STEPS + ATTRIBUTED_STEPS + 2 * CHECK_INTERVAL, rows=Rows(256), callbacks=(callback,))
    findings = {finding["subject"]: finding for finding in found(upshift, tmp_path)}
    assert "memory leak in KeepsTensors" in findings, findings
    assert "loss.item()" in findings["memory leak in KeepsTensors"]["fix"]
    assert not [name for name in vars(callback) if name.startswith("on_")]  # what was put around its methods is gone


def test_a_run_without_faults_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, steps=SETTLING + 2 * LEAK_STEPS + 4, rows=Rows(256))
    told = capfd.readouterr().err
    assert "memory leak" not in told and "recompiles" not in told


@pytest.mark.parametrize(("unused", "is_urgent"), [(0, True), (40 * GIB, False)])
def test_what_torch_holds_and_no_tensor_has_is_free(
    unused: int, is_urgent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One window of growth is enough where the memory of a GPU would be full soon."""
    held = GIB
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: held + unused)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 80 * GIB))
    found: list[Any] = []
    monitor = RunMonitor(tmp_path, rank=0, device="cuda", data_fix="", on_finding=found.append)
    for _ in range(SETTLING + LEAK_STEPS + ATTRIBUTED_STEPS + CHECK_INTERVAL):
        monitor.begin_step()
        held += 16 * MIB
    assert bool(found) == is_urgent
