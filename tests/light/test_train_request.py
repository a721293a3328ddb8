"""TrainRequest: what a user asks of a training run, whole from the command line and from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from upshift.cli.profile import read_train_command
from upshift.cli.train import request_of
from upshift.errors import RequestError
from upshift.training.arguments import Arguments, PlanOptions, TrainRequest
from upshift.training.data.rows.chat_templates import CHATML

OF_PYTHON = {"tokenizer"}  # an object, which no command line can give
# Every option of upshift train that the request carries, with a value that is not its default, and where it goes.
WRITTEN: dict[str, tuple[str, Any]] = {
    "eval_data": ("--eval-data held-out.jsonl", "held-out.jsonl"),
    "report_to": ("--report-to tensorboard,wandb", ("tensorboard", "wandb")),
    "output": ("--output trained", Path("trained")),
    "overwrite": ("--overwrite", True),
    "resume": ("--resume", True),
    "heal": ("--heal", True),
    "max_steps": ("--max-steps 7", 7),
    "sequence_length": ("--sequence-length 96", 96),
    "global_batch": ("--global-batch 3", 3),
    "epochs": ("--epochs 2.5", 2.5),
    "plan_file": ("--plan plan.json", Path("plan.json")),
    "fixed": ("--set packing=true --nproc 2", ("packing=true", "num_processes=2")),
    "allow": ("--allow bf16-weights,8bit-optimizer", ("bf16-weights", "8bit-optimizer")),
    "from_config": ("--from-config", True),
    "lora_rank": ("--lora-rank 4", 4),
    "lora_alpha": ("--lora-alpha 32", 32),
    "lora_dropout": ("--lora-dropout 0.1", 0.1),
    "lora_target": ("--lora-target v_proj,q_proj", ("q_proj", "v_proj")),
    "lora_modules_to_save": ("--lora-modules-to-save lm_head", ("lm_head",)),
    "lora_rslora": ("--lora-rslora", True),
    "lora_dora": ("--lora-dora", True),
    "load_in_4bit": ("--load-in-4bit", True),
    "text_column": ("--text-column body", "body"),
    "data_format": ("--data-format alpaca", "alpaca"),
    "loss_on": ("--loss-on all", "all"),
    "chat_template": ("--chat-template chatml", CHATML),
    "split": ("--split train[:10%]", "train[:10%]"),
    "long_rows": ("--long-rows drop", "drop"),
    "eval_size": ("--eval-size 0.25", 0.25),
    "objective": ("--objective dpo", "dpo"),
    "trial_seconds": ("--trial-seconds 1.5", 1.5),
    "mup_base": ("--mup-base narrow", "narrow"),
    "find_learning_rate": ("--find-learning-rate", True),
}
ARGUMENTS = {
    "learning_rate": 0.25, "warmup_steps": 3, "weight_decay": 0.5, "max_grad_norm": 0.0, "lr_scheduler_type": "cosine",
    "dpo_beta": 0.4, "seed": 11, "eval_steps": 4, "save_steps": 5, "save_total_limit": 6, "logging_steps": 7,
    "early_stopping_patience": 8, "neftune_noise_alpha": 0.5,
}  # fmt: skip


def asked(words: str) -> TrainRequest:
    return request_of(read_train_command(["train", "MODEL", "--data", "DATA", *words.split()]))


def test_the_request_has_every_option_that_the_command_line_gives() -> None:
    assert {*WRITTEN} == {*TrainRequest.model_fields} - {"model", "data", "arguments"} - OF_PYTHON


@pytest.mark.parametrize("name", WRITTEN)
def test_an_option_reaches_the_request_and_no_other_field(name: str) -> None:
    words, value = WRITTEN[name]
    plain, found = asked(""), asked(words)
    assert (plain.model, plain.data) == ("MODEL", "DATA") and getattr(plain, name) != value
    assert found.model_dump() == plain.model_dump() | {name: value}


def test_a_regular_expression_is_one_target_and_none_is_no_tracker() -> None:
    assert asked("--lora-target layers\\.[0-9]{1,2}\\.(q|v)_proj").lora_target == (r"layers\.[0-9]{1,2}\.(q|v)_proj",)
    assert asked("--report-to none").report_to == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--eval-size 1.5", "--eval-size 1.5 is neither a share below 1 nor a whole number; give such as 0.05 or 200"),
        ("--eval-size 9 --eval-data a.jsonl", "--eval-data a.jsonl is the evaluation data; leave one of the two out"),
        ("--eval-size 0 --eval-steps 5", "--eval-steps needs held-out data, and --eval-size 0 holds none out"),
        ("--eval-size 0 --eval-steps 5 --load-best", "--load-best needs held-out data, and --eval-size 0 holds none out"),
    ],
)
def test_rows_are_held_out_once_and_where_they_are_needed(words: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(words)
    assert message in str(caught.value)


def test_shares_of_a_run_are_steps_rounded_up() -> None:
    """As in transformers' Trainer: ceil(max_steps * share)."""
    request = asked("--eval-steps 0.1 --save-steps 0.25 --logging-steps 3")
    for steps, expected in ((10, (1, 3)), (101, (11, 26)), (1, (1, 1))):
        found = request.arguments_for(steps)
        assert (found.max_steps, found.eval_steps, found.save_steps, found.logging_steps) == (steps, *expected, 3)
    whole = asked("--eval-steps 5").arguments_for(7)
    assert (whole.eval_steps, whole.save_steps) == (5, 0) and isinstance(whole.eval_steps, int)
    with pytest.raises(RequestError, match=r"^--eval-steps 1.5 is neither a whole number of steps nor a share below 1"):
        asked("--eval-steps 1.5")


