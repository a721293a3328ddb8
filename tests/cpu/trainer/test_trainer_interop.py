"""A run that one library began goes on with the other one: the same losses and weights as without the stop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, TrainingArguments

import upshift
from upshift.errors import RequestError
from upshift.training.checkpoint import model as model_files
from upshift.training.checkpoint.state import checksums_of, seal

STEPS, STOP = 6, 3
DIRECTIONS = [(upshift, transformers), (transformers, upshift), (upshift, upshift)]
SETTINGS = {
    "max_steps": STEPS, "save_steps": STOP, "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    "learning_rate": 1e-2, "per_device_train_batch_size": 4, "seed": 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path_factory.getbasetemp() / "trainer-cache"))


def gpt2(kind: Any = GPT2LMHeadModel, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16, **options}
    return kind(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def mixtral() -> Any:
    """Its published names are not those of its modules."""
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=2, max_position_embeddings=16,
        )
    )  # fmt: skip


def rows(count: int = 24) -> list[dict[str, list[int]]]:
    draw = np.random.default_rng(1)
    return [{"input_ids": (tokens := draw.integers(5, 64, 8).tolist()), "labels": tokens} for _ in range(count)]


def trained(library: Any, output: Path, *, model: Any = None, resume: Any = None, **settings: Any) -> Any:
    kind = getattr(library, "Trainer", library)
    arguments = TrainingArguments(str(output), **{**SETTINGS, **settings})
    trainer = kind(model=gpt2() if model is None else model, args=arguments, train_dataset=rows())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_same(whole: Any, again: Any) -> None:
    assert len(losses(again)) == len(losses(whole)) == STEPS  # the log of a checkpoint goes on
    np.testing.assert_allclose(losses(again)[STOP:], losses(whole)[STOP:], rtol=1e-6)
    for one, other in zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert again.lr_scheduler.get_last_lr() == whole.lr_scheduler.get_last_lr()


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "AdamW": (gpt2, {}),
    "a schedule": (gpt2, {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1}),
    "accumulated": (gpt2, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "mixed precision": (gpt2, {"bf16": True}),
    "SGD": (gpt2, {"optim": "sgd", "optim_args": "momentum=0.9"}),
    "Adafactor": (gpt2, {"optim": "adafactor", "lr_scheduler_type": "linear"}),
    "an optimizer of the plan": (gpt2, {"optim": "adamw_torch"}),
    "mixture": (mixtral, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_either_library_goes_on_with_the_others_checkpoint(case: str, tmp_path: Path) -> None:
    make, settings = CASES[case]
    for number, (writer, reader) in enumerate(DIRECTIONS):
        if case == "mixture" and reader is transformers:
            continue  # from its own checkpoint, too, it begins with other experts: the next test
        folder = tmp_path / str(number)
        whole = trained(writer, folder, model=make(), **settings)
        again = trained(reader, folder, model=make(), resume=str(folder / f"checkpoint-{STOP}"), **settings)
        check_same(whole, again)


def test_transformers_reads_the_weights_of_a_mixture(tmp_path: Path) -> None:
    """Checkpoints keep the names of the modules, which load_state_dict takes."""
    whole = trained(upshift, tmp_path, model=mixtral())
    again = trained(transformers, tmp_path, model=mixtral(), resume=str(tmp_path / f"checkpoint-{STOP}"))
    check_same(whole, again)


@pytest.mark.parametrize(("writer", "reader"), DIRECTIONS, ids=lambda one: one.__name__)
def test_shards_are_read(writer: Any, reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_SHARD_SIZE", "4KB")
    save = GPT2LMHeadModel.save_pretrained
    monkeypatch.setattr(
        GPT2LMHeadModel, "save_pretrained", lambda self, folder, **named: save(self, folder, **{**named, "max_shard_size": "4KB"})
    )
    whole = trained(writer, tmp_path)
    checkpoint = tmp_path / f"checkpoint-{STOP}"
    assert (checkpoint / "model.safetensors.index.json").is_file() and len([*checkpoint.glob("model-*")]) > 2
    check_same(whole, trained(reader, tmp_path, resume=str(checkpoint)))


class Own(GPT2LMHeadModel):
    """Saves and loads itself in its own way, and counts it."""

    calls: list[str] = []  # noqa: RUF012

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append("state_dict")
        return super().state_dict(*arguments, **named)

    def load_state_dict(self, state_dict: Any, *arguments: Any, **named: Any) -> Any:
        self.calls.append("load_state_dict")
        return super().load_state_dict(
            {name.removeprefix("own."): value for name, value in state_dict.items()}, *arguments, **named
        )

    def save_pretrained(self, save_directory: Any, state_dict: Any = None, is_main_process: bool = True) -> None:  # type: ignore[override]
        self.calls.append("save_pretrained")
        state = super().state_dict() if state_dict is None else state_dict
        state.pop("lm_head.weight")
        from safetensors.torch import save_file

        Path(save_directory).mkdir(exist_ok=True)
        save_file(
            {f"own.{name}": value.contiguous() for name, value in state.items()}, Path(save_directory) / "model.safetensors"
        )
        self.config.save_pretrained(save_directory)


def test_a_models_own_methods_are_called_as_by_transformers(tmp_path: Path) -> None:
    for number, (writer, reader) in enumerate(DIRECTIONS):
        Own.calls.clear()
        folder = tmp_path / str(number)
        whole = trained(writer, folder, model=gpt2(Own))
        assert "save_pretrained" in Own.calls and "load_state_dict" not in Own.calls
        again = trained(reader, folder, model=gpt2(Own), resume=str(folder / f"checkpoint-{STOP}"))
        assert "load_state_dict" in Own.calls
        check_same(whole, again)


def test_true_takes_the_newest_of_either_library(tmp_path: Path) -> None:
    trained(transformers, tmp_path, max_steps=2, save_steps=1)
    assert trained(upshift, tmp_path, resume=True, max_steps=3, save_steps=1).state.global_step == 3
    whole = trained(transformers, tmp_path / "whole", save_strategy="no", max_steps=STEPS)
    (tmp_path / "checkpoint-3" / "optimizer.pt").write_bytes(b"short")  # the newest is damaged: that of transformers is taken
    again = trained(upshift, tmp_path, resume=True, max_steps=STEPS, save_steps=STEPS)
    assert again.state.global_step == STEPS and len(losses(whole)) == STEPS


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    trained(transformers, tmp_path)
    checkpoint = tmp_path / f"checkpoint-{STOP}"
    with pytest.raises(RequestError, match="trained with another optimizer than SGD: it has the option"):
        trained(upshift, tmp_path / "sgd", resume=str(checkpoint), optim="sgd")
    with pytest.raises(ValueError, match="groups of"):
        trained(upshift, tmp_path / "larger", resume=str(with_deeper_weights(checkpoint, tmp_path)), model=gpt2(n_layer=3))
    (checkpoint / "scheduler.pt").unlink()
    with pytest.raises(RequestError, match=r"no whole checkpoint, it has no scheduler\.pt"):
        trained(upshift, tmp_path, resume=str(checkpoint))
    (checkpoint / "trainer_state.json").unlink()
    with pytest.raises(RequestError, match=r"it has no trainer_state\.json"):
        trained(upshift, tmp_path, resume=str(checkpoint))


def with_deeper_weights(checkpoint: Path, folder: Path) -> Path:
    """The optimizer of the copy has fewer parameters than its model."""
    copy = folder / "checkpoint-9"
    shutil.copytree(checkpoint, copy)
    gpt2(n_layer=3).save_pretrained(copy)
    return copy


def test_a_checkpoint_of_upshift_train_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    gpt2().save_pretrained(folder)
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    state = {
        "format": 1, "files": files, "checksums": checksums_of(folder, files), "scheduler": {}, "scaler": None,
        "optimizer": {"optimizer_class": "AdamW", "groups": [], "numbers": {}, "subclasses": {}},
        "train": {"step": 1, "position": {"epoch": 0, "batch": 0}, "seed": 0, "tokens_seen": 0, "plan": {}},
    }  # fmt: skip
    (folder / "upshift_state.json").write_text(seal(json.dumps(state, indent=1)))
    with pytest.raises(RequestError, match="is of upshift train"):
        trained(upshift, tmp_path, resume=True)
