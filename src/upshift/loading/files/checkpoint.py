"""Find a model's folder, its weights (in one file, or in shards with an index), and the small files next to them.

Each file is checked before its data is read. PyTorch's files, pytorch_model.bin, are rewritten once as safetensors in the
cache. A pickle is a program, so only torch's weights-only loader reads it, in a process with limited memory and time, and
without a network if the system allows that. A file that holds more than weights is rejected.
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
from upshift.loading.files.safetensors_header import Header, StoredTensor, quote, read_header
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
CONFIG = "config.json"
METADATA = {"format": "pt"}  # the framework of the tensors, which transformers checks
# Suffixes of weights in any library's format, and of pickles. Such files are not small files of a model.
WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".ggml", ".h5", ".msgpack", ".ot", ".onnx", ".onnx_data",
    ".tflite", ".npz", ".npy", ".mlmodel", ".engine",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a folder with the chat templates that are not the default
MODULES = "modules.json"  # a file of Sentence Transformers that names folders, each with a small file or weights


@dataclass(frozen=True)
class Checkpoint:
    """The safetensors files of a model's folder, by their headers."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]  # file by file, in the order of their bytes
    metadata: Mapping[str, str]  # the first file's metadata

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def find_checkpoint(folder: Path) -> Checkpoint:
    """Return the folder's safetensors files. If it has only pickles, rewrite them once as safetensors in the cache."""
    if not (isfile(folder / WEIGHTS) or isfile(folder / INDEX)) and find_pickle(folder):
        return find_safetensors(_find_or_rewrite_pickles(folder))
    return find_safetensors(folder)


def find_safetensors(folder: Path) -> Checkpoint:
    """Return the folder's safetensors files, one file before shards, as in transformers. Only headers are read.

    Raise RequestError, with its name, for the first file or tensor that is missing, damaged, or in another file than the index
    says.
    """
    if isfile(folder / WEIGHTS) or not isfile(folder / INDEX):
        if not isfile(folder / WEIGHTS) and (pickles := find_pickle(folder)):
            raise RequestError(f"{folder} has {pickles} and no {WEIGHTS}; write it once as safetensors: upshift shard")
        return _read_checkpoint(folder, {checked_file(folder, WEIGHTS): None})
    shards = read_index(folder / INDEX)
    return _read_checkpoint(folder, {checked_file(folder, name): tensors for name, tensors in shards.items()})


def find_pickle(folder: Path) -> str | None:
    """Return the name of the folder's pickle, or of its index of pickles, or None if it has neither."""
    return next((name for name in (PICKLED_WEIGHTS, PICKLED_INDEX) if isfile(folder / name)), None)


def _read_checkpoint(folder: Path, expected: Mapping[Path, set[str] | None]) -> Checkpoint:
    """Read the headers of files. ``expected``: the names of each file's tensors in the index, or None without an index."""
    tensors: dict[str, StoredTensor] = {}
    headers: list[Header] = []
    for file, names in expected.items():
        header = read_header(file)
        stored_tensors = header.by_name()
        if names is not None:
            check_names(file, stored_tensors.keys(), names, INDEX)
        tensors |= stored_tensors
        headers.append(header)
    return Checkpoint(folder, tuple(expected), tensors, headers[0].metadata)


def check_names(file: Path, names: Set[str], expected: Set[str], index: str) -> None:
    """Raise RequestError if the names of a shard's tensors differ from those in the index."""
    if names != expected:
        name = min(names ^ expected)
        problem = "has not the tensor" if name in expected else "has, against its index, the tensor"
        raise RequestError(f"{file} {problem} {quote(name)}; copy the shards and {index} again, of one and the same model")


def read_index(file: Path) -> dict[str, set[str]]:
    """Return the names of the tensors in each shard, by the shard's name in the index."""

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(pairs)
        if len(document) < len(pairs):
            raise ValueError("a key is there twice")
        return document

    try:
        index = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=reject_duplicates)
    except OSError as error:
        raise RequestError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file} is not valid JSON ({error}); copy it, or save the model, again") from None
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise RequestError(f'{file} has no "weight_map" from tensors to files; copy it, or save the model, again')
    tensors_by_shard: dict[str, set[str]] = {name: set() for name in sorted(set(shards.values()))}
    for tensor, name in shards.items():
        tensors_by_shard[name].add(tensor)
    return tensors_by_shard


