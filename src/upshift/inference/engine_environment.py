"""Find the Python environment of an engine that runs in its own, and the arguments of that engine that the user fixes.

Such an engine needs versions of torch and transformers that differ from ours. Its worker is a script of the engine's folder that
runs under the other interpreter (generation/engines/vllm_worker.py)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from upshift.debugging.finding import Finding, error, ok
from upshift.errors import RequestError
from upshift.planning.inference.plan import InferencePlan
from upshift.settings import read_settings
from upshift.value import Value

WORKER = Path(__file__).parent / "generation" / "engines" / "vllm_worker.py"
VARIABLE = "UPSHIFT_VLLM_PYTHON"
INSTALLED = "upshift-installed"  # an empty file, which an environment has when it is whole
DESCRIBE_SECONDS = 60.0
TESTED_VERSION = "0.32.0"  # the version of vLLM that the tests have run
SHOWN_NAMES = 3
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # vLLM's names of precisions
EXAMPLE = "such as that of an environment from upshift engines install vllm"
# The engine arguments that Upshift gives to vLLM, beside those that the user fixes.
PASSED = (
    *("model", "dtype", "quantization", "enforce_eager", "skip_tokenizer_init", "disable_log_stats"),
    *("max_num_seqs", "max_model_len", "max_logprobs", "logprobs_mode", "structured_outputs_config"),
    *("enable_lora", "max_loras", "max_lora_rank"),
)


class EngineArguments(Value):
    """Hold the engine arguments of vLLM that the user fixes, by vLLM's names. None: Upshift or vLLM chooses."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    tensor_parallel_size: int | None = Field(None, gt=0)
    pipeline_parallel_size: int | None = Field(None, gt=0)
    data_parallel_size: int | None = Field(None, gt=0)
    enable_expert_parallel: bool | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_num_seqs: int | None = Field(None, gt=0)
    max_num_batched_tokens: int | None = Field(None, gt=0)
    max_model_len: int | None = Field(None, gt=0)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    speculative_config: str | None = Field(None, description="how vLLM guesses tokens, as JSON: method, model and others")

    @field_validator("speculative_config")
    @classmethod
    def _check_speculation(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                is_object = isinstance(json.loads(text), dict)
            except ValueError:
                is_object = False
            if not is_object:
                example = '{"method": "ngram", "num_speculative_tokens": 4}'
                raise RequestError(f"speculative_config={text} is no JSON object; write one, such as '{example}'")
        return text

    @property
    def draft(self) -> str | None:
        """Return the draft model that ``speculative_config`` names, or None. Heads such as EAGLE's are no draft models."""
        config = json.loads(self.speculative_config or "{}")
        return config.get("model") if config.get("method", "draft_model") == "draft_model" else None

    @property
    def fixed(self) -> dict[str, Any]:
        """Return the arguments that are fixed."""
        return self.model_dump(exclude_none=True)

    @property
    def of_a_replica(self) -> dict[str, Any]:
        """Return the fixed arguments of each replica, which is an engine of vLLM by itself."""
        arguments = {name: value for name, value in self.fixed.items() if name != "data_parallel_size"}
        if self.speculative_config is not None:
            arguments["speculative_config"] = json.loads(self.speculative_config)
        return arguments

    @property
    def replicas(self) -> int:
        """Return the number of engines that have the whole model."""
        return self.data_parallel_size or 1

    @property
    def shards(self) -> int:
        """Return the number of devices that share one model."""
        return (self.tensor_parallel_size or 1) * (self.pipeline_parallel_size or 1)

    @property
    def ranks(self) -> int:
        """Return the number of devices of all replicas."""
        return self.shards * self.replicas


class EngineEnvironment(Value):
    """Describe the environment of an engine, and hold the fixed arguments."""

    python: Path
    version: str  # vLLM's version
    torch: str | None = None
    transformers: str | None = None
    quantizations: tuple[str, ...] | None = Field(None, description="methods of quantized weights that vLLM lists; None: unknown")
    arguments: EngineArguments = EngineArguments()

    def allows(self, precision: str) -> bool:
        """Return whether the fixed dtype, if there is one, is that of a precision."""
        return self.arguments.dtype is None or DTYPES[self.arguments.dtype] == precision

    def has_quantization(self, method: str) -> bool:
        """Return whether vLLM lists a method of quantized weights. Where its list is unknown, vLLM itself decides."""
        return self.quantizations is None or method in self.quantizations

    def describe(self) -> str:
        """Return one line: ``vllm 0.32.0, torch 2.13.0+cpu, transformers 5.19.0``."""
        libraries = (("vllm", self.version), ("torch", self.torch), ("transformers", self.transformers))
        return ", ".join(f"{name} {version}" for name, version in libraries if version)


def choose_environment(
    engine: str | None, python: str | Path | None, arguments: Mapping[str, Any] | None, *, tensor_parallel: int = 1
) -> EngineEnvironment | None:
    """Return the environment of the engine that has its own, or None if it cannot be chosen or the user names none.

    Raise RequestError if the user names an interpreter or arguments, and another engine, or that engine and nothing is found.
    ``engine``: the only engine to use. ``tensor_parallel``: the devices among which transformers divides the model."""
    is_divided = tensor_parallel > 1 and engine is None
    if engine in (None, "vllm") and not is_divided:
        environment = find_environment(None if python is None else Path(python), arguments)
        return environment if engine is None else require_environment(environment)
    option_name = "--engine-python" if python is not None else "--engine-set" if arguments else None
    if option_name is not None:
        other = f"--tensor-parallel {tensor_parallel} uses the engine torch" if is_divided else f"--engine is {engine}"
        raise RequestError(f"{option_name} is for --engine vllm, and {other}; leave one of them out")
    return None


def find_environment(requested: Path | None, arguments: Mapping[str, Any] | None = None) -> EngineEnvironment | None:
    """Return the environment that has vLLM, or None if there is none.

    Args:
        requested: the value of ``--engine-python``. None: that of the variable UPSHIFT_VLLM_PYTHON if it is set, or else what
            ``upshift engines install`` has made.
        arguments: the engine arguments that the user fixes.

    Raise RequestError if the interpreter does not run, if it has no vLLM or one with other arguments, or for a wrong argument."""
    fixed = read_arguments(arguments or {})
    python = requested or read_settings().vllm_python or _installed_python()
    if python is None:
        if fixed.fixed:
            raise RequestError(
                f"--engine-set {next(iter(fixed.fixed))} is for vLLM, and no environment that has it is known; give "
                f"--engine-python PATH, {EXAMPLE}"
            )
        return None
    names = {requested: "--engine-python", read_settings().vllm_python: f"the environment variable {VARIABLE},"}
    name = names.get(python, "the environment of upshift engines install,")
    versions = _ask_versions(python, name)
    _check_names(versions, fixed, f"{name} {python}")
    return EngineEnvironment(
        python=python,
        version=versions["vllm"],
        torch=versions.get("torch"),
        transformers=versions.get("transformers"),
        quantizations=versions.get("quantizations"),
        arguments=fixed,
    )


def _check_names(versions: Mapping[str, Any], fixed: EngineArguments, name: str) -> None:
    """Raise RequestError if this version of vLLM lacks an engine argument, or another name that Upshift uses.

    ``versions``: what the environment says of itself. ``name``: that of the environment."""
    version = versions["vllm"]
    arguments = versions["arguments"]
    unknown = next((argument for argument in fixed.fixed if argument not in arguments), None)
    lacking = [f"EngineArgs.{argument}" for argument in PASSED if argument not in arguments] + versions["lacks"]
    if lacking:
        shown = ", ".join(lacking[:SHOWN_NAMES]) + (" and others" if len(lacking) > SHOWN_NAMES else "")
        raise RequestError(
            f"{name} has vllm {version}, which lacks names that Upshift uses ({shown}); give an environment with vllm "
            f"{TESTED_VERSION}, {EXAMPLE}"
        )
    if unknown is not None:
        raise RequestError(f"--engine-set {unknown} is not an argument of vllm {version}; leave it out, or give another version")


def installed_folder() -> Path:
    """Return the folder into which ``upshift engines install vllm`` installs."""
    return read_settings().cache_dir / "engines" / "vllm"


def _installed_python() -> Path | None:
    """Return the interpreter of what ``upshift engines install`` has made, or None if there is nothing, or nothing whole."""
    folder = installed_folder()
    return environment_python(folder) if (folder / INSTALLED).is_file() else None


def environment_python(folder: Path) -> Path:
    """Return the interpreter of a Python environment."""
    return folder / "bin" / "python"


def examine_environment() -> Iterator[Finding]:
    """Yield what ``upshift doctor`` says of the environment with vLLM: its versions, or what is wrong with it."""
    variable = read_settings().vllm_python
    evidence = f"{installed_folder()}, by upshift engines install" if variable is None else f"{VARIABLE}={variable}"
    fix = f"unset {VARIABLE}, or name another interpreter"
    if variable is None:
        fix = "run upshift engines install vllm again, or remove the folder"
    try:
        environment = find_environment(None)
    except RequestError as problem:
        yield error("vllm", what=str(problem), evidence=evidence, fix=fix)
        return
    if environment is not None:
        is_tested = environment.version == TESTED_VERSION
        note = "" if is_tested else f"; it has the arguments that Upshift uses, and the tests run {TESTED_VERSION}"
        yield ok("vllm", what=f"{environment.describe()} race in upshift generate and upshift serve{note}", evidence=evidence)


def require_environment(environment: EngineEnvironment | None) -> EngineEnvironment:
    """Return the environment. Raise RequestError if there is none."""
    if environment is None:
        raise RequestError(
            "--engine vllm runs in a Python environment of its own; install it with upshift engines install vllm, or give "
            f"--engine-python PATH, or set {VARIABLE}"
        )
    return environment


def read_arguments(arguments: Mapping[str, Any]) -> EngineArguments:
    """Return the engine arguments. Raise RequestError for a name or a value that is not possible."""
    unknown = sorted(set(arguments) - set(EngineArguments.model_fields))
    if unknown:
        raise RequestError(
            f"--engine-set {unknown[0]} is not an argument to fix; use one of {', '.join(EngineArguments.model_fields)}"
        )
    try:
        # A JSON object on the command line is a dict, and a Value holds the same text for the same arguments.
        written = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in arguments.items()}
        return EngineArguments.from_fields(written)
    except RequestError as error:
        raise RequestError(f"--engine-set: {error}") from None


