"""Find a model's folder and the files beside its weights: config, tokenizer, chat template, generation settings, model card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from upshift.errors import RequestError
from upshift.loading.output_folder import MANIFEST
from upshift.models.source import ModelSource, fetch_weights, find_model

CONFIG = "config.json"
METADATA = {"format": "pt"}  # the framework of the tensors; transformers checks it
# Weights of any library, and what pickle wrote: no small file of a model.
WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".ggml", ".h5", ".msgpack", ".ot", ".onnx", ".onnx_data",
    ".tflite", ".npz", ".npy", ".mlmodel", ".engine",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a folder of those that are not the default
MODULES = "modules.json"  # of Sentence Transformers: names folders with a small file or weights each


def find_model_folder(reference: str) -> tuple[ModelSource, Path]:
    """Return a model with weights of its own, and its folder. A model of the hub is fetched."""
    source = find_model(reference)
    if source.adapter is not None:
        raise RequestError(f"{reference!r} is an adapter; run  upshift merge {reference} --output DIR  first")
    fetch_weights(source)
    if source.directory is None:
        raise RequestError(f"{reference!r} is a config without weights; give a directory written by save_pretrained")
    return source, source.directory


def small_files(folder: Path) -> dict[str, Path]:
    """Return the files that are not weights, by their name in the folder. Links are followed: their targets are copied."""
    found = {file.name: file for file in _files(folder)}
    for name in _modules(folder):
        if any(file.suffix in WEIGHTS for file in (folder / name).iterdir()):
            raise RequestError(f"{folder} has weights in {name}, too ({MODULES}); only one set of weights can be rewritten")
        found |= {f"{name}/{file.name}": file for file in _files(folder / name)}
    return found | {f"{TEMPLATES}/{file.name}": file for file in sorted((folder / TEMPLATES).glob("*.jinja"))}


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        is_weights = file.suffix in WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not file.name.startswith(".") and file.name != MANIFEST:
            yield file


def _modules(folder: Path) -> list[str]:
    file = folder / MODULES
    if not file.is_file():
        return []
    try:
        names = [str(entry["path"]) for entry in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise RequestError(f"{file} is not a list of modules ({error}); save the model again") from None
    return [name for name in names if name and "/" not in name and not name.startswith(".") and (folder / name).is_dir()]
