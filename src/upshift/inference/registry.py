"""List the inference engines: what each needs, what it can compute, and the setups that race for a model.

An engine that is one file declares itself at its top, and is read there without an import:

ENGINE = {"name": "toy", "task": "encode", "class": "ToyEngine", "libraries": ("toy",), "precisions": ("fp32",)}

Such engines race after those of the table ENGINES. ENGINES has the engines that are several files, and those with a fixed
position in the order of a race."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pydantic import Field

from upshift.disk_full import FREE_SOME, disk_full_message
from upshift.errors import JobFailed, RequestError, UpshiftError
from upshift.hardware.spec import Host
from upshift.inference.engine_environment import EngineEnvironment, require_environment
from upshift.models.source import ModelSource
from upshift.text import one_line
from upshift.value import Value
from upshift.versions import install_command

Task = Literal["encode", "generate", "states", "seq2seq", "as-transformers", "media"]
Device = Literal["cpu", "cuda"]
Precision = Literal[
    "fp32",
    "tf32",
    "bf16",
    "fp16",
    "fp8",
    "fp16-weights",
    "mixed-weights",
    "mixed",
    "int8-weights",
    "int8",
    "int4-weights",
    "int4",
    "stored",
]
Hint = Literal["throughput", "latency"]
QUANTIZED: tuple[Precision, ...] = ("mixed-weights", "mixed", "int8-weights", "int8", "int4-weights", "int4")
ROUNDED: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "fp16-weights", *QUANTIZED)
ENGINE_FOLDERS = {task: {"encode": "encoding", "media": "media"}.get(task, "generation") for task in get_args(Task)}
KINDS_OF_TASK: dict[Task, str] = {
    "states": "models with recurrent states, or with images beside text",
    "as-transformers": "models that only transformers' generate() runs",
}
DECLARATION = "\nENGINE = {"


class AddedEngine(NamedTuple):
    """The declaration of an engine that is one file."""

    name: str
    task: Task
    factory: str  # module:class
    libraries: tuple[str, ...]
    precisions: tuple[Precision, ...]  # on a CPU
    on_gpu: tuple[Precision, ...]
    kinds: str  # the name, in the file, of the model types that the engine supports; empty: all


@cache
def added_engines() -> tuple[AddedEngine, ...]:
    """Return the declarations of all engine files that have one."""
    package = Path(__file__).parent
    engines = []
    for folder in sorted({*ENGINE_FOLDERS.values()}):
        for path in sorted((package / folder / "engines").glob("*.py")):
            if DECLARATION in path.read_text(encoding="utf-8"):
                engines.append(_read_declaration(path))
    return tuple(engines)


def _read_declaration(path: Path) -> AddedEngine:
    """Read the declaration of an engine file. Raise RequestError for a missing or unknown key, or a wrong task."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (literal,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ENGINE")
    declaration: dict[str, Any] = {"libraries": (), "on_gpu": (), "kinds": "", **ast.literal_eval(literal)}
    keys = {"name", "task", "class", "libraries", "precisions", "on_gpu", "kinds"}
    folder = path.parents[1].name
    task = declaration.get("task", "")
    if {*declaration} != keys or ENGINE_FOLDERS.get(task) != folder:
        problem = ", ".join(sorted({*declaration} ^ keys)) or f"task {task!r} in the folder {folder}"
        raise RequestError(f"ENGINE of {path.name} is not understood ({problem}); it has {', '.join(sorted(keys))}")
    return AddedEngine(
        name=declaration["name"],
        task=declaration["task"],
        factory=f"{path.stem}:{declaration['class']}",
        libraries=tuple(declaration["libraries"]),
        precisions=tuple(declaration["precisions"]),
        on_gpu=tuple(declaration["on_gpu"]),
        kinds=f"{path.stem}:{declaration['kinds']}" if declaration["kinds"] else "",
    )


if TYPE_CHECKING:  # the added engines are known only when their files are read
    EngineName = str
else:
    EngineName = Literal[
        "torch",
        "torch-graphs",
        "torchao",
        "onnxruntime",
        "openvino",
        "ctranslate2",
        "llamacpp",
        "torch-compiled",
        "vllm",
        "nothing",
        *(engine.name for engine in added_engines()),
    ]


