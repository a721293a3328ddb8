"""What a user decides about a training run under XLA, by the names of transformers.TrainingArguments."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from upshift.value import Value

Optimizer = Literal["adamw", "sgd"]
Precision = Literal["fp32", "bf16"]


class Arguments(Value):
    max_steps: int = Field(gt=0)
    learning_rate: float = Field(5e-5, gt=0)
    lr_scheduler_type: str = "linear"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = Field(1.0, ge=0, description="0: no clipping")
    gradient_accumulation_steps: int = Field(1, gt=0, description="parts of a replica's batch, one after the other")
    optim: Optimizer = "adamw"
    momentum: float = Field(0.0, ge=0, description="of sgd")
    precision: Precision = Field("fp32", description="bf16: computed in bfloat16 over float32 weights (mixed_bfloat16)")
    seed: int = 42
    save_steps: int = Field(0, ge=0, description="0: only at the end and when interrupted")
