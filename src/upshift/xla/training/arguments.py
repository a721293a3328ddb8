"""Define what a user decides about a training run under XLA: what every run has, and what a plan decides for torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from upshift.training.arguments import Arguments

Optimizer = Literal["adamw", "sgd"]
Precision = Literal["fp32", "bf16"]


class XlaArguments(Arguments):
    gradient_accumulation_steps: int = Field(1, gt=0, description="parts of a replica's batch, one after the other")
    optim: Optimizer = "adamw"
    momentum: float = Field(0.0, ge=0, description="of sgd")
    precision: Precision = Field("fp32", description="bf16: computed in bfloat16 over float32 weights (mixed_bfloat16)")
