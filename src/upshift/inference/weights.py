"""The weights of a model on disk, and where an engine keeps what it made of them."""

from __future__ import annotations

import hashlib
from math import prod
from pathlib import Path

from upshift.errors import NothingFits, RequestError
from upshift.hardware.spec import Host
from upshift.inference.setup import EngineSetup, Task
from upshift.models.source import ModelSource, fetch_weights, find_model
from upshift.settings import read_settings
from upshift.units import format_bytes

FP32_ROOM = 1.5  # over the weights: exporting a Llama of 134 M parameters for OpenVINO held 1.26 of them beside the libraries


def find_weights(model: str) -> ModelSource:
    """Raises RequestError for a model without weights, or with an adapter."""
    source = find_model(model)
    if source.adapter is not None:
        raise RequestError(f"{model!r} has an adapter; merge it into its model (peft: merge_and_unload), then give that")
    fetch_weights(source)
    if source.directory is None or not any(source.directory.glob("*.safetensors")):
        raise RequestError(f"{model!r} has no weights (*.safetensors); give a directory written by save_pretrained")
    return source


def check_room(source: ModelSource, host: Host) -> None:
    """Raises NothingFits where the model in fp32, which every race begins with, does not fit into free memory."""
    free = None if host.cpu is None else host.cpu.free_memory_bytes
    needed = FP32_ROOM * 4 * _parameters(source)
    if free is not None and needed > free:
        raise NothingFits(
            f"a race on {source.reference!r} takes {format_bytes(needed)}, as it begins with transformers in fp32, and "
            f"{format_bytes(free)} of memory is free; free some, or look what fits where: upshift plan MODEL --generate"
        )


def _parameters(source: ModelSource) -> int:
    """From the headers of its files alone."""
    from safetensors import safe_open

    assert source.directory is not None
    found = 0
    for path in source.directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            found += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return found


def weights_identity(source: ModelSource) -> str:
    """Of files as they are now: names, sizes and times of change."""
    assert source.directory is not None
    files = sorted(source.directory.glob("*.safetensors"))
    said = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:12]


def engine_folder(task: Task, source: ModelSource, setup: EngineSetup) -> Path:
    name = f"{source.model_hash}-{weights_identity(source)}"
    return read_settings().cache_dir / "engines" / name / f"{task}-{setup.engine}"
