"""EngineSetup: every choice that changes how texts are encoded here, and nothing else."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from upshift.value import Value

EngineName = Literal["torch", "onnxruntime", "openvino"]
Precision = Literal["fp32", "tf32", "bf16", "int8-weights", "int8"]
QUANTIZED: tuple[Precision, ...] = ("int8-weights", "int8")


class EngineSetup(Value):
    engine: EngineName
    precision: Precision = Field(description="of matrix products; int8-weights: weights alone; int8: calibrated on the texts")
    threads: int = Field(gt=0)
    token_budget: int = Field(gt=0, description="tokens of a batch, padding included; texts are sorted by length")

    def label(self) -> str:
        return f"{self.engine} {self.precision} · batches of {self.token_budget:,} tokens"
