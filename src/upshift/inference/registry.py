"""Define EngineSetup: every choice that changes how a model is run forward here, and nothing else.

An engine that is one file says at its top what it is, and is read there without being imported:

ENGINE = {"name": "toy", "task": "encode", "class": "ToyEngine", "libraries": ("toy",), "precisions": ("fp32",)}

Such engines race behind those of engines.py, which are several files, or wait for a place in the order.

List the engines, what each needs and can do, and the setups of a race.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from upshift.disk_full import FREE_SOME, disk_full_message
from upshift.errors import JobFailed, RequestError
from upshift.hardware.spec import Host
from upshift.models.source import ModelSource
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


class Door(NamedTuple):
    name: str  # module and class, in the task's folder of engines
    precisions: tuple[Precision, ...]  # on a CPU
    on_gpu: tuple[Precision, ...] = ()
    needs: Precision | None = None  # what it computes in, whatever its weights are
    kinds: str = ""  # module and name of the models that it has, by their configs' model_type; empty: of all

    def on(self, device: Device) -> tuple[Precision, ...]:
        return self.on_gpu if device == "cuda" else self.precisions


class Entry(NamedTuple):
    libraries: tuple[str, ...]
    extra: str  # of pip install 'upshift[...]'; empty: the core has it
    doors: Mapping[Task, Door]
    uncompiled: EngineName | None = None  # of one that compiles whenever it is loaded: the same, kernel by kernel


PACKAGES: dict[Task, str] = {
    "encode": "upshift.inference.encoding",
    "generate": "upshift.inference.generation",
    "seq2seq": "upshift.inference.generation",
}
ON_GPU: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
ENGINES: dict[EngineName, Entry] = {  # in the order of a race: the reference, then what converts a model soonest
    "torch": Entry(
        ("torch",), "",
        {
            "encode": Door("torch_engine:TorchEngine", ("fp32", "tf32", "bf16"), ON_GPU),
            "generate": Door("torch_decoder:TorchDecoder", ("fp32", "bf16"), ON_GPU),
            "seq2seq": Door("torch_decoder:TorchSeq2Seq", ("fp32", "bf16"), ON_GPU),
        },
    ),
    "torch-graphs": Entry(
        ("torch",), "",
        {"generate": Door("torch_cuda_graphs:TorchGraphsDecoder", (), ON_GPU)},
    ),
    "torchao": Entry(
        ("torchao",), "quant",
        {"generate": Door("torch_cuda_graphs:TorchaoDecoder", (), ("int8-weights", "int4-weights", "fp8"), "bf16")},
    ),
    "llamacpp": Entry(
        ("llama_cpp", "gguf"), "llamacpp",
        {"generate": Door("llamacpp_decoder:LlamaCppDecoder", ("fp32", "fp16", "int8", "int4"), kinds="gguf_families:FAMILIES")},
    ),
    "ctranslate2": Entry(
        ("ctranslate2",), "ctranslate2",
        {"encode": Door("ctranslate2_engine:CTranslate2Engine", ("fp32", "int8"), kinds="ctranslate2_engine:CONVERTED")},
    ),
    "openvino": Entry(
        ("openvino", "nncf"), "openvino",
        {
            "encode": Door("openvino_engine:OpenVinoEngine", ("fp32", "bf16", "int8-weights", "int8")),
            "generate": Door("openvino_decoder:decoder", ("fp32", "bf16", "fp16-weights", *QUANTIZED)),
            "seq2seq": Door("openvino_seq2seq:OpenVinoSeq2Seq", ("fp32", "bf16", "fp16-weights", *QUANTIZED)),
        },
    ),
    "onnxruntime": Entry(
        ("onnxruntime", "onnx", "onnxscript"), "onnx",
        {"encode": Door("onnxruntime_engine:OnnxRuntimeEngine", ("fp32", "int8"))},
    ),
    "torch-compiled": Entry(
        ("torch",), "",
        {
            "encode": Door("torch_engine:TorchCompiledEngine", ("fp32", "tf32", "bf16")),
            "generate": Door("torch_decoder:TorchCompiledDecoder", ("fp32", "bf16")),
        },
        uncompiled="torch",
    ),
}  # fmt: skip
for _one in added():
    ENGINES[_one.name] = Entry(_one.libraries, "", {_one.task: Door(_one.door, _one.precisions, _one.on_gpu, kinds=_one.kinds)})
NOTHING = Entry(  # computes nothing, and is none of those that can be chosen: what it takes is what all else takes
    (), "",
    {
        "encode": Door("null_engine:NothingEngine", ("fp32",)),
        "generate": Door("null_decoder:NothingDecoder", ("fp32",)),
        "seq2seq": Door("null_decoder:NothingDecoder", ("fp32",)),
    },
)  # fmt: skip


def build_engine(task: Task, name: EngineName, build: Any) -> Any:
    """Build an engine. ``build`` is what the task's engines are built from."""
    entry = NOTHING if name == "nothing" else ENGINES[name]
    try:
        return _named(task, entry.doors[task].name)(build)
    except Exception as error:  # libraries have classes of their own for a full disk
        reason = disk_full_message(error)
        if reason is None:
            raise
        raise JobFailed(f"the files that {name} makes of the model could not be written ({reason}); {FREE_SOME}") from error


