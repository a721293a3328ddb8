"""Define EngineSetup: every choice that changes how a model is run forward here, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from upshift.inference.added import added
from upshift.value import Value

Task = Literal["encode", "generate", "seq2seq"]
if TYPE_CHECKING:  # which engines are added is known only when their files are read
    EngineName = str
else:
    EngineName = Literal[
        "torch", "torch-graphs", "torchao", "onnxruntime", "openvino", "ctranslate2", "llamacpp", "torch-compiled", "nothing",
        *(engine.name for engine in added()),
    ]  # fmt: skip
Device = Literal["cpu", "cuda"]
Precision = Literal[
    "fp32", "tf32", "bf16", "fp16", "fp8", "fp16-weights", "mixed-weights", "mixed", "int8-weights", "int8", "int4-weights",
    "int4", "stored",
]  # fmt: skip
Hint = Literal["throughput", "latency"]
QUANTIZED: tuple[Precision, ...] = ("mixed-weights", "mixed", "int8-weights", "int8", "int4-weights", "int4")
ROUNDED: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "fp16-weights", *QUANTIZED)


class EngineSetup(Value):
    engine: EngineName
    precision: Precision = Field(
        description="of matrix products; ...-weights: weights alone are rounded, else activations, too; stored: as the files are"
    )
    device: Device = Field("cpu", description="what computes; cuda: the first GPU that torch sees, of NVIDIA or AMD")
    threads: int = Field(gt=0)
    batch: int = Field(gt=0, description="tokens of a batch of texts, padding included; or sequences that are generated at once")
    hint: Hint = Field("throughput", description="several batches share the cores, or one has them all")

    def label(self) -> str:
        return f"{self.engine} {self.precision}"
