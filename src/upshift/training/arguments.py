"""What the user decides about a training run, by the names of transformers.TrainingArguments. The Plan decides the rest."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from upshift.value import Value

LearningRateSchedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]


class Arguments(Value):
    max_steps: int = Field(gt=0)
    learning_rate: float = Field(5e-5, gt=0)
    lr_scheduler_type: LearningRateSchedule = "linear"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = Field(1.0, ge=0, description="0: no clipping")
    seed: int = 42
    eval_steps: int = Field(0, ge=0, description="0: only at the end")
    save_steps: int = Field(0, ge=0, description="0: only at the end and when interrupted")
    save_total_limit: int = Field(2, ge=2, description="newest checkpoints that are kept: with one, none if it is damaged")
