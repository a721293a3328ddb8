"""Define EngineSetup: every choice that changes how a model is run forward here, and nothing else.

An engine that is one file says at its top what it is, and is read there without being imported:

ENGINE = {"name": "toy", "task": "encode", "class": "ToyEngine", "libraries": ("toy",), "precisions": ("fp32",)}

Such engines race behind those of engines.py, which are several files, or wait for a place in the order.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from upshift.errors import RequestError
from upshift.value import Value

Task = Literal["encode", "generate", "seq2seq"]
Device = Literal["cpu", "cuda"]
Precision = Literal[
    "fp32", "tf32", "bf16", "fp16", "fp8", "fp16-weights", "mixed-weights", "mixed", "int8-weights", "int8", "int4-weights",
    "int4", "stored",
]  # fmt: skip
Hint = Literal["throughput", "latency"]
QUANTIZED: tuple[Precision, ...] = ("mixed-weights", "mixed", "int8-weights", "int8", "int4-weights", "int4")
ROUNDED: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "fp16-weights", *QUANTIZED)
FOLDERS = {"encode": "encoding", "generate": "generation", "seq2seq": "generation"}
MARK = "\nENGINE = {"


class Added(NamedTuple):
    name: str
    task: Task
    door: str  # module:class
    libraries: tuple[str, ...]
    precisions: tuple[Precision, ...]  # on a CPU
    on_gpu: tuple[Precision, ...]
    kinds: str  # the name, in the file, of the model_types that it has; empty: all


@cache
def added() -> tuple[Added, ...]:
    here = Path(__file__).parent
    files = [path for folder in sorted({*FOLDERS.values()}) for path in sorted((here / folder / "engines").glob("*.py"))]
    return tuple(_read(path) for path in files if MARK in path.read_text(encoding="utf-8"))


def _read(path: Path) -> Added:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ENGINE"
    )  # fmt: skip
    said: dict[str, Any] = {"libraries": (), "on_gpu": (), "kinds": "", **ast.literal_eval(found)}
    keys = {"name", "task", "class", "libraries", "precisions", "on_gpu", "kinds"}
    if {*said} != keys or FOLDERS.get(said["task"]) != path.parents[1].name:
        wrong = ", ".join(sorted({*said} ^ keys)) or f"task {said['task']!r} in the folder {path.parents[1].name}"
        raise RequestError(f"ENGINE of {path.name} is not understood ({wrong}); it has {', '.join(sorted(keys))}")
    kinds = f"{path.stem}:{said['kinds']}" if said["kinds"] else ""
    door = f"{path.stem}:{said['class']}"
    precisions, on_gpu = tuple(said["precisions"]), tuple(said["on_gpu"])
    return Added(said["name"], said["task"], door, tuple(said["libraries"]), precisions, on_gpu, kinds)


if TYPE_CHECKING:  # which engines are added is known only when their files are read
    EngineName = str
else:
    EngineName = Literal[
        "torch", "torch-graphs", "torchao", "onnxruntime", "openvino", "ctranslate2", "llamacpp", "torch-compiled", "nothing",
        *(engine.name for engine in added()),
    ]  # fmt: skip


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