def arguments_of_plan(plan: InferencePlan, *, is_stored: bool = False) -> dict[str, Any] | None:
    """Return vLLM's engine arguments for a plan of generation. ``is_stored``: the model's files have the plan's weights, and vLLM
    reads their format and its dtype from the config.

    Return None for weights or cached keys and values in 8 or 4 bit integers, because vLLM loads such weights from their own
    files alone."""
    if (plan.weights in ("int8", "int4") and not is_stored) or plan.kv_cache == "int8":
        return None
    arguments: dict[str, Any] = {}
    if not is_stored:
        arguments["dtype"] = next((dtype for dtype, precision in DTYPES.items() if precision == plan.weights), "bfloat16")
        if plan.weights == "fp8":
            arguments["quantization"] = "fp8"
    if plan.kv_cache == "fp8":
        arguments["kv_cache_dtype"] = "fp8"
    degrees = {
        "tensor_parallel_size": plan.tensor_parallel,
        "pipeline_parallel_size": plan.pipeline_parallel,
        "data_parallel_size": plan.replicas,
    }
    arguments |= {name: degree for name, degree in degrees.items() if degree > 1}
    # vLLM counts the next tokens of running sequences beside the tokens of prompts.
    arguments |= {
        "max_num_seqs": plan.max_concurrency,
        "max_num_batched_tokens": plan.prefill_chunk_tokens + plan.max_concurrency,
    }
    if plan.execution == "eager":
        arguments["enforce_eager"] = True
    return arguments


def _ask_versions(python: Path, name: str) -> Mapping[str, Any]:
    """Return the versions in an environment. Nothing is imported there. ``name``: the option or the variable that names the
    interpreter."""
    if not python.exists():
        raise RequestError(f"{name} {python} does not exist; give a Python interpreter, {EXAMPLE}")
    if python.is_dir():
        raise RequestError(f"{name} {python} is a folder; give a Python interpreter, {EXAMPLE}")
    try:
        answer = subprocess.run(
            [str(python), "-I", str(WORKER), "--describe"], capture_output=True, text=True, timeout=DESCRIBE_SECONDS, check=False
        )
        versions: Mapping[str, Any] = json.loads(answer.stdout)
        vllm_version = versions["vllm"]
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
        raise RequestError(f"{name} {python} does not run as a Python interpreter; give one, {EXAMPLE}") from None
    if vllm_version is None:
        raise RequestError(
            f"{name} {python} (Python {versions['python']}) has no vLLM; install it with upshift engines install "
            "vllm, or give the interpreter of another environment"
        )
    return versions