def is_installed(name: EngineName) -> bool:
    return all(find_spec(library) is not None for library in ENGINES[name].libraries)


def install_line(name: EngineName) -> str:
    entry = ENGINES[name]
    return f"pip install 'upshift[{entry.extra}]'" if entry.extra else f"pip install {' '.join(entry.libraries)}"


def contestants(
    task: Task, source: ModelSource, host: Host, *, exact: bool, batch: int, hint: Hint, stored: EngineName | None = None,
    reference: Precision = "fp32",
) -> list[EngineSetup]:  # fmt: skip
    """Return the setups of all engines that can run such models, installed or not. transformers in ``reference``
    comes first.

    ``exact`` leaves out setups that round to fewer bits, because they cannot win. ``stored`` names the only engine
    that can load weights which are quantized already."""
    device = _device(host)
    threads = host.cpu.usable_cores if host.cpu is not None else 1
    some = EngineSetup(engine=stored or "torch", precision="stored", device=device, threads=threads, batch=batch, hint=hint)
    if stored is not None:
        return [some if ENGINES[stored].doors[task].on(device) else some.changed(device="cpu")]
    unfit = {"bf16"} if host.supports("bf16") is False else set[Precision]()
    unfit |= set() if host.supports("fp8") else {"fp8"}
    unfit |= {"tf32"} if host.medium_is_bf16 else set()
    unfit |= {precision for precision in ROUNDED if exact} | ({"fp32", "tf32"} if reference != "fp32" else set())
    found = []
    for name, entry in ENGINES.items():
        door = entry.doors.get(task)
        able = () if door is None or door.needs in unfit else door.on(device)
        kept = [precision for precision in able if precision == reference or precision not in unfit]
        if door is not None and kept and _has(task, door, source):
            found += [some.changed(engine=name, precision=precision) for precision in kept]
    return sorted(found, key=lambda setup: setup != some.changed(precision=reference))


def check_engine(task: Task, name: str, source: ModelSource, host: Host) -> EngineName:
    device = _device(host)
    able = [known for known, entry in ENGINES.items() if task in entry.doors and entry.doors[task].on(device)]
    if name not in able:
        what = "GPU; an empty CUDA_VISIBLE_DEVICES hides it" if device == "cuda" else "CPU"
        raise RequestError(f"--engine {name!r} is none for {task}; use one of {', '.join(able)} (on this machine's {what})")
    if not is_installed(name):
        raise RequestError(f"--engine {name} is not installed: {install_line(name)}")
    door = ENGINES[name].doors[task]
    if not _has(task, door, source):
        raise RequestError(f"--engine {name} has no {_kind(source)!r}; it has {', '.join(sorted(_named(task, door.kinds)))}")
    return name


def _device(host: Host) -> Device:
    return "cuda" if host.device == "cuda" else "cpu"


def _has(task: Task, door: Door, source: ModelSource) -> bool:
    return not door.kinds or _kind(source) in _named(task, door.kinds)


def _kind(source: ModelSource) -> str:
    """Return the type of the model, or of its text model if that is a part."""
    return str(source.config.get("text_config", source.config).get("model_type"))


def _named(task: Task, name: str) -> Any:
    """Import an object by name: a module in the task's folder of engines, and an attribute of it."""
    module, found = name.split(":")
    return getattr(import_module(f"{PACKAGES[task]}.engines.{module}"), found)
