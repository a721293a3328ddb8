"""Checkpoints of a Trainer: exact resume, no pickle, killed processes, full disks, and steps that do not wait for the disk."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn
from torch.optim import lr_scheduler
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import safe_globals

import upshift
from upshift.errors import JobFailed, RequestError
from upshift.training.checkpoint import async_save
from upshift.training.checkpoint import directory as checkpoint_files
from upshift.training.checkpoint.directory import find_checkpoints
from upshift.training.checkpoint.optimizer import optimizer_content
from upshift.training.hf_trainer import checkpoint_files as trainer_files
from upshift.training.hf_trainer import save as saving
from upshift.training.hf_trainer.evaluation import StreamedEvaluation
from upshift.training.hf_trainer.resume import CheckpointResuming
from upshift.training.hf_trainer.transformers_checkpoint import NotPlain, from_json, to_json

GPT2 = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=1)
BERT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
PICKLES = (".bin", ".pt", ".pth", ".pkl")


class T(StreamedEvaluation, CheckpointResuming, transformers.Trainer):
    pass


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)

    load, save = torch.load, torch.save

    def plain_only(*arguments: Any, **options: Any) -> Any:
        assert options.get("weights_only") is True, "a pickle"
        return load(*arguments, **options)

    def readable(value: Any, file: Any, **options: Any) -> None:
        save(value, file, **options)
        if Path(getattr(file, "name", file)).name == "training_args.bin":
            return  # transformers' own, which nothing here reads
        copy = io.BytesIO()
        save(value, copy)
        copy.seek(0)
        with safe_globals():
            assert not torch.serialization.get_unsafe_globals_in_checkpoint(copy), file

    monkeypatch.setattr(torch, "save", readable)
    monkeypatch.setattr(torch, "load", plain_only)
    yield
    torch.compiler.set_stance("default")
    assert "upshift-save" not in [thread.name for thread in threading.enumerate()], "a save is still under way"


def rows(count: int = 24) -> list[dict[str, list[int]]]:
    draw = np.random.default_rng(1)
    return [{"input_ids": (tokens := draw.integers(5, 64, 8).tolist()), "labels": tokens} for _ in range(count)]


def plain(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in batch]) for key in batch[0]}


def masked(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Masks at random, with all three generators, as DataCollatorForLanguageModeling does with one."""
    tokens = torch.tensor([row["input_ids"] for row in batch])
    hidden = torch.rand(tokens.shape) < 0.3 + 0.1 * random.random()
    filled = torch.from_numpy(np.random.randint(5, 64, tokens.shape))
    return {"input_ids": torch.where(hidden, filled, tokens), "labels": torch.where(hidden, tokens, -100)}


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2)


def bert() -> Any:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**BERT))


