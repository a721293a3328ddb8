"""The weights of a model's folder: one file, or shards with an index, each checked before anything is read of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path, PurePosixPath
from typing import Any

from upshift.errors import RequestError
from upshift.loading.header import Header, StoredTensor, read_header, shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]  # file by file, in the order of their bytes
    metadata: Mapping[str, str]  # of the first file

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def find_checkpoint(folder: Path) -> Checkpoint:
    """As transformers chooses: one file before shards. Reads headers only.

    Raises RequestError naming the first file or tensor that is missing, damaged, or not where the index says.
    """
    if isfile(folder / WEIGHTS) or not isfile(folder / INDEX):
        names: dict[str, set[str] | None] = {WEIGHTS: None}
    else:
        names = dict(_read_index(folder / INDEX))
    return _gathered(folder, {inside(folder, name): tensors for name, tensors in names.items()})


def _gathered(folder: Path, expected: dict[Path, set[str] | None]) -> Checkpoint:
    """``expected``: the tensors of each file where an index names them."""
    tensors: dict[str, StoredTensor] = {}
    headers: list[Header] = []
    for file, names in expected.items():
        header = read_header(file)
        found = {tensor.name: tensor for tensor in header.tensors}
        if names is not None and found.keys() != names:
            name = min(found.keys() ^ names)
            problem = "has not the tensor" if name in names else "has, against its index, the tensor"
            raise RequestError(f"{file} {problem} {shown(name)}; copy the shards and {INDEX} again, of one and the same model")
        tensors |= found
        headers.append(header)
    return Checkpoint(folder, tuple(expected), tensors, headers[0].metadata)


def _read_index(file: Path) -> dict[str, set[str]]:
    """The tensors of each shard, by the shard's name in the index."""

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is there twice")
        return found

    try:
        index = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=checked)
    except OSError as error:
        raise RequestError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file} is not valid JSON ({error}); copy it, or save the model, again") from None
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise RequestError(f'{file} has no "weight_map" from tensors to files; copy it, or save the model, again')
    found: dict[str, set[str]] = {name: set() for name in sorted(set(shards.values()))}
    for tensor, name in shards.items():
        found[name].add(tensor)
    return found


def inside(folder: Path, name: str) -> Path:
    """A file that an index, or a link, names. Raises RequestError where it lies outside the folder.

    The hub's cache keeps its files beside the folder: snapshots/<revision>/<name> is a link to ../../blobs/<hash>.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors" or not name.isprintable():
        raise RequestError(f"{folder} names the file {shown(name)}; weights are *.safetensors files of that folder")
    file = folder / path
    try:
        target, home = file.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself, before Python 3.13
        raise RequestError(f"cannot read {file}: {error}") from None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not target.is_relative_to(home) and target.parent != blobs:
        raise RequestError(f"{file} is a link to {target}, outside its folder; give the folder that the weights are in")
    if not target.is_file():
        raise RequestError(f"{folder} has no {name}; give a directory with safetensors weights, or --from-config for random ones")
    return file
