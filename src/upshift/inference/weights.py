"""Find the weights of a model on disk, the memory that they need, and the folder of an engine's converted files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import prod
from pathlib import Path

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.inference.engine_environment import EngineEnvironment
from upshift.inference.registry import EngineName, Precision, Task, check_engine
from upshift.loading.files.checkpoint import INDEX, WEIGHTS, checked_file, find_pickle, read_index
from upshift.loading.files.safetensors_header import read_header
from upshift.models.source import ModelSource, fetch_weights, find_model
from upshift.settings import read_settings

OPENVINO_FILE = "openvino_model.xml"  # the name that OpenVINO's tools use
OPENVINO_PARTS = ("upshift_encoder.xml", "upshift_decoder.xml")  # of an encoder-decoder; only Upshift writes such a pair
MAX_UNMEASURED_QUALITY = 0.99  # the highest bound for 16 bits where nothing can be compared
MEMORY_FACTOR = 1.5  # memory over bytes of weights: the export of a Llama of 134 M parameters to OpenVINO took 1.26


def find_weights(model: str) -> ModelSource:
    """Return the model's source, with its weights on disk. They may be quantized.

    Raise RequestError for a model without weights, or with an adapter."""
    source = find_model(model)
    if source.adapter is not None:
        raise RequestError(f"{model!r} is an adapter; write one model of both: upshift merge {model} --output DIR, then give DIR")
    fetch_weights(source)
    if not weight_files(source):
        pickles = None if source.directory is None else find_pickle(source.directory)
        if pickles is not None:
            raise RequestError(
                f"{model!r} has its weights in {pickles}, a pickle, which can run code; write them once as safetensors: "
                f"upshift shard {model} --output DIR, then give DIR"
            )
        raise RequestError(f"{model!r} has no weights (*.safetensors); give a directory written by save_pretrained")
    return source


def find_plain_weights(model: str) -> ModelSource:
    """Return the model's source as ``find_weights`` does. Raise RequestError also if the weights are quantized."""
    source = find_weights(model)
    if stored_for(source) is not None:
        raise RequestError(f"the weights of {model!r} are quantized already; give the model that it was made from")
    return source


def stored_for(source: ModelSource) -> EngineName | None:
    """Return the engine of our own environment that loads the model's quantized weights, or None if they are not quantized."""
    if source.config.get("quantization_config"):
        return "torch"
    return None if weight_files(source)[0].suffix == ".safetensors" else "openvino"


def loading_engines(source: ModelSource, environment: EngineEnvironment | None) -> tuple[EngineName, ...]:
    """Return the engines that can load the model's quantized weights, the reference of a race first. Return none if the weights
    are not quantized.

    ``environment``: the environment with vLLM. vLLM is alone if transformers cannot load the weights."""
    stored = stored_for(source)
    if stored is None:
        return ()
    method = quantization_method(source)
    if stored != "torch" or environment is None or method is None or not environment.has_quantization(method):
        return (stored,)
    return (stored, "vllm") if _transformers_problem(source) is None else ("vllm",)


def quantization_method(source: ModelSource) -> str | None:
    """Return the method of the weights that are quantized in a format of transformers, such as gptq, or None."""
    return (source.config.get("quantization_config") or {}).get("quant_method")


def check_stored_quality(source: ModelSource, engine: str | None, quality: float | str, environment: EngineEnvironment) -> None:
    """Raise RequestError if vLLM would have to compute quantized weights more exactly than it can, or than can be compared.

    ``engine``: the only engine to use. vLLM computes the known formats in 16 bits, unless the user fixes another dtype."""
    engines = loading_engines(source, environment)
    if "vllm" not in engines or engine not in (None, "vllm"):
        return
    if engines == ("vllm",) and (quality == "exact" or float(quality) > MAX_UNMEASURED_QUALITY):
        raise RequestError(
            f"transformers does not load the weights of {source.reference!r} ({_transformers_problem(source)}); vLLM "
            f"{environment.version} may, but then nothing measures how near its numbers are: allow it with --quality "
            f"{MAX_UNMEASURED_QUALITY}"
        )
    if engine == "vllm" and quality == "exact" and environment.arguments.dtype != "float32":
        raise RequestError(
            f"--engine vllm computes the quantized weights of {source.reference!r} in 16 bits, and --quality exact compares "
            "fp32; give a cosine to transformers that is enough, such as --quality 0.99"
        )


def _transformers_problem(source: ModelSource) -> str | None:
    from upshift.loading.load import find_quantization_problem

    return find_quantization_problem(source)


def check_requested_engine(
    task: Task, source: ModelSource, engine: str | None, host: Host, environment: EngineEnvironment | None = None
) -> EngineName | None:
    """Return the engine that the user requests, or None. ``environment``: the environment of an engine that has its own.

    Raise RequestError if that engine cannot run, or if the weights are quantized for another engine, or for one that cannot
    run."""
    requested = None if engine is None else check_engine(task, engine, source, host, environment)
    engines = loading_engines(source, environment)
    if not engines:
        return requested
    if "vllm" not in engines:
        check_engine(task, engines[0], source, host)
    stored = stored_for(source)
    if requested not in (None, stored, *engines):
        method = quantization_method(source)
        lacks = f", and vLLM lists no {method!r}" if requested == "vllm" and method is not None else ""
        raise RequestError(
            f"the weights of {source.reference!r} are stored for {stored}{lacks}; --engine {engine} cannot load them: leave it "
            "out, or give the model that they were made from"
        )
    return requested


def weight_files(source: ModelSource) -> list[Path]:
    """Return the weight files that transformers loads, or without such files those of OpenVINO. Ignore all other files."""
    folder = source.directory
    if folder is None:
        return []
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return [checked_file(folder, name) for name in read_index(folder / INDEX)]
    openvino_files = [(folder / name).with_suffix(".bin") for name in (OPENVINO_FILE, *OPENVINO_PARTS)]
    return [path for path in openvino_files if path.is_file()]


def weights_size(source: ModelSource) -> int:
    """Return the bytes of the weights on disk."""
    return sum(path.stat().st_size for path in weight_files(source))


def needed_memory(source: ModelSource, precision: Precision) -> int:
    """Return the bytes of memory that it takes to run the whole model in memory."""
    if stored_for(source) is not None:
        return round(MEMORY_FACTOR * weights_size(source))
    return round(MEMORY_FACTOR * (4 if precision == "fp32" else 2) * count_parameters(source))


def count_parameters(source: ModelSource) -> int:
    """Return the number of parameters from the headers of the weight files."""
    return sum(prod(tensor.shape) for path in weight_files(source) for tensor in read_header(path).tensors)


def weights_identity(source: ModelSource) -> str:
    """Return a hash of the weight files as they are now."""
    return files_identity(weight_files(source))


def files_identity(files: Iterable[Path]) -> str:
    """Return a hash of the files as they are now: names, sizes and modification times."""
    identity = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:12]


def engine_folder(task: Task, source: ModelSource, engine: EngineName) -> Path:
    """Return the cache folder for the files that an engine converts from these weights."""
    model_name = f"{source.model_hash}-{weights_identity(source)}"
    return read_settings().cache_dir / "engines" / model_name / f"{task}-{engine}"
