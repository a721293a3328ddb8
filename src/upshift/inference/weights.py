"""The weights of a model on disk, and where an engine keeps what it made of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from upshift.errors import RequestError
from upshift.inference.setup import EngineSetup, Task
from upshift.models.source import ModelSource, fetch_weights, find_model
from upshift.settings import read_settings


def find_weights(model: str) -> ModelSource:
    """Raises RequestError for a model without weights, or with an adapter."""
    source = find_model(model)
    if source.adapter is not None:
        raise RequestError(f"{model!r} has an adapter; merge it into its model (peft: merge_and_unload), then give that")
    fetch_weights(source)
    if source.directory is None or not any(source.directory.glob("*.safetensors")):
        raise RequestError(f"{model!r} has no weights (*.safetensors); give a directory written by save_pretrained")
    return source


def weights_identity(source: ModelSource) -> str:
    """Of files as they are now: names, sizes and times of change."""
    assert source.directory is not None
    files = sorted(source.directory.glob("*.safetensors"))
    said = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:12]


def engine_folder(task: Task, source: ModelSource, setup: EngineSetup) -> Path:
    name = f"{source.model_hash}-{weights_identity(source)}"
    return read_settings().cache_dir / "engines" / name / f"{task}-{setup.engine}"