class Net(nn.Module):
    """No PreTrainedModel; one weight has two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.drop(self.embedding(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


SETTINGS = {  # 6 steps an epoch
    "per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1, "save_steps": 1, "report_to": [],
    "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-2, "logging_nan_inf_filter": False,
}  # fmt: skip


def trainer(output: Path, *, cls: Any = T, model: Any = None, collate: Any = plain, others: Any = None, **settings: Any) -> Any:
    arguments = TrainingArguments(output_dir=str(output), **{**SETTINGS, **settings})
    options = {"train_dataset": rows(), "data_collator": collate, **(others or {})}
    return cls(model=gpt2() if model is None else model, args=arguments, **options)


def losses(one: Any) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in one.state.log_history if "loss" in entry}


def weights(one: Any) -> list[torch.Tensor]:
    return list(one.model.state_dict().values())


def same_run(one: Any, other: Any) -> None:
    assert losses(one) == losses(other)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def seen(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


CASES: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "dropout": (gpt2, plain, {}),
    "masking": (bert, masked, {}),
    "masking, accumulated": (bert, masked, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "a remainder": (bert, masked, {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2}),
    "no PreTrainedModel": (Net, masked, {"lr_scheduler_type": "cosine"}),
    "adafactor": (gpt2, plain, {"optim": "adafactor"}),
    "sgd": (gpt2, plain, {"optim": "sgd", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}),
    "evaluated": (gpt2, masked, {"eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_type": "reduce_lr_on_plateau"}),
    "in epochs": (gpt2, masked, {"save_strategy": "epoch"}),
    "clipped bf16": (gpt2, plain, {"bf16": True, "max_grad_norm": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_resuming_is_exact(case: str, tmp_path: Path) -> None:
    make, collate, settings = CASES[case]
    others = {"eval_dataset": rows(8)} if "eval_strategy" in settings else None
    whole = trainer(tmp_path, model=make(), collate=collate, others=others, **{"save_steps": 2, **settings})
    whole.train()
    checkpoints = sorted(tmp_path.glob("checkpoint-*"), key=checkpoint_files.step_of)
    assert len(checkpoints) == (2 if case == "in epochs" else whole.state.max_steps // 2)
    for checkpoint in checkpoints[:: 1 if len(checkpoints) < 5 else 2]:  # within an epoch and at its end
        again = trainer(tmp_path / "again", model=make(), collate=collate, others=others, save_strategy="no", **{
            key: value for key, value in settings.items() if key != "save_strategy"
        })  # fmt: skip
        torch.rand(7)  # the order of the data comes from the seed, all other random numbers from the checkpoint
        random.seed(99)
        np.random.seed(99)
        again.train(resume_from_checkpoint=str(checkpoint))
        same_run(whole, again)


@pytest.mark.parametrize("case", ["masking", "masking, accumulated"])
def test_resuming_the_planned_trainer_is_exact(case: str, tmp_path: Path) -> None:
    make, collate, settings = CASES[case]
    whole = trainer(tmp_path, cls=upshift.Trainer, model=make(), collate=collate, save_steps=2, **settings)
    whole.train()
    for step in (4, 6, 10):  # within an epoch, at its end, and in the next one
        again = trainer(tmp_path / "again", cls=upshift.Trainer, model=make(), collate=collate, save_strategy="no", **settings)
        torch.rand(7)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        same_run(whole, again)


def test_training_is_that_of_transformers(tmp_path: Path) -> None:
    """Losses, logs, checkpoints kept and trainer_state.json; only the files of tensors differ."""
    settings = {"save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}

    class Theirs(transformers.Trainer):
        def _save_optimizer_and_scheduler(self, *args: Any) -> None: ...
        def _save_rng_state(self, *args: Any) -> None: ...
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            self.model.save_pretrained(output_dir)

    ours, theirs = (
        trainer(tmp_path / "out", cls=cls, collate=masked, others={"eval_dataset": rows(8)}, **settings) for cls in (T, Theirs)
    )
    results = []
    for one in (theirs, ours):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        transformers.set_seed(42)
        one.model.load_state_dict(gpt2().state_dict())
        one.train()
        states = {
            path.parent.name: json.loads(path.read_bytes()) for path in sorted((tmp_path / "out").glob("*/trainer_state.json"))
        }
        for state in states.values():
            state["log_history"] = [
                {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second", "preparation_time"))}
                for entry in state["log_history"]
            ]
        results.append(states)
    assert results[0] == results[1] and len(results[1]) == 2
    same_run(ours, theirs)


def test_a_checkpoint_holds_no_code_and_is_a_model(tmp_path: Path) -> None:
    one = trainer(tmp_path, max_steps=2)
    one.train()
    one.save_model(str(tmp_path / "model"))
    assert not [path for path in (tmp_path / "model").iterdir() if path.suffix in PICKLES]
    assert seen(tmp_path / "checkpoint-2") == [
        "config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "optimizer_parameters.json",
        "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.json", "upshift_state.json",
    ]  # fmt: skip
    for name in ("checkpoint-2", "model"):
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path / name)
        assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), weights(one), strict=True))
    arguments = json.loads((tmp_path / "checkpoint-2" / "training_args.json").read_bytes())
    assert arguments["learning_rate"] == 1e-2 and arguments["hub_token"] == "<HUB_TOKEN>" and arguments["not_written"] == {}


def test_arguments_that_json_has_no_word_for_are_named(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    arguments.lr_scheduler_kwargs = {"schedule": len}
    trainer_files.write_arguments(tmp_path, arguments)
    assert json.loads((tmp_path / "training_args.json").read_bytes())["not_written"] == {"lr_scheduler_kwargs": "builtins.dict"}


@pytest.mark.parametrize("settings", [{"save_strategy": "best", "metric_for_best_model": "eval_loss"}, {"save_steps": 2}])
def test_the_best_model_is_kept_and_loaded(settings: dict[str, Any], tmp_path: Path) -> None:
    common = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    one = trainer(tmp_path, others={"eval_dataset": rows(8)}, learning_rate=3.0, **{**common, **settings})
    one.train()
    best = min((entry for entry in one.state.log_history if "eval_loss" in entry), key=lambda entry: entry["eval_loss"])
    assert one.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best['step']}")
    assert f"checkpoint-{best['step']}" in seen(tmp_path)
    with safe_open(Path(one.state.best_model_checkpoint) / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            assert torch.equal(file.get_tensor(name), one.model.state_dict()[name])


def test_a_model_only_checkpoint_resumes_as_a_model(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2, save_only_model=True).train()
    assert not [name for name in seen(tmp_path / "checkpoint-2") if name.startswith(("optimizer", "rng", "scheduler"))]
    again = trainer(tmp_path, max_steps=3, save_only_model=True)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def make() -> Any:
        config = peft.LoraConfig(target_modules=["c_attn"], r=2, lora_dropout=0.2, fan_in_fan_out=True, init_lora_weights=False)
        torch.manual_seed(0)
        return peft.get_peft_model(gpt2(), config)

    whole = trainer(tmp_path, model=make())
    whole.train()
    names = seen(tmp_path / "checkpoint-4")
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    again = trainer(tmp_path / "again", model=make(), save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    same_run(whole, again)
    best = trainer(tmp_path / "best", model=make(), eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, others={
        "eval_dataset": rows(4)
    })  # fmt: skip
    best.train()


def test_8_bit_state(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.optim")
    torch.compiler.set_stance("force_eager")  # its compiled step takes 15 s to build

    def make(output: Path, **settings: Any) -> Any:
        torch.manual_seed(0)
        sizes = {**BERT, "vocab_size": 256, "hidden_size": 64}
        model = BertForMaskedLM(BertConfig(**sizes))
        optimizer = torchao.AdamW8bit(model.parameters(), lr=1e-2)
        return trainer(output, model=model, collate=masked, others={"optimizers": (optimizer, None)}, max_steps=4, **settings)

    whole = make(tmp_path)
    whole.train()
    states = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"].values()
    assert any(type(value) is not torch.Tensor for state in states for value in state.values())
    again = make(tmp_path / "again", save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    same_run(whole, again)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], 0.5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_of_the_user(name: str, tmp_path: Path) -> None:
    def make(output: Path, **settings: Any) -> Any:
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = {"optimizers": (optimizer, SCHEDULERS[name](optimizer))}
        return trainer(output, model=model, others=options, max_steps=6, **settings)

    whole = make(tmp_path)
    whole.train()
    again = make(tmp_path / "again", save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    same_run(whole, again)
    rates = [[entry["learning_rate"] for entry in one.state.log_history if "learning_rate" in entry] for one in (whole, again)]
    assert rates[0] == rates[1]
    kinds = [to_json(one.lr_scheduler.state_dict(), "scheduler") for one in (whole, again)]
    assert kinds[0] == kinds[1]


def test_plain_states_come_back_as_they_were() -> None:
    state = {
        "a": (1, [2.5, float("inf"), None]), "b": Counter({3: 2}), "c": {1, 2}, "d": np.float32(0.1), "e": torch.tensor([1.5, 2]),
        "f": {"is": "dict"}, "g": {(1, 2): True}, "h": np.arange(3), "i": torch.bfloat16, "j": torch.tensor(0.1).bfloat16(),
    }  # fmt: skip
    back = from_json(json.loads(json.dumps(to_json(state, "state"))))
    assert str(back) == str(state)
    assert [type(value) for value in back.values()] == [type(value) for value in state.values()]
    with pytest.raises(NotPlain, match=r"state\.x\[1\], a builtins\.object"):
        to_json({"x": [0, object()]}, "state")


class Stubborn(lr_scheduler.LambdaLR):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "clock": threading.Lock()}


def test_what_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"optimizers": (optimizer, Stubborn(optimizer, lambda step: 1.0))}
    one = trainer(tmp_path, model=model, others=options)
    with pytest.raises(RequestError, match=r"Stubborn\.clock, a _thread\.lock, cannot be written to a checkpoint without pickle"):
        one.train()
    assert one.state.global_step == 0
    trainer(tmp_path, model=model, others=options, save_strategy="no", max_steps=1).train()
    trainer(tmp_path, model=model, others=options, save_only_model=True, max_steps=1).train()

    group = {"params": list(model.parameters()), "rule": object()}
    strange = torch.optim.SGD([group], lr=0.1)
    with pytest.raises(RequestError, match="option rule of group 0 of optimizer SGD: object cannot be written"):
        trainer(tmp_path, model=model, others={"optimizers": (strange, None)}).train()
    other = torch.optim.SGD(gpt2().parameters(), lr=0.1)
    with pytest.raises(RequestError, match="optimizer SGD trains parameters that the model has not"):
        trainer(tmp_path, model=model, others={"optimizers": (other, None)}).train()


def test_the_scaler_is_json(tmp_path: Path) -> None:
    one = trainer(tmp_path, max_steps=2)
    one.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    one.train()
    again = trainer(tmp_path, max_steps=3)
    again.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    again._load_scaler(str(tmp_path / "checkpoint-2"))
    assert again.accelerator.scaler.state_dict() == one.accelerator.scaler.state_dict()
    assert torch.load(tmp_path / "checkpoint-2" / "scaler.pt", weights_only=True)["scale"] == 1024.0


class Bomb:
    def __reduce__(self) -> Any:
        return Path.write_text, (Path("exploded"), "")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [b"pickle", Bomb()], ids=("damaged", "code"))
def test_files_that_need_code_are_refused_and_left_alone(
    content: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(tmp_path / "out", cls=transformers.Trainer, max_steps=2).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    before = seen(checkpoint)
    with pytest.raises((RequestError, pickle.UnpicklingError), match="nothing else is ever loaded|Weights only load failed"):
        trainer(tmp_path / "out", max_steps=4).train(resume_from_checkpoint=True)
    assert seen(checkpoint) == before and not (tmp_path / "exploded").exists()


def test_a_pickle_of_somebody_else_is_left_unread(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1).train()
    (tmp_path / "checkpoint-1" / "average.pt").write_bytes(b"pickle")
    trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    peft = pytest.importorskip("peft")
    make = lambda: peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))  # noqa: E731
    trainer(tmp_path / "peft", model=make(), max_steps=1).train()
    (tmp_path / "peft" / "checkpoint-1" / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(RequestError, match="pickles of adapters are never loaded"):
        trainer(tmp_path / "peft", model=make(), max_steps=2).train(resume_from_checkpoint=True)


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(RequestError, match="is no whole checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "upshift_state.json"])
def test_a_truncated_checkpoint_is_skipped(name: str, tmp_path: Path) -> None:
    whole = trainer(tmp_path, max_steps=5)
    whole.train()
    with (tmp_path / "checkpoint-5" / name).open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 10)
    (tmp_path / "checkpoint-4" / name).unlink()
    (tmp_path / "checkpoint-9.tmp").mkdir()
    with pytest.raises(RequestError, match=r"resume from another checkpoint|has no upshift_state"):
        trainer(tmp_path, max_steps=5).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    again = trainer(tmp_path, max_steps=5)
    again.train(resume_from_checkpoint=True)
    same_run(whole, again)
    assert find_checkpoints(tmp_path).newest == tmp_path / "checkpoint-5"
    assert "checkpoint-9.tmp" not in seen(tmp_path)


class Slow:
    """Writing an optimizer's state waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.threads, self.fails = threading.Event(), [], False
        write = saving.write_optimizer

        def waiting(*args: Any) -> None:
            self.threads.append(threading.current_thread())
            if threading.current_thread() is not threading.main_thread():
                assert self.go.wait(20)
            if self.fails:
                raise OSError(28, "No space left on device")
            write(*args)

        monkeypatch.setattr(saving, "write_optimizer", waiting)


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    at_step: dict[int, list[str]] = {}

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            at_step[state.global_step] = seen(tmp_path) if tmp_path.is_dir() else []
            if state.global_step == 4:
                slow.go.set()

    one = trainer(tmp_path, save_steps=2, max_steps=5, others={"callbacks": [Watch()]})
    one.train()
    assert at_step[3] == at_step[4] == ["checkpoint-2.tmp"]
    assert seen(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert threading.main_thread() not in slow.threads
    reference = trainer(tmp_path / "reference", max_steps=5, save_strategy="no")
    reference.train()
    again = trainer(tmp_path / "again", save_strategy="no", max_steps=5)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # what was copied is of step 2, not of step 4
    same_run(reference, again)


def test_a_failed_write_stops_training_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path, max_steps=1).train()
    slow = Slow(monkeypatch)
    slow.fails = True

    class LetGo(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                slow.go.set()
                for thread in slow.threads:
                    thread.join()

    one = trainer(tmp_path, save_steps=2, max_steps=6, others={"callbacks": [LetGo()]})
    with pytest.raises(JobFailed, match=r"checkpoint-2 could not be written to .*: the disk is full; checkpoint-1 is still"):
        one.train()
    assert one.state.global_step == 4
    assert seen(tmp_path) == ["checkpoint-1"]
    last = trainer(tmp_path, save_steps=2, max_steps=2)
    with pytest.raises(JobFailed, match="checkpoint-2 could not be written"):
        last.train()


class Reader(TrainerCallback):
    def __init__(self) -> None:
        self.whole: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.whole.append(find_checkpoints(path.parent).newest == path)


def test_who_reads_the_files_finds_them_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    reader = Reader()
    trainer(tmp_path, max_steps=3, others={"callbacks": [reader]}).train()
    assert reader.whole == [True] * 3

    class Own(T):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            (Path(output_dir) / "extra.txt").write_text("mine")

    trainer(tmp_path / "own", cls=Own, max_steps=1).train()
    assert "extra.txt" in seen(tmp_path / "own" / "checkpoint-1")
    monkeypatch.setattr(saving, "has_room", lambda num_bytes: False)
    trainer(tmp_path / "no room", max_steps=1).train()
    assert set(slow.threads) == {threading.main_thread()}


def test_pushing_writes_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[list[str]] = []

    class Hub:
        def upload_folder(self, *, folder_path: str, **options: Any) -> Any:
            uploaded.append(seen(Path(folder_path)))
            return SimpleNamespace(done=lambda: True, cancel=lambda: None)

    monkeypatch.setattr(transformers.trainer, "hf_api", Hub)
    one = trainer(tmp_path, max_steps=1)
    one.args.push_to_hub, one.args.hub_strategy, one.hub_model_id = True, transformers.trainer_utils.HubStrategy.EVERY_SAVE, "a/b"
    one.push_in_progress = None
    one.train()
    assert {"training_args.json", "checkpoint-1", "model.safetensors"} <= set(uploaded[0])
    assert not [name for name in uploaded[0] if name.endswith(PICKLES)]


def in_a_fork(work: Callable[[], Any], output: Any = None) -> Any:
    """A process of its own, which needs no second to import torch. What it raises goes to the file `output`."""

    def guarded() -> None:
        try:
            work()
        except JobFailed as error:
            output.write_text(str(error))
            raise SystemExit(1) from None

    child = multiprocessing.get_context("fork").Process(target=guarded)
    child.start()
    return child


LONG = {"num_train_epochs": 6, "save_total_limit": 2}


def long_run(output: Path, *, resume: bool) -> Any:
    one = trainer(output, model=bert(), collate=masked, **LONG)
    one.train(resume_from_checkpoint=resume)
    return one


def test_a_process_killed_at_any_moment_resumes_exactly(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", model=bert(), collate=masked, **{**LONG, "save_strategy": "no"})
    whole.train()
    output = tmp_path / "killed"
    delays, torn, newest = random.Random(7), 0, -1
    for _ in range(10):
        child = in_a_fork(partial(long_run, output, resume=find_checkpoints(output).newest is not None))
        deadline = time.monotonic() + 300
        while child.is_alive() and time.monotonic() < deadline:
            found = find_checkpoints(output)
            if found.newest is not None and (checkpoint_files.step_of(found.newest) or 0) > newest:
                break
            time.sleep(0.001)
        time.sleep(delays.uniform(0, 0.06))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        torn += any(path.name.endswith((".tmp", ".replaced")) for path in output.iterdir())
        found = find_checkpoints(output)
        assert found.newest is not None and found.damaged == ()
        newest = checkpoint_files.step_of(found.newest) or 0
        if newest == whole.state.max_steps:
            break
    assert torn > 0
    same_run(whole, long_run(output, resume=True))
    assert len([name for name in seen(output) if name.startswith("checkpoint")]) == 2


EXIT = """
import sys
sys.path.insert(0, {tests!r})
import test_trainer_checkpoint as test
saver = test.trainer(test.Path(sys.argv[1]), max_steps=1)
write = test.saving.write_optimizer
test.saving.write_optimizer = lambda *args: (test.time.sleep(0.5), write(*args))
saver._finalize_training = lambda *args: 1 / 0
saver.train()
"""


def test_a_failing_interpreter_finishes_the_save(tmp_path: Path) -> None:
    paths = [str(Path(saving.__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-c", EXIT.format(tests=str(Path(__file__).parent)), str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr, done.stderr
    assert find_checkpoints(tmp_path).newest == tmp_path / "checkpoint-1"


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_a_file_that_does_not_fit(share: float, tmp_path: Path) -> None:
    """The limit on a file's size stands for a full disk: a write fails halfway."""
    trainer(tmp_path, max_steps=1).train()
    size = (tmp_path / "checkpoint-1" / "optimizer.pt").stat().st_size
    limit, told = int(size * share), tmp_path.with_suffix(".said")

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        trainer(tmp_path, max_steps=3).train(resume_from_checkpoint=True)

    child = in_a_fork(work, told)
    child.join(60)
    assert child.exitcode == 1
    assert "checkpoint-2 could not be written" in told.read_text() and "checkpoint-1 is still loadable" in told.read_text()
    assert seen(tmp_path) == ["checkpoint-1"]
    again = trainer(tmp_path, max_steps=3)
    again.train(resume_from_checkpoint=True)
    assert seen(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_the_step_waits_for_the_copy_only(tmp_path: Path) -> None:
    """Prints the times; a busy machine must not fail a test."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=8000, bos_token_id=0, eos_token_id=1))
    one = trainer(tmp_path, model=model, max_steps=1, save_strategy="no")
    one.train()
    for _ in range(3):
        start = time.perf_counter()
        kept = async_save.copy_weights(model), async_save.copy_optimizer(optimizer_content(one._upshift_plain_optimizer(), model))
        copy = time.perf_counter() - start
        del kept
        start = time.perf_counter()
        one._save_checkpoint(model, None)
        blocked = time.perf_counter() - start
        one._upshift_writer.wait()
        total = time.perf_counter() - start
        print(f"copy {1e3 * copy:.0f} ms, step blocked {1e3 * blocked:.0f} ms, written after {1e3 * total:.0f} ms")
    assert blocked < total
