"""Define the arguments of a training run under XLA: those of every run, and those that a plan decides for torch."""

from __future__ import annotations

from typing import Literal, Required, TypedDict

from pydantic import Field

from upshift.training.arguments import Arguments, LearningRateSchedule

Optimizer = Literal["adamw", "sgd"]
Precision = Literal["fp32", "bf16"]


class XlaArguments(Arguments):
    gradient_accumulation_steps: int = Field(1, gt=0, description="parts of a replica's batch, one after the other")
    optim: Optimizer = "adamw"
    momentum: float = Field(0.0, ge=0, description="of sgd")
    precision: Precision = Field("fp32", description="bf16: computed in bfloat16 over float32 weights (mixed_bfloat16)")


class XlaArgumentFields(TypedDict, total=False):
    """Hold the fields of XlaArguments as keyword arguments of ``upshift.xla.train``."""

    max_steps: Required[int]
    learning_rate: float
    lr_scheduler_type: LearningRateSchedule
    warmup_steps: int
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    seed: int
    eval_steps: int
    save_steps: int
    save_total_limit: int
    gradient_accumulation_steps: int
    optim: Optimizer
    momentum: float
    precision: Precision
