"""Define the workload that a plan is for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from upshift.planning.lengths import LengthHistogram
from upshift.value import Value


class Workload(Value):
    task: Literal["train"] = "train"
    sequence_length: int = Field(gt=0)
    global_batch: int = Field(gt=0, description="sequences per optimizer step; no plan changes it")
    lengths: LengthHistogram | None = Field(None, description="of the data; None: every sequence is full")
    total_steps: int = Field(1000, gt=0, description="optimizer steps of the run; one-time costs are spread over them")
    clips_gradients: bool = Field(True, description="by their global norm, which needs all of them at once")
    risk: float | None = Field(None, gt=0, lt=0.5, description="accepted probability of running out; None: 5 % of memory is left")
    allow: tuple[str, ...] = Field((), description="choices that change the mathematics, allowed by the user")
