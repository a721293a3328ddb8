"""Find the weights of a model on disk, and the folder where an engine keeps what it made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import prod
from pathlib import Path

from upshift.errors import NothingFits, RequestError
from upshift.hardware import detect
from upshift.hardware.spec import Host
from upshift.hardware.torch_build import check_torch_uses_gpus
from upshift.inference.registry import EngineName, Precision, Task, check_engine
from upshift.loading.files.checkpoint import INDEX, WEIGHTS, checked_file, read_index
from upshift.loading.files.safetensors_header import read_header
from upshift.models.source import ModelSource, fetch_weights, find_model
from upshift.settings import read_settings
from upshift.units import format_bytes

OPENVINO_FILE = "openvino_model.xml"  # as its own tools name it
OPENVINO_PARTS = ("upshift_encoder.xml", "upshift_decoder.xml")  # of an encoder-decoder: no other tool has such a pair
ROOM = 1.5  # over the weights: exporting a Llama of 134 M parameters for OpenVINO held 1.26 of them beside the libraries


def find_weights(model: str) -> ModelSource:
    """Return the model's source. Raise RequestError for a model without weights, or with an adapter. The weights may
    be quantized."""
    source = find_model(model)
    if source.adapter is not None:
        raise RequestError(f"{model!r} has an adapter; merge it into its model (peft: merge_and_unload), then give that")
    fetch_weights(source)
    if not weight_files(source):
        raise RequestError(f"{model!r} has no weights (*.safetensors); give a directory written by save_pretrained")
    return source


def find_plain_weights(model: str) -> ModelSource:
    """Return the model's source as ``find_weights`` does. Raise RequestError if the weights are quantized, too."""
    source = find_weights(model)
    if stored_for(source) is not None:
        raise RequestError(f"the weights of {model!r} are quantized already; give the model that it was made from")
    return source


def stored_for(source: ModelSource) -> EngineName | None:
    """Return the one engine that loads weights which are quantized already. None: they are not, and each engine makes
    its own."""
    if source.config.get("quantization_config"):
        return "torch"
    return None if weight_files(source)[0].suffix == ".safetensors" else "openvino"


def check_asked(task: Task, source: ModelSource, engine: str | None, host: Host) -> EngineName | None:
    """Return the engine that the user asks for. Raise RequestError if it, or the one that the weights are quantized
    for, cannot run."""
    asked, stored = (None if name is None else check_engine(task, name, source, host) for name in (engine, stored_for(source)))
    if stored is not None and asked not in (None, stored):
        raise RequestError(f"the weights of {source.reference!r} are stored for {stored}; --engine {engine} cannot load them")
    return asked


def weight_files(source: ModelSource) -> list[Path]:
    """Return the files that transformers loads, whatever lies beside them, or else that of OpenVINO."""
    folder = source.directory
    if folder is None:
        return []
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return [checked_file(folder, name) for name in read_index(folder / INDEX)]
    exported = [(folder / name).with_suffix(".bin") for name in (OPENVINO_FILE, *OPENVINO_PARTS)]
    return [path for path in exported if path.is_file()]


def weights_size(source: ModelSource) -> int:
    """Return the bytes of the weights on disk."""
    return sum(path.stat().st_size for path in weight_files(source))


def computing_host(stored: EngineName | None = None) -> Host:
    """Return this machine with the GPU that torch computes on, or else with its CPU alone. Weights that another
    engine loads have the CPU alone, too."""
    import torch

    host = detect()
    if host.device == "cuda" and stored in (None, "torch"):
        check_torch_uses_gpus(host)
        if torch.cuda.is_available():
            return host.one_device()
    return host.cpu_alone()


def free_memory(host: Host) -> int | None:
    """Return the free bytes on the device that runs the model."""
    device = host.gpu or host.cpu
    return None if device is None else device.free_memory_bytes


def reference_precision(source: ModelSource, host: Host) -> Precision:
    """Return what transformers computes in at the start of a race: fp32, or 16 bits on a GPU without room for fp32."""
    free = free_memory(host)
    if host.gpu is None or free is None or needed_memory(source, "fp32") <= free:
        return "fp32"
    return "fp16" if host.supports("bf16") is False else "bf16"


def check_room(source: ModelSource, host: Host, reference: Precision) -> None:
    """Raise NothingFits if the reference, with which every race begins, does not fit into free memory."""
    free, needed = free_memory(host), needed_memory(source, reference)
    if free is not None and needed > free:
        raise NothingFits(
            f"running {source.reference!r} takes {format_bytes(needed)}, as a race begins with transformers in {reference}, and "
            f"{format_bytes(free)} of memory is free; free some, or look what fits where: upshift plan MODEL --generate"
        )


def needed_memory(source: ModelSource, precision: Precision) -> int:
    """Return the bytes that running the whole model in memory takes."""
    if stored_for(source) is not None:
        return round(ROOM * weights_size(source))
    return round(ROOM * (4 if precision == "fp32" else 2) * _parameters(source))


def _parameters(source: ModelSource) -> int:
    """Return the number of parameters, from the headers of the model's files alone."""
    return sum(prod(tensor.shape) for path in weight_files(source) for tensor in read_header(path).tensors)


def weights_identity(source: ModelSource) -> str:
    return files_identity(weight_files(source))


def files_identity(files: Iterable[Path]) -> str:
    """Return a hash of the files as they are now: names, sizes and times of change."""
    said = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:12]


def engine_folder(task: Task, source: ModelSource, engine: EngineName) -> Path:
    name = f"{source.model_hash}-{weights_identity(source)}"
    return read_settings().cache_dir / "engines" / name / f"{task}-{engine}"
