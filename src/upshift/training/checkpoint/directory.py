"""Handle checkpoint directories on disk: find whole ones, put a new one in place, and report a full disk.

A checkpoint is written as `checkpoint-<step>.tmp`, synced and renamed, so that at every moment each `checkpoint-<step>` is
whole. `checkpoint-<step>.replaced` exists only while a checkpoint of the same step takes its place. Needs no torch.

Compute the SHA-256 of a checkpoint's files, so that bytes which changed at the same length are noticed. Needs no torch.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from upshift.errors import JobFailed, RequestError
from upshift.loading.files.checkpoint import find_safetensors
from upshift.loading.files.safetensors_header import read_header
from upshift.models.source import ADAPTER_WEIGHTS
from upshift.training.checkpoint.state import STATE_NAME, Manifest, SavedState, checksum_of, read_manifest
from upshift.units import format_bytes

logger = logging.getLogger(__name__)

CHECKPOINT = re.compile(r"checkpoint-(\d+)(\.replaced)?")
TEMPORARY_CHECKPOINT = re.compile(r"checkpoint-\d+(\.replaced)?(\.removed)?\.tmp")
LATEST_NAME = "latest"
READ_SUFFIXES = (".safetensors", ".json", ".bin", ".pt", ".pth", ".model", ".txt", ".jinja", ".py")  # files that a model may read
MIN_KEPT = 2  # with one, a damaged newest checkpoint would leave nothing to resume from


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoints:
    newest: Path | None  # the newest whole one
    damaged: tuple[tuple[Path, str], ...]  # those that are newer but not whole, with the reason


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the newest whole checkpoint in `directory`, or None. Log a warning for each newer one that is damaged.

    Raise RequestError if there are checkpoints and all of them are damaged.
    """
    found = find_checkpoints(directory)
    check_some_whole(found, directory)
    for path, reason in found.damaged:
        logger.warning("skipped a damaged checkpoint, %s: %s", path.name, reason)
    if found.newest is not None and found.damaged:
        logger.warning("the run goes on from %s, the newest whole one", found.newest.name)
    return found.newest


def check_some_whole(found: FoundCheckpoints, directory: Path) -> None:
    """Raise RequestError if there are checkpoints and all of them are damaged: a run would begin again without a word."""
    if found.newest is None and found.damaged:
        reasons = "; ".join(reason.partition("; ")[0] for _, reason in found.damaged)
        raise RequestError(
            f"no checkpoint in {directory} is whole ({reasons}); copy a whole one back to resume, or start again at step 0 with "
            "--overwrite or another output directory"
        )


def find_checkpoints(directory: Path, *, contents: bool = True) -> FoundCheckpoints:
    """Return the newest whole checkpoint, and the damaged newer ones.

    ``contents`` compares every byte with what was saved, by checksums. Otherwise names, sizes and headers alone are compared.
    """
    damaged: list[tuple[Path, str]] = []
    for path in _candidates(directory):
        reason = _damage(path, contents=contents)
        if reason is None:
            return FoundCheckpoints(newest=path, damaged=tuple(damaged))
        damaged.append((path, reason))
    return FoundCheckpoints(newest=None, damaged=tuple(damaged))


def check_checkpoint(directory: Path, *, contents: bool = True) -> Manifest:
    """Return the manifest of a checkpoint after checking that every file is as it was written. Raise RequestError if not.

    ``contents`` compares every byte, by checksums. Otherwise names, sizes and headers alone are compared.
    """
    saved = read_manifest(directory)
    for name, expected in saved.files.items():
        file = directory / name
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            problem = "is missing" if size is None else f"has {size} bytes, not {expected}"
            raise RequestError(f"{file} {problem}; resume from another checkpoint")
        if file.suffix == ".safetensors":
            read_header(file)
        if contents:
            _check_bytes(file, saved.checksums.get(name))
    if isinstance(saved, SavedState):
        _check_own(directory, saved)
    in_parts = any(name.startswith("pieces-") for name in saved.files)
    adapters_only = ADAPTER_WEIGHTS in saved.files  # a Trainer may have saved them so
    if isinstance(saved, SavedState) and not (adapters_only or in_parts):
        find_safetensors(directory)
    return saved


