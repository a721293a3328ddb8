"""What a script set up on its model and its Trainer is as before when upshift.Trainer has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_trainer_options import a_plan, a_trainer


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
