"""Define the arguments of a training run under XLA: those of every run, and those that a plan decides for torch."""

from __future__ import annotations

from typing import Literal, Required, Self, TypedDict

from pydantic import Field, model_validator

from upshift.errors import RequestError
from upshift.training.arguments import Arguments, LearningRateSchedule

Optimizer = Literal["adamw", "sgd"]
Precision = Literal["fp32", "bf16"]
NOT_USED = (  # arguments of torch's loop alone
    "logging_steps",
    "early_stopping_patience",
    "load_best",
    "metric_for_best_model",
    "neftune_noise_alpha",
    "range_test_from",
)


class XlaArguments(Arguments):
    gradient_accumulation_steps: int = Field(1, gt=0, description="parts of a replica's batch, one after the other")
    optim: Optimizer = "adamw"
    momentum: float = Field(0.0, ge=0, description="of sgd")
    precision: Precision = Field("fp32", description="bf16: computed in bfloat16 over float32 weights (mixed_bfloat16)")

    @model_validator(mode="after")
    def _reject_unused(self) -> Self:
        for name in NOT_USED:
            if getattr(self, name) != Arguments.model_fields[name].default:
                raise RequestError(f"{name}={getattr(self, name)} is not used by the XLA backend; leave it out")
        return self


class XlaArgumentFields(TypedDict, total=False):
    """Hold the fields of XlaArguments as keyword arguments of ``upshift.xla.train``."""

    max_steps: Required[int]
    learning_rate: float
    lr_scheduler_type: LearningRateSchedule
    warmup_steps: int
    warmup_ratio: float | None
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    seed: int
    eval_steps: float
    save_steps: float
    save_total_limit: int
    gradient_accumulation_steps: int
    optim: Optimizer
    momentum: float
    precision: Precision
