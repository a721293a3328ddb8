"""Fields of the plan that the Trainer honours only when they are asked for: updates in the backward pass, offloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import upshift
from upshift.errors import JobFailed, RequestError
from upshift.planning.plan import Plan

STEPS, ROWS = 6, 4
LENGTH = 16  # so long that primes tell what depends on the length: it is traced in a third of the runs
CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True,
    max_position_embeddings=64,
)  # fmt: skip
GENERATOR = torch.Generator().manual_seed(3)
IDS = [torch.randint(3, 128, (LENGTH,), generator=GENERATOR) for _ in range(STEPS * ROWS)]
DATA = [{"input_ids": ids, "labels": ids} for ids in IDS]
WHOLE = ("precision=fp32", "torch_compile=off", "attention=sdpa", "gradient_accumulation_steps=1")


def plan_of(**fields: Any) -> Plan:
    given = {"device": "cpu", "host": "", "model": "", "sequence_length": LENGTH, "per_device_train_batch_size": ROWS}
    return Plan.model_validate(given | fields)


def trainer_of(folder: Path, options: dict[str, Any], callbacks: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    given = {
        "max_steps": STEPS, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "learning_rate": 1e-2, "seed": 7, "per_device_train_batch_size": ROWS, "max_grad_norm": 0.0,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **given | more)
    return upshift.Trainer(
        model=LlamaForCausalLM(CONFIG), args=arguments, train_dataset=DATA, callbacks=callbacks, **{"trial_seconds": 0, **options}
    )


def trained(folder: Path, options: dict[str, Any], **more: Any) -> Any:
    trainer = trainer_of(folder, options, **more)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model.state_dict(), trainer


class Looking(transformers.TrainerCallback):
    """Is there a gradient when the optimizer's own step comes?"""

    def __init__(self) -> None:
        self.found = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.found += sum(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor"])
def test_updates_in_the_backward_pass_are_bit_for_bit_the_plain_ones(optim: str, tmp_path: Path) -> None:
    """Tied weights, a schedule and recomputed layers included; nothing of it stays behind."""
    plain_losses, plain_weights, _ = trained(tmp_path, {"plan": plan_of(optim=optim)}, optim=optim)
    looking = Looking()
    plan = plan_of(optim=optim, optimizer_in_backward=True, activation_checkpointing=1)
    losses, weights, trainer = trained(tmp_path, {"plan": plan}, optim=optim, callbacks=[looking])
    assert losses == plain_losses and losses[-1] != losses[0]
    assert all(torch.equal(value, plain_weights[name]) for name, value in weights.items())
    assert looking.found == 0
    assert not any(parameter._post_accumulate_grad_hooks for parameter in trainer.model.parameters())


def test_a_field_by_hand_makes_the_plan(tmp_path: Path) -> None:
    plain, _, _ = trained(tmp_path, {"fixed": WHOLE})
    losses, _, trainer = trained(tmp_path, {"fixed": (*WHOLE, "optimizer_in_backward=True")})
    assert losses == plain
    assert trainer.upshift_choice.planning is not None and trainer.upshift_choice.plan.optimizer_in_backward


def test_one_name_may_be_given_alone(tmp_path: Path) -> None:
    _, _, trainer = trained(tmp_path, {"fixed": "precision=fp32", "allow": "adafactor"}, max_steps=1)
    assert trainer.upshift_choice.planning is not None and trainer.upshift_choice.plan.precision == "fp32"


def test_layers_are_compiled_for_training_only(tmp_path: Path) -> None:
    compiled: list[int] = []

    class Counting(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            compiled.append(sum(module._compiled_call_impl is not None for module in model.modules()))

    with torch.compiler.set_stance("force_eager"):  # what is compiled runs as it would without
        _, _, trainer = trained(tmp_path, {"plan": plan_of(torch_compile="layer")}, callbacks=[Counting()], max_steps=2)
    assert compiled == [CONFIG.num_hidden_layers] * 2
    assert all(module._compiled_call_impl is None for module in trainer.model.modules())


def test_a_poisoned_batch_moves_no_weight_in_the_backward_pass_either(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, {"plan": plan_of(optimizer_in_backward=True)})
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.model.lm_head.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    with pytest.raises(JobFailed, match="step 1: the loss became NaN; no weight has moved in it"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "clipped": ({"fixed": ("optimizer_in_backward=True",)}, {"max_grad_norm": 1.0}, r"set TrainingArguments\(max_grad_norm=0\)"),
    "accumulated": (
        {"fixed": ("optimizer_in_backward=true",)}, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=1",
    ),
    "a given plan": ({"plan": plan_of(optimizer_in_backward=True)}, {"max_grad_norm": 1.0}, "max_grad_norm=0"),
    "own optimizer": (
        {"fixed": ("optimizer_in_backward=True",), "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}, {},
        "leave the optimizer to it",
    ),
    "optimizer on the host of a CPU": ({"fixed": ("optim_offload=True",)}, {}, "needs a CUDA device"),
    "activations on the host of a CPU": ({"plan": plan_of(activation_offload=True)}, {}, "needs a CUDA device"),
    "no memory": ({"memory_limit_gib": 0}, {}, "memory_limit_gib=0 leaves no memory"),
    "less than no memory": ({"memory_limit_gib": -1.0}, {}, "give GiB above 0"),
    "less than no time": ({"trial_seconds": -5}, {}, "trial_seconds=-5 is no time"),
    "processes": ({"fixed": ("num_processes=2",)}, {}, "the launcher starts the processes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_trainer_cannot_do_is_refused_before_training(name: str, tmp_path: Path) -> None:
    options, more, reason = REFUSED[name]
    with pytest.raises(RequestError, match=reason):
        trainer_of(tmp_path, options, **more)