def _check_bytes(file: Path, expected: str | None) -> None:
    try:
        found = checksum_of(file)
    except OSError as error:
        raise RequestError(f"{file} cannot be read ({error.strerror}); resume from another checkpoint") from None
    if found != expected:
        raise RequestError(f"{file} has other bytes than were saved; resume from another checkpoint")


def _check_own(directory: Path, saved: SavedState) -> None:
    """Raise RequestError if the folder is not named by its step, or has a file that could be read in place of what was saved."""
    if step_of(directory) not in (None, saved.train.step):
        raise RequestError(f"{directory} holds the state of step {saved.train.step}; resume from another checkpoint")
    others = (name for name in file_sizes(directory) if name not in saved.files and not name.startswith("."))
    added = sorted(name for name in others if name.endswith(READ_SUFFIXES))
    if added:
        raise RequestError(f"{directory / added[0]} was not saved with the checkpoint; move it away, or resume from another one")


def step_of(path: Path) -> int | None:
    match = CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None


def _candidates(directory: Path) -> list[Path]:
    """Return checkpoint directories, newest first. A replaced one comes after the one that replaced it."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (-(step_of(path) or 0), path.name))


def _damage(path: Path, *, contents: bool = False) -> str | None:
    try:
        check_checkpoint(path, contents=contents)
    except RequestError as error:
        return str(error)
    return None


def check_room(directory: Path, *, name: str, need: int) -> None:
    """Raise JobFailed when the disk has less than `need` bytes free."""
    free = shutil.disk_usage(directory).free
    if free < need:
        raise JobFailed(
            f"{name} needs {format_bytes(need)} and {directory} has {format_bytes(free)} free; {still_loadable(directory)}"
        )


def still_loadable(directory: Path) -> str:
    newest = find_checkpoints(directory, contents=False).newest
    return "there is no earlier checkpoint" if newest is None else f"{newest.name} is still loadable"


@contextmanager
def writing(directory: Path, *, name: str, temporary: Path | None) -> Iterator[None]:
    """Remove `temporary` on any error while open, and raise JobFailed for a failed write.

    `temporary` is None if others write there, too.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            reason = "the disk is full"
        raise JobFailed(f"{name} could not be written to {directory}: {reason}; {still_loadable(directory)}") from error
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def file_sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != STATE_NAME)
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def sync_tree(directory: Path) -> None:
    """Sync files, then the directories that name them: a rename must not reach the disk before the contents."""
    # safetensors lets only the owner read its files, whatever the umask says.
    weights = list(directory.rglob("*.safetensors"))
    others = [path for path in directory.iterdir() if path.is_file() and path not in weights]
    mode = stat.S_IMODE(others[0].stat().st_mode)
    for path in weights:
        path.chmod(mode)
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(directory: Path) -> None:
    """Remove checkpoints that a killed process left half-written or half-deleted."""
    for path in directory.iterdir():
        if TEMPORARY_CHECKPOINT.fullmatch(path.name):
            shutil.rmtree(path)


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename, so that at every moment either the old or the new directory is there whole."""
    sync_tree(temporary)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        if _damage(final) is None:
            remove_checkpoint(replaced)
            final.rename(replaced)
        else:
            remove_checkpoint(final)
    temporary.rename(final)
    _sync(final.parent)
    remove_checkpoint(replaced)


def remove_older(directory: Path, *, newest: Path, keep: int) -> None:
    """Keep `newest` and the newest whole ones before it, `keep` in all. Later steps are not touched."""
    step = step_of(newest)
    older = [path for path in _candidates(directory) if path != newest and (step_of(path) or 0) <= (step or 0)]
    kept = 1
    for path in older:
        if kept < max(keep, MIN_KEPT) and _damage(path) is None:
            kept += 1
        else:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint under a name that never counts as one: a half-deleted directory is no candidate."""
    if path.exists():
        doomed = path.with_name(f"{path.name}.removed.tmp")
        path.rename(doomed)
        shutil.rmtree(doomed)


def write_latest(directory: Path, name: str) -> None:
    replace_text(directory / LATEST_NAME, f"{name}\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text. The file holds the old text or the new one at every moment."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)
