"""Find the weights of a model's folder, in one file or in shards with an index, and check each file before its data is read.

PyTorch's own files, pytorch_model.bin, are rewritten as safetensors in the cache, once. A pickle is a program. Only torch's
weights-only loader reads it, in a process that may use little memory and time. The process has no network if the system allows
to give it up. A file that needs more than weights is refused.

Find a model's folder and the files beside its weights: config, tokenizer, chat template, generation settings, model card.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path, PurePosixPath
from typing import Any

from upshift import parent_process
from upshift.atomic_file import exclusive_lock
from upshift.errors import JobFailed, RequestError
from upshift.loading.files.safetensors_header import Header, StoredTensor, read_header, shown
from upshift.loading.rewrite.output_folder import MANIFEST
from upshift.models.source import ModelSource, fetch_weights, find_model
from upshift.settings import read_settings
from upshift.units import format_bytes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED_WEIGHTS = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
SUFFIXES = (".safetensors", ".bin")
PROCESS = "upshift.loading.files.bin_process"


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
    """Return the folder's safetensors files. If it has pickles only, rewrite them once as safetensors into the cache."""
    if not (isfile(folder / WEIGHTS) or isfile(folder / INDEX)) and pickles_in(folder):
        return find_safetensors(_rewritten(folder))
    return find_safetensors(folder)


def find_safetensors(folder: Path) -> Checkpoint:
    """Return the folder's safetensors files as transformers chooses them: one file before shards. Only headers are read.

    Raise RequestError naming the first file or tensor that is missing, damaged, or not where the index says.
    """
    if isfile(folder / WEIGHTS) or not isfile(folder / INDEX):
        if not isfile(folder / WEIGHTS) and (pickles := pickles_in(folder)):
            raise RequestError(f"{folder} has {pickles} and no {WEIGHTS}; write it once as safetensors: upshift shard")
        return _gathered(folder, {inside(folder, WEIGHTS): None})
    shards = read_index(folder / INDEX)
    return _gathered(folder, {inside(folder, name): tensors for name, tensors in shards.items()})


def pickles_in(folder: Path) -> str | None:
    """Return the name of the pickled file, or of the index of pickled files, or None if the folder has neither."""
    return next((name for name in (PICKLED_WEIGHTS, PICKLED_INDEX) if isfile(folder / name)), None)


def _gathered(folder: Path, expected: Mapping[Path, set[str] | None]) -> Checkpoint:
    """Read the headers of files. ``expected``: the tensors that an index names for each file, or None without an index."""
    tensors: dict[str, StoredTensor] = {}
    headers: list[Header] = []
    for file, names in expected.items():
        header = read_header(file)
        found = header.by_name()
        if names is not None:
            check_names(file, found.keys(), names, INDEX)
        tensors |= found
        headers.append(header)
    return Checkpoint(folder, tuple(expected), tensors, headers[0].metadata)


def check_names(file: Path, found: Set[str], expected: Set[str], index: str) -> None:
    """Raise RequestError if a shard holds other tensors than its index says."""
    if found != expected:
        name = min(found ^ expected)
        problem = "has not the tensor" if name in expected else "has, against its index, the tensor"
        raise RequestError(f"{file} {problem} {shown(name)}; copy the shards and {index} again, of one and the same model")


