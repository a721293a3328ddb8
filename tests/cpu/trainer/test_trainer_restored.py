"""What a script set up on its model and its Trainer is as before when upshift.Trainer has trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_options import a_plan, a_trainer
from transformers import TrainerCallback


def checkpointing_of(model: Any) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "gradient_checkpointing" in key
    }


@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("script", ["off", "all layers", "every second layer"])
def test_activation_checkpointing_of_the_script_is_restored(script: str, layers: int, tmp_path: Path) -> None:
    plan = a_plan(activation_checkpointing=layers, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer = a_trainer(tmp_path, plan=plan)
    if script != "off":
        trainer.model.enable_input_require_grads()
        trainer.model.activation_checkpointing_enable(every_n_layers=1 if script == "all layers" else 2)
    before = checkpointing_of(trainer.model)
    used = set()
    trainer.model.register_forward_hook(lambda model, inputs, outputs: used.add(model.is_activation_checkpointing))
    trainer.train()
    assert used >= {bool(layers)} and checkpointing_of(trainer.model) == before
    embedding_hooks = trainer.model.get_input_embeddings()._forward_hooks
    assert len(embedding_hooks) == (script != "off")


class Interrupted(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)


def slow_to_write(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start = trainer._upshift_writer.start

    def write_late(work: Callable[[], None]) -> None:
        def work_late() -> None:
            time.sleep(0.3)
            work()

        start(work_late)

    monkeypatch.setattr(trainer._upshift_writer, "start", write_late)


def test_the_newest_checkpoint_is_complete_whatever_ends_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    trainer = a_trainer(tmp_path, arguments=saving, callbacks=[Interrupted()])
    slow_to_write(trainer, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    trainer.remove_callback(Interrupted)
    trainer.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3]


def test_resuming_waits_for_a_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    saving = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    trainer = a_trainer(tmp_path, arguments=saving)
    trainer.train()
    late = tmp_path / "late"
    (tmp_path / "checkpoint-3").rename(late)

    def write() -> None:
        time.sleep(0.3)
        late.rename(tmp_path / "checkpoint-3")

    trainer._upshift_writer.start(write)
    trainer.args.max_steps = 4
    counting = Counting()
    trainer.add_callback(counting)
    trainer.train(resume_from_checkpoint=True)
    assert counting.steps == [3]  # step 4 alone


@pytest.mark.parametrize("is_given", [False, True])
def test_an_optimizer_of_the_script_stays_its_own_in_a_second_training(is_given: bool, tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    if is_given:
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1e-3)
    for _ in range(2):
        assert trainer._upshift_optimizer_is_given == is_given
        trainer.train()
    assert trainer._upshift_optimizer_is_given == is_given
