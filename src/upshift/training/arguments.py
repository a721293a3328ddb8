"""Define the user's choices for a training run, by the names of transformers.TrainingArguments. The Plan decides the rest."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from upshift.value import Value

LearningRateSchedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]

SEEDS = 2**32  # numpy's generators take no larger seeds


class Arguments(Value):
    max_steps: int = Field(gt=0)
    learning_rate: float = Field(5e-5, gt=0)
    lr_scheduler_type: LearningRateSchedule = "linear"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, ge=0)
    max_grad_norm: float = Field(1.0, ge=0, description="0: no clipping")
    seed: int = Field(42, ge=0, lt=SEEDS)
    eval_steps: int = Field(0, ge=0, description="0: only at the end")
    save_steps: int = Field(0, ge=0, description="0: only at the end and when interrupted")
    save_total_limit: int = Field(2, ge=2, description="newest checkpoints that are kept: with one, none if it is damaged")


class RunNumbers(Value):
    """The numbers that a run takes beside the arguments."""

    epochs: float = Field(1.0, gt=0)
    global_batch: int = Field(8, gt=0)
    sequence_length: int | None = Field(None, ge=2, description="None: the default for the model")
    lora_rank: int | None = Field(None, gt=0)
    trial_seconds: float = Field(0.0, ge=0)