def read_index(file: Path) -> dict[str, set[str]]:
    """Return the names of the tensors of each shard, by the shard's name in the index."""

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
    """Return a file that an index, or a link, names. Raise RequestError if the file lies outside the folder.

    The hub's cache keeps its files beside the folder: models--<name>/snapshots/<revision>/<file> is a link to
    models--<name>/blobs/<hash>, which may be a link to blobs/<part>/<hash>, where files that models share are kept.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix not in SUFFIXES or not name.isprintable():
        raise RequestError(f"{folder} names the file {shown(name)}; weights are files of that folder, in {' or '.join(SUFFIXES)}")
    file = folder / path
    try:
        target, home = file.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself, before Python 3.13
        raise RequestError(f"cannot read {file}: {error}") from None
    homes = [home]
    if home.parent.name == "snapshots":
        homes += [home.parents[1] / "blobs", home.parents[2] / "blobs"]
    if not any(target.is_relative_to(there) for there in homes):
        raise RequestError(f"{file} is a link to {target}, outside its folder; give the folder that the weights are in")
    if not isfile(target):
        raise RequestError(
            f"{folder} has no {shown(name)}; give a directory with safetensors weights; only upshift train makes random ones, "
            "with --from-config"
        )
    return file


def _rewritten(folder: Path) -> Path:
    """Return the folder of the rewritten weights.

    Raise RequestError for a pickle that holds more than weights, JobFailed if the disk is full."""
    names = {PICKLED_WEIGHTS: None} if isfile(folder / PICKLED_WEIGHTS) else dict(read_index(folder / PICKLED_INDEX))
    files = {inside(folder, name): tensors for name, tensors in names.items()}
    place = read_settings().cache_dir / "checkpoints" / _identity(files)
    with _alone(place):
        if not place.is_dir():
            _check_room(place.parent, sum(file.stat().st_size for file in files))
            _make(place, folder, files)
    return place


def _make(place: Path, folder: Path, files: dict[Path, set[str] | None]) -> None:
    temporary = place.with_name(f"{place.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of one that was killed
    temporary.mkdir()
    try:
        index: dict[str, str] = {}
        for file, tensors in files.items():
            made = temporary / _new_name(file.relative_to(folder))
            made.parent.mkdir(parents=True, exist_ok=True)
            _rewrite(file, made)
            found = read_header(made).by_name()
            if tensors is not None:
                check_names(file, found.keys(), tensors, PICKLED_INDEX)
            index |= dict.fromkeys(found, made.relative_to(temporary).as_posix())
        if len(files) > 1 or None not in files.values():
            (temporary / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8")
        find_safetensors(temporary)
        temporary.rename(place)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _new_name(name: Path) -> Path:
    return name.with_name(f"{name.stem.replace('pytorch_model', 'model', 1)}.safetensors")


def _rewrite(file: Path, made: Path) -> None:
    command = parent_process.command(PROCESS, str(file), str(made), options=("-P",))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return
    said = done.stdout.splitlines()
    if said and said[-1].startswith("{"):
        answer = json.loads(said[-1])
        raise JobFailed(answer["failed"]) if "failed" in answer else RequestError(answer["refused"])
    reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode == -signal.SIGXCPU:
        reason = "it took more time than any weights of that size"
    raise RequestError(f"{file} was refused: the process that reads it ended ({reason[:200]}); save the model as safetensors")


def _check_room(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise JobFailed(
            f"rewriting pickled weights takes {format_bytes(need)} and {folder} has {format_bytes(free)} free; free some, or set "
            "UPSHIFT_CACHE to a folder on another disk"
        )


def _identity(files: dict[Path, set[str] | None]) -> str:
    """Return a hash of the files as they are now: paths, sizes and times of change."""
    said = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Hold a lock. Another process that rewrites the same files waits until this one has finished."""
    with ExitStack() as stack:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_lock(place))
        except OSError as error:
            raise RequestError(
                f"pickled weights are rewritten into {place.parent}, which cannot be used: {error.strerror}; set UPSHIFT_CACHE "
                "to a folder that can be written"
            ) from None
        yield


CONFIG = "config.json"
METADATA = {"format": "pt"}  # the framework of the tensors; transformers checks it
# Weights of any library, and what pickle wrote: no small file of a model.
WEIGHT_SUFFIXES = (
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
        if any(file.suffix in WEIGHT_SUFFIXES for file in (folder / name).iterdir()):
            raise RequestError(f"{folder} has weights in {name}, too ({MODULES}); only one set of weights can be rewritten")
        found |= {f"{name}/{file.name}": file for file in _files(folder / name)}
    return found | {f"{TEMPLATES}/{file.name}": file for file in sorted((folder / TEMPLATES).glob("*.jinja"))}


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
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