def test_the_arguments_reach_the_request() -> None:
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in ARGUMENTS.items())
    with pytest.raises(RequestError, match=r"^--dpo-beta 0.4 is for --objective dpo; add --objective dpo, or leave it out$"):
        asked(words)
    found = asked(f"{words} --objective dpo")
    assert found.arguments == Arguments(max_steps=1, **ARGUMENTS)
    assert found.arguments_for(9) == Arguments(max_steps=9, **ARGUMENTS) and not found.clips_gradients


def test_a_warm_up_is_a_share_of_the_steps_or_a_number_of_them() -> None:
    """Rounded up, as in transformers' Trainer."""
    assert asked("--warmup-ratio 0.1").arguments_for(25).num_warmup_steps == 3
    assert asked("--warmup-ratio 0").arguments_for(25).num_warmup_steps == 0
    assert asked("--warmup-steps 4").arguments_for(25).num_warmup_steps == 4
    with pytest.raises(RequestError, match="--warmup-ratio 0.1 and --warmup-steps 4"):
        asked("--warmup-ratio 0.1 --warmup-steps 4")


def test_python_has_the_options_of_a_plan_by_name() -> None:
    of_output = {"model", "data", "output", "overwrite", "resume", "heal", "report_to", "max_steps", "arguments", "objective"}
    assert {*PlanOptions.__annotations__} == {*TrainRequest.model_fields} - of_output - {"find_learning_rate"}  # tune searches it


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"epochs": 0}, r"^epochs: must be above 0 \(got 0\)$"),
        ({"global_batch": 0}, r"^global_batch: "),
        ({"sequence_length": 1}, r"^sequence_length: "),
        ({"trial_seconds": -1}, r"^trial_seconds: "),
        ({"precison": "bf16"}, r"^unknown key 'precison'; the keys are allow, "),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        TrainRequest.of({"model": "MODEL", "data": "DATA", **fields}, {})


def test_a_run_that_resumes_goes_on_from_its_output() -> None:
    assert asked("--output trained").resume_from is None
    assert asked("--output trained --resume").resume_from == Path("trained")
