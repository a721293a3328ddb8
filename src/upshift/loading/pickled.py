"""Rewrite PyTorch's own files, pytorch_model.bin, as safetensors in the cache, once, in a separate process.

A pickle is a program. Only torch's weights-only loader reads it, in a process that may use little memory and time. The process
has no network if the system allows to give it up. A file that needs more than weights is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from upshift import with_parent
from upshift.errors import JobFailed, RequestError
from upshift.loading.checkpoint import INDEX, PICKLED_INDEX, PICKLED_WEIGHTS, check_names, find_safetensors, inside, read_index
from upshift.loading.header import read_header
from upshift.settings import read_settings
from upshift.units import format_bytes
from upshift.whole_file import alone

PROCESS = "upshift.loading.pickled_process"


def rewritten(folder: Path) -> Path:
    """Return the folder of the rewritten weights.

    Raise RequestError for a pickle that holds more than weights, JobFailed if the disk is full."""
    names = {PICKLED_WEIGHTS: None} if os.path.isfile(folder / PICKLED_WEIGHTS) else dict(read_index(folder / PICKLED_INDEX))
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
    command = with_parent.command(PROCESS, str(file), str(made), options=("-P",))
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
            stack.enter_context(alone(place))
        except OSError as error:
            raise RequestError(
                f"pickled weights are rewritten into {place.parent}, which cannot be used: {error.strerror}; set UPSHIFT_CACHE "
                "to a folder that can be written"
            ) from None
        yield