def checked_file(folder: Path, name: str) -> Path:
    """Return a file of the folder by its name. Raise RequestError if the name, or a link, leads outside the folder.

    In the hub's cache, models--<name>/snapshots/<revision>/<file> is a link to models--<name>/blobs/<hash>, which may be a link
    to blobs/<part>/<hash>, for files that models share. Such links are allowed.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix not in SUFFIXES or not name.isprintable():
        raise RequestError(f"{folder} names the file {quote(name)}; weights are files of that folder, in {' or '.join(SUFFIXES)}")
    file = folder / path
    try:
        target = file.resolve()
        home = folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself, before Python 3.13
        raise RequestError(f"cannot read {file}: {error}") from None
    homes = [home]
    if home.parent.name == "snapshots":
        homes += [home.parents[1] / "blobs", home.parents[2] / "blobs"]
    if not any(target.is_relative_to(allowed) for allowed in homes):
        raise RequestError(f"{file} is a link to {target}, outside its folder; give the folder that the weights are in")
    if not isfile(target):
        raise RequestError(
            f"{folder} has no {quote(name)}; give a directory with safetensors weights; to train from random weights, "
            "write upshift train ... --from-config"
        )
    return file


def _find_or_rewrite_pickles(folder: Path) -> Path:
    """Return the folder in the cache with the rewritten weights. Rewrite them if it does not exist.

    Raise RequestError for a pickle that holds more than weights, and JobFailed if the disk is full."""
    names = {PICKLED_WEIGHTS: None} if isfile(folder / PICKLED_WEIGHTS) else dict(read_index(folder / PICKLED_INDEX))
    files = {checked_file(folder, name): tensors for name, tensors in names.items()}
    target = read_settings().cache_dir / "checkpoints" / _identity(files)
    with _exclusive(target):
        if not target.is_dir():
            _check_room(target.parent, sum(file.stat().st_size for file in files))
            _rewrite_pickles(target, folder, files)
    return target


def _rewrite_pickles(target: Path, folder: Path, files: dict[Path, set[str] | None]) -> None:
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    temporary.mkdir()
    try:
        index: dict[str, str] = {}
        for file, tensors in files.items():
            rewritten = temporary / _safetensors_name(file.relative_to(folder))
            rewritten.parent.mkdir(parents=True, exist_ok=True)
            _rewrite_pickle(file, rewritten)
            stored_tensors = read_header(rewritten).by_name()
            if tensors is not None:
                check_names(file, stored_tensors.keys(), tensors, PICKLED_INDEX)
            index |= dict.fromkeys(stored_tensors, rewritten.relative_to(temporary).as_posix())
        if len(files) > 1 or None not in files.values():
            (temporary / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8")
        find_safetensors(temporary)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _safetensors_name(name: Path) -> Path:
    return name.with_name(f"{name.stem.replace('pytorch_model', 'model', 1)}.safetensors")


def _rewrite_pickle(file: Path, target: Path) -> None:
    command = parent_process.command(PROCESS, str(file), str(target), options=("-P",))
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode == 0:
        return
    lines = process.stdout.splitlines()
    if lines and lines[-1].startswith("{"):
        answer = json.loads(lines[-1])
        raise JobFailed(answer["failed"]) if "failed" in answer else RequestError(answer["refused"])
    reason = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if process.returncode == -signal.SIGXCPU:
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
    """Return a hash of the files' paths, sizes and times of change."""
    states = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16]


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold a lock while the context is open, so that only one process at a time rewrites the same files."""
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_lock(target))
        except OSError as error:
            raise RequestError(
                f"pickled weights are rewritten into {target.parent}, which cannot be used: {error.strerror}; set UPSHIFT_CACHE "
                "to a folder that can be written"
            ) from None
        yield


def find_model_folder(reference: str) -> tuple[ModelSource, Path]:
    """Return a model that has its own weights, and its folder. A model on the hub is downloaded."""
    source = find_model(reference)
    if source.adapter is not None:
        raise RequestError(f"{reference!r} is an adapter; run  upshift merge {reference} --output DIR  first")
    fetch_weights(source)
    if source.directory is None:
        raise RequestError(f"{reference!r} is a config without weights; give a directory written by save_pretrained")
    return source, source.directory


def small_files(folder: Path) -> dict[str, Path]:
    """Return the files that are not weights, by their name in the folder.

    These are the config, the tokenizer, chat templates, generation settings and the model card. Links count as their targets."""
    files = {file.name: file for file in _small_files_in(folder)}
    for name in _module_folders(folder):
        if any(file.suffix in WEIGHT_SUFFIXES for file in (folder / name).iterdir()):
            raise RequestError(f"{folder} has weights in {name}, too ({MODULES}); only one set of weights can be rewritten")
        files |= {f"{name}/{file.name}": file for file in _small_files_in(folder / name)}
    return files | {f"{TEMPLATES}/{file.name}": file for file in sorted((folder / TEMPLATES).glob("*.jinja"))}


def _small_files_in(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not file.name.startswith(".") and file.name != MANIFEST:
            yield file


def _module_folders(folder: Path) -> list[str]:
    file = folder / MODULES
    if not file.is_file():
        return []
    try:
        names = [str(entry["path"]) for entry in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise RequestError(f"{file} is not a list of modules ({error}); save the model again") from None
    return [name for name in names if name and "/" not in name and not name.startswith(".") and (folder / name).is_dir()]