class EngineSetup(Value):
    """Every choice that changes how a model is run forward here, and nothing else."""

    engine: EngineName
    precision: Precision = Field(
        description="of matrix products; ...-weights: only weights are rounded, else activations too; stored: as the files are"
    )
    device: Device = Field("cpu", description="cuda: the first NVIDIA GPU that torch sees")
    threads: int = Field(gt=0)
    batch: int = Field(gt=0, description="tokens of a batch of texts, with padding; or sequences that are generated at once")
    hint: Hint = Field("throughput", description="throughput: several batches share the cores; latency: one batch has all cores")
    environment: EngineEnvironment | None = Field(None, description="of an engine that runs in a Python environment of its own")
    tensor_parallel: int = Field(1, gt=0, description="devices that share each layer")

    def label(self) -> str:
        devices = f" on {self.tensor_parallel} devices" if self.tensor_parallel > 1 else ""
        return f"{self.engine} {self.precision}{devices}"

    def of_a_rank(self) -> EngineSetup:
        """Return the setup of each of the ranks that share the model and the cores."""
        return self.changed(threads=max(self.threads // self.tensor_parallel, 1), tensor_parallel=1)


class EngineFactory(NamedTuple):
    """The class of an engine for one task, and what it supports there."""

    name: str  # module:class, in the task's folder of engines
    precisions: tuple[Precision, ...]  # on a CPU
    on_gpu: tuple[Precision, ...] = ()
    needs: Precision | None = None  # the hardware must support it, whatever the precision of the weights
    kinds: str = ""  # module:name of the supported model types (model_type of a config); empty: all

    def precisions_on(self, device: Device) -> tuple[Precision, ...]:
        return self.on_gpu if device == "cuda" else self.precisions


class EngineSpec(NamedTuple):
    """An engine: the libraries that it needs, and its factory for each task."""

    libraries: tuple[str, ...]
    extra: str  # Upshift's extra with the libraries; empty: the core installs them
    factories: Mapping[Task, EngineFactory]
    uncompiled: EngineName | None = None  # for an engine that compiles at each load: the same engine without compiling
    start_seconds: float = 0.0  # the least that the start of its own process takes; 0: it runs in ours

    @property
    def has_environment(self) -> bool:
        """Return whether the engine runs in a process and a Python environment of its own."""
        return self.start_seconds > 0.0

    @property
    def loads_slowly(self) -> bool:
        """Return whether the time of each load counts beside that of the work."""
        return self.uncompiled is not None or self.has_environment


PACKAGES = {task: f"upshift.inference.{folder}" for task, folder in ENGINE_FOLDERS.items()}
ON_GPU: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
ENGINES: dict[EngineName, EngineSpec] = {  # in the order of a race: the reference first, then by the time to convert a model
    "torch": EngineSpec(
        ("torch",),
        "",
        {
            "encode": EngineFactory("torch_engine:build_encoder", ("fp32", "tf32", "bf16"), ON_GPU),
            "media": EngineFactory("torch_media:TorchMediaEngine", ("fp32", "tf32", "bf16"), ON_GPU),
            "generate": EngineFactory("torch_decoder:build_decoder", ("fp32", "bf16"), ON_GPU),
            "seq2seq": EngineFactory("torch_decoder:TorchSeq2Seq", ("fp32", "bf16"), ON_GPU),
            "states": EngineFactory("torch_decoder:TorchStatesDecoder", ("fp32", "bf16"), ON_GPU),
            "as-transformers": EngineFactory("torch_generate:TransformersDecoder", ("fp32", "bf16"), ON_GPU),
        },
    ),
    "torch-graphs": EngineSpec(
        ("torch",),
        "",
        {"generate": EngineFactory("torch_cuda_graphs:TorchGraphsDecoder", (), ON_GPU)},
    ),
    "torchao": EngineSpec(
        ("torchao",),
        "quant",
        {"generate": EngineFactory("torch_cuda_graphs:TorchaoDecoder", (), ("int8-weights", "int4-weights", "fp8"), "bf16")},
    ),
    "llamacpp": EngineSpec(
        ("llama_cpp", "gguf"),
        "llamacpp",
        {
            "generate": EngineFactory(
                "llamacpp_decoder:LlamaCppDecoder", ("fp32", "fp16", "int8", "int4"), kinds="gguf_families:FAMILIES"
            )
        },
    ),
    "ctranslate2": EngineSpec(
        ("ctranslate2",),
        "ctranslate2",
        {"encode": EngineFactory("ctranslate2_engine:CTranslate2Engine", ("fp32", "int8"), kinds="ctranslate2_engine:CONVERTED")},
    ),
    "openvino": EngineSpec(
        ("openvino", "nncf"),
        "openvino",
        {
            "encode": EngineFactory("openvino_engine:OpenVinoEngine", ("fp32", "bf16", "int8-weights", "int8")),
            "media": EngineFactory("openvino_media:OpenVinoMediaEngine", ("fp32", "bf16")),
            "generate": EngineFactory("openvino_decoder:build_decoder", ("fp32", "bf16", "fp16-weights", *QUANTIZED)),
            "seq2seq": EngineFactory("openvino_seq2seq:OpenVinoSeq2Seq", ("fp32", "bf16", "fp16-weights", *QUANTIZED)),
        },
    ),
    "onnxruntime": EngineSpec(
        ("onnxruntime", "onnx", "onnxscript"),
        "onnx",
        {"encode": EngineFactory("onnxruntime_engine:OnnxRuntimeEngine", ("fp32", "int8"))},
    ),
    "torch-compiled": EngineSpec(
        ("torch",),
        "",
        {
            "encode": EngineFactory("torch_engine:TorchCompiledEngine", ("fp32", "tf32", "bf16")),
            "generate": EngineFactory("torch_decoder:TorchCompiledDecoder", ("fp32", "bf16")),
        },
        uncompiled="torch",
    ),
    "vllm": EngineSpec(
        ("vllm",),
        "",
        {"generate": EngineFactory("vllm_engine:VllmEngine", ("fp32", "bf16", "fp16"), ("fp32", "bf16", "fp16", "fp8"))},
        start_seconds=20.0,  # measured on two cores: 20 to 60
    ),
}
for _added in added_engines():
    _factory = EngineFactory(_added.factory, _added.precisions, _added.on_gpu, kinds=_added.kinds)
    ENGINES[_added.name] = EngineSpec(_added.libraries, "", {_added.task: _factory})
NULL_ENGINE = EngineSpec(  # computes nothing and cannot be chosen: it measures the time outside the engines
    (),
    "",
    {
        "encode": EngineFactory("null_engine:NullEngine", ("fp32",)),
        "generate": EngineFactory("null_decoder:NullDecoder", ("fp32",)),
        "seq2seq": EngineFactory("null_decoder:NullDecoder", ("fp32",)),
        "states": EngineFactory("null_decoder:NullDecoder", ("fp32",)),
        "as-transformers": EngineFactory("null_decoder:NullDecoder", ("fp32",)),
        "media": EngineFactory("null_media:NullMediaEngine", ("fp32",)),
    },
)


def build_engine(task: Task, name: EngineName, build: Any) -> Any:
    """Build an engine from ``build``, the parts that the engines of the task take.

    Raise JobFailed if the disk is full, or if an engine other than torch cannot load the model, such as from a damaged file."""
    spec = NULL_ENGINE if name == "nothing" else ENGINES[name]
    try:
        return _import_attribute(task, spec.factories[task].name)(build)
    except (UpshiftError, ImportError):
        raise
    except Exception as error:  # libraries have error types of their own
        reason = disk_full_message(error)
        if reason is not None:
            raise JobFailed(f"the files that {name} makes of the model could not be written ({reason}); {FREE_SOME}") from error
        if spec.libraries == ENGINES["torch"].libraries:
            raise
        raise JobFailed(
            f"the engine {name} does not load the model ({type(error).__name__}: {one_line(error)}); use another engine, or "
            f"delete {build.folder}, whose files are then made again"
        ) from error


def is_installed(name: EngineName) -> bool:
    """Return whether this environment has the libraries of an engine."""
    return all(find_spec(library) is not None for library in ENGINES[name].libraries)


def is_available(setup: EngineSetup) -> bool:
    """Return whether the libraries of a setup's engine are here, or in the environment of its own."""
    return setup.environment is not None or is_installed(setup.engine)


def install_line(name: EngineName) -> str:
    """Return the command that installs the libraries of an engine."""
    spec = ENGINES[name]
    return install_command(spec.extra) if spec.extra else f"pip install {' '.join(spec.libraries)}"


def contestants(
    task: Task,
    source: ModelSource,
    host: Host,
    *,
    exact: bool,
    batch: int,
    hint: Hint,
    stored: tuple[EngineName, ...] = (),
    reference: Precision = "fp32",
    environment: EngineEnvironment | None = None,
    tensor_parallel: int = 1,
) -> list[EngineSetup]:
    """Return the setups of all engines that can run the model, installed or not, the reference first.

    An engine with an environment of its own has setups only if that environment is known.

    Args:
        task: the task.
        source: the model.
        host: the machine. Setups that it does not support are left out.
        exact: leave out setups that round, because they cannot win under the quality "exact".
        batch: batch of every setup.
        hint: hint of every setup.
        stored: the engines that can load weights that are quantized already, the reference first. Empty: the weights are plain.
        reference: precision of the reference, transformers in torch.
        environment: of the engine that has its own.
        tensor_parallel: devices that share each layer. Above 1, only transformers in torch divides a model.
    """
    device = _device(host)
    threads = host.cpu.usable_cores if host.cpu is not None else 1
    base = EngineSetup(
        engine="torch",
        precision="stored",
        device=device,
        threads=threads,
        batch=batch,
        hint=hint,
        tensor_parallel=tensor_parallel,
    )
    if stored:
        return _stored_setups(task, base, stored, environment, exact=exact)
    excluded = _excluded_precisions(host, exact=exact, reference=reference)
    setups = []
    for name, spec in ENGINES.items():
        factory = spec.factories.get(task)
        if factory is None or factory.needs in excluded or (spec.has_environment and environment is None):
            continue
        if tensor_parallel > 1 and name != base.engine:
            continue
        precisions = [
            precision for precision in factory.precisions_on(device) if precision == reference or precision not in excluded
        ]
        engine_environment = environment if spec.has_environment else None
        if engine_environment is not None:
            precisions = [precision for precision in precisions if engine_environment.allows(precision)]
        if precisions and _supports(task, factory, source):
            setups += [base.changed(engine=name, precision=precision, environment=engine_environment) for precision in precisions]
    return sorted(setups, key=lambda setup: setup != base.changed(precision=reference))


def _stored_setups(
    task: Task, base: EngineSetup, names: tuple[EngineName, ...], environment: EngineEnvironment | None, *, exact: bool
) -> list[EngineSetup]:
    """Return the setups for weights that are quantized already, the reference first. Another engine may round otherwise."""
    computes_exactly = environment is not None and environment.arguments.dtype == "float32"
    has_others = base.tensor_parallel == 1 and (not exact or computes_exactly)
    return [_stored_setup(task, base, name, environment) for name in (names if has_others else names[:1])]


def _stored_setup(task: Task, base: EngineSetup, name: EngineName, environment: EngineEnvironment | None) -> EngineSetup:
    """Return the setup of an engine for weights as they are stored, on the CPU if the engine has no GPU."""
    spec = ENGINES[name]
    device = base.device if spec.factories[task].precisions_on(base.device) else "cpu"
    return base.changed(engine=name, device=device, environment=environment if spec.has_environment else None)


def _excluded_precisions(host: Host, *, exact: bool, reference: Precision) -> set[Precision]:
    """Return the precisions that the host does not support, or that cannot win."""
    excluded: set[Precision] = set()
    if host.supports("bf16") is False:
        excluded.add("bf16")
    if not host.supports("fp8"):
        excluded.add("fp8")
    if host.medium_is_bf16:
        excluded.add("tf32")
    if exact:
        excluded.update(ROUNDED)
    if reference != "fp32":
        excluded.update(("fp32", "tf32"))
    return excluded


def check_engine(
    task: Task, name: str, source: ModelSource, host: Host, environment: EngineEnvironment | None = None
) -> EngineName:
    """Return the engine's name. Raise RequestError if it does not support the task, the machine or the model, or if it
    is not installed. ``environment``: the environment of an engine that has its own."""
    device = _device(host)
    valid_names = [
        engine for engine, spec in ENGINES.items() if task in spec.factories and spec.factories[task].precisions_on(device)
    ]
    if name not in valid_names:
        device_name = "GPU; an empty CUDA_VISIBLE_DEVICES hides it" if device == "cuda" else "CPU"
        kind = KINDS_OF_TASK.get(task, task)
        raise RequestError(
            f"--engine {name!r} is no engine for {kind}; use one of {', '.join(valid_names)} (on this machine's {device_name})"
        )
    if ENGINES[name].has_environment:
        require_environment(environment)
    elif not is_installed(name):
        raise RequestError(f"--engine {name} is not installed: {install_line(name)}")
    factory = ENGINES[name].factories[task]
    if not _supports(task, factory, source):
        kinds = ", ".join(sorted(_import_attribute(task, factory.kinds)))
        raise RequestError(f"--engine {name} has no {_model_type(source)!r}; it has {kinds}")
    return name


def _device(host: Host) -> Device:
    return "cuda" if host.device == "cuda" else "cpu"


def _supports(task: Task, factory: EngineFactory, source: ModelSource) -> bool:
    """Return whether an engine supports the type of the model."""
    return not factory.kinds or _model_type(source) in _import_attribute(task, factory.kinds)


def _model_type(source: ModelSource) -> str:
    """Return the model_type of the model, or of its text model if it has several parts."""
    return str(source.config.get("text_config", source.config).get("model_type"))


def _import_attribute(task: Task, name: str) -> Any:
    """Import ``module:attribute`` from the task's folder of engines."""
    module, attribute = name.split(":")
    return getattr(import_module(f"{PACKAGES[task]}.engines.{module}"), attribute)
