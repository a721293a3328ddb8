"""Which engines there are, what each needs, and the setups that a race is run between."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.inference.engines.engine import Build, Engine
from upshift.inference.setup import QUANTIZED, EngineName, EngineSetup, Precision

TOKEN_BUDGETS = (1024, 4096)  # of a batch: caches against overheads


class Entry(NamedTuple):
    door: str
    libraries: tuple[str, ...]
    extra: str  # of pip install 'upshift[...]'; empty: the core has it
    precisions: tuple[Precision, ...]
    brings: str  # where it was measured, over transformers in the same batches (docs/encoding.md)


ENGINES: dict[EngineName, Entry] = {
    "torch": Entry("torch_engine:TorchEngine", ("torch",), "", ("fp32", "tf32", "bf16"), "the reference"),
    "onnxruntime": Entry(
        "onnxruntime_engine:OnnxRuntimeEngine", ("onnxruntime", "onnx", "onnxscript"), "onnx", ("fp32", "int8"),
        "1.6 to 3.8 times",
    ),
    "openvino": Entry(
        "openvino_engine:OpenVinoEngine", ("openvino", "nncf"), "openvino", ("fp32", "bf16", "int8-weights", "int8"),
        "2.4 to 7 times",
    ),
}  # fmt: skip


def build_engine(build: Build) -> Engine:
    module, name = ENGINES[build.setup.engine].door.split(":")
    found: Engine = getattr(import_module(f"upshift.inference.engines.{module}"), name)(build)
    return found


def is_installed(name: EngineName) -> bool:
    return all(find_spec(library) is not None for library in ENGINES[name].libraries)


def missing() -> list[str]:
    """A line for each engine that is not installed: what would install it, and what it probably brings."""
    return [
        f"{name} is not installed: pip install 'upshift[{entry.extra}]' (elsewhere {entry.brings} the speed of transformers)"
        for name, entry in ENGINES.items()
        if not is_installed(name)
    ]


def contestants(host: Host, *, exact: bool) -> list[EngineSetup]:
    """The reference first. ``exact``: nothing that rounds to fewer bits can win then."""
    threads = host.cpu.usable_cores if host.cpu is not None else 1
    found = []
    for name, entry in ENGINES.items():
        for precision in entry.precisions if is_installed(name) else ():
            rounds = precision in QUANTIZED or precision == "bf16"
            if (exact and rounds) or (precision == "bf16" and host.supports("bf16") is False):
                continue
            found.append(EngineSetup(engine=name, precision=precision, threads=threads, token_budget=TOKEN_BUDGETS[0]))
    return found


def check_engine(name: str) -> EngineName:
    if name not in ENGINES:
        raise RequestError(f"--engine {name!r} is unknown; use one of {', '.join(ENGINES)}")
    if not is_installed(name):  # type: ignore[arg-type]
        raise RequestError(f"--engine {name} is not installed: pip install 'upshift[{ENGINES[name].extra}]'")  # type: ignore[index]
    return name  # type: ignore[return-value]
