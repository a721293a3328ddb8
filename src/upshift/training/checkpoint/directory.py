"""Handle checkpoint directories on disk: find complete ones, put a new one in place, and report a full disk. Needs no torch.

A checkpoint is written as `checkpoint-<step>.tmp`, synced and renamed, so that every `checkpoint-<step>` is complete at every
moment. `checkpoint-<step>.replaced` exists only while another checkpoint of the same step takes its place.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from upshift.atomic_file import sync_path
from upshift.debugging.run_report import FOLDER as REPORT_FOLDER
from upshift.errors import JobFailed, RequestError
from upshift.loading.files.checkpoint import find_safetensors
from upshift.loading.files.safetensors_header import read_header
from upshift.loading.output_lock import LOCK_NAME
from upshift.models.source import ADAPTER_WEIGHTS
from upshift.training.checkpoint.state import STATE_NAME, Manifest, SavedState, checksum_of, read_manifest
from upshift.units import format_bytes

logger = logging.getLogger(__name__)

CHECKPOINT = re.compile(r"checkpoint-(\d+)(\.replaced)?")
TEMPORARY_CHECKPOINT = re.compile(r"checkpoint-\d+(\.replaced)?(\.removed)?\.tmp")
LATEST_NAME = "latest"
RUN_NAME = "upshift_run.json"
TASK_RUN_NAME = "trainer_run.json"  # of a run that transformers' Trainer runs
TASK_CHECKPOINTS = "trainer-checkpoints"
AUTOPSIES_NAME = "upshift_out_of_memory.jsonl"
SHARED_NAME = "upshift_shared"  # the folder with data for the ranks of a launcher, removed when the run is finished
TENSORBOARD_FOLDER = "upshift_tensorboard"
RUN_FILES = (RUN_NAME, f"{RUN_NAME}.tmp", TASK_RUN_NAME, f"{TASK_RUN_NAME}.tmp", AUTOPSIES_NAME, REPORT_FOLDER, SHARED_NAME)
# What a run has written by then. All but the curves of TensorBoard is of no use without a checkpoint.
BEFORE_FIRST_CHECKPOINT = frozenset({LOCK_NAME, *RUN_FILES, TENSORBOARD_FOLDER})
REFERENCE_NAME = "upshift_reference.npz"  # of a run that learns from preferences (training/preferences/reference_model.py)
MODEL_FILE_SUFFIXES = (
    ".safetensors",
    ".json",
    ".bin",
    ".pt",
    ".pth",
    ".model",
    ".txt",
    ".jinja",
    ".py",
)  # files that loading a model may read
MIN_KEPT = 2  # with one, a damaged newest checkpoint would leave nothing to resume from


def not_empty(path: Path, entry: Path) -> RequestError:
    """Return the error for an output directory that holds `entry`, if the run neither resumes nor overwrites."""
    return RequestError(
        f"output directory {path} is not empty ({entry.name}); use --resume to continue its run, "
        "--overwrite to delete what Upshift wrote there, or an empty directory"
    )


def finished_run(path: Path) -> RequestError:
    """Return the error for a run that resumes, and that is finished and kept no checkpoint."""
    return RequestError(
        f"the run in {path} is finished and has no checkpoint to resume from; "
        "use --overwrite to train again, or another output directory"
    )


def check_empty(path: Path) -> None:
    """Raise RequestError if the directory exists and holds more than a run that failed leaves before its first checkpoint.

    Make nothing, and leave other faults to the run."""
    try:
        entries = sorted(path.iterdir())
    except OSError:
        return
    kept = next((entry for entry in entries if not is_worthless(entry)), None)
    if kept is not None:
        raise not_empty(path, kept)


def is_worthless(entry: Path) -> bool:
    """Return whether a run wrote this before its first checkpoint, so that nothing is lost with it."""
    if entry.is_symlink():
        return False
    if entry.name == TASK_CHECKPOINTS and entry.is_dir():
        return all(_is_before_checkpoint(inside) for inside in entry.iterdir())
    return _is_before_checkpoint(entry)


def _is_before_checkpoint(entry: Path) -> bool:
    return entry.name in BEFORE_FIRST_CHECKPOINT or TEMPORARY_CHECKPOINT.fullmatch(entry.name) is not None


@dataclass(frozen=True, kw_only=True)
class CheckpointSearch:
    """The result of a search for the newest complete checkpoint."""

    newest: Path | None  # the newest complete one
    damaged: tuple[tuple[Path, str], ...]  # newer ones that are damaged, each with the reason


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint in `directory`, or None. Log a warning for each newer one that is damaged.

    Raise RequestError if there are checkpoints and all of them are damaged.
    """
    search = find_checkpoints(directory)
    check_any_whole(search, directory)
    for path, reason in search.damaged:
        logger.warning("skipped a damaged checkpoint, %s: %s", path.name, reason)
    if search.newest is not None and search.damaged:
        logger.warning("the run goes on from %s, the newest whole one", search.newest.name)
    return search.newest


def check_any_whole(search: CheckpointSearch, directory: Path) -> None:
    """Raise RequestError if there are checkpoints and all of them are damaged.

    Otherwise the run would start again at step 0 without any notice.
    """
    if search.newest is None and search.damaged:
        reasons = "; ".join(reason.partition("; ")[0] for _, reason in search.damaged)
        raise RequestError(
            f"no checkpoint in {directory} is whole ({reasons}); copy a whole one back to resume, or start again at step 0 with "
            "--overwrite or another output directory"
        )


def find_checkpoints(directory: Path, *, contents: bool = True) -> CheckpointSearch:
    """Return the newest complete checkpoint, and the damaged newer ones.

    ``contents`` compares every byte with the saved one, by checksums. Otherwise only names, sizes and headers are compared.
    """
    damaged: list[tuple[Path, str]] = []
    for path in _checkpoints_newest_first(directory):
        reason = describe_damage(path, contents=contents)
        if reason is None:
            return CheckpointSearch(newest=path, damaged=tuple(damaged))
        damaged.append((path, reason))
    return CheckpointSearch(newest=None, damaged=tuple(damaged))


def check_checkpoint(directory: Path, *, contents: bool = True) -> Manifest:
    """Return the manifest of a checkpoint. Raise RequestError if a file is not as it was written.

    ``contents`` compares every byte, by checksums. Otherwise only names, sizes and headers are compared.
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
        _check_folder(directory, saved)
    has_pieces = any(name.startswith("pieces-") for name in saved.files)
    adapters_only = ADAPTER_WEIGHTS in saved.files  # a Trainer may save only its adapters
    if isinstance(saved, SavedState) and not (adapters_only or has_pieces):
        find_safetensors(directory)
    return saved


def _check_bytes(file: Path, expected: str | None) -> None:
    try:
        checksum = checksum_of(file)
    except OSError as error:
        raise RequestError(f"{file} cannot be read ({error.strerror}); resume from another checkpoint") from None
    if checksum != expected:
        raise RequestError(f"{file} has other bytes than were saved; resume from another checkpoint")


def _check_folder(directory: Path, saved: SavedState) -> None:
    """Raise RequestError if the folder has the name of another step, or an added file that loading could read."""
    if step_of(directory) not in (None, saved.train.step):
        raise RequestError(f"{directory} holds the state of step {saved.train.step}; resume from another checkpoint")
    unsaved = (name for name in file_sizes(directory) if name not in saved.files and not name.startswith("."))
    added = sorted(name for name in unsaved if name.endswith(MODEL_FILE_SUFFIXES))
    if added:
        raise RequestError(f"{directory / added[0]} was not saved with the checkpoint; move it away, or resume from another one")


def step_of(path: Path) -> int | None:
    match = CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None


def _checkpoints_newest_first(directory: Path) -> list[Path]:
    """Return the checkpoint directories, newest first. A replaced one comes after the one that replaced it."""
    if not directory.is_dir():
        return []
    checkpoints = [path for path in directory.iterdir() if CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return sorted(checkpoints, key=lambda path: (-(step_of(path) or 0), path.name))


def describe_damage(path: Path, *, contents: bool = False) -> str | None:
    """Return what is wrong with a checkpoint, or None."""
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
    """Remove `temporary` on any error while open. Raise JobFailed for a failed write.

    `temporary` is None if other ranks write there too.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        reason = str(error)
        if isinstance(error, OSError):
            reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or reason
        raise JobFailed(f"{name} could not be written to {directory}: {reason}; {still_loadable(directory)}") from error
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def file_sizes(directory: Path) -> dict[str, int]:
    """Return the size in bytes of every file but the manifest, by its path in the directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != STATE_NAME)
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def sync_tree(directory: Path) -> None:
    """Sync all files, and then their directories, so that a rename does not reach the disk before the contents."""
    # safetensors makes its files readable only by the owner, whatever the umask is.
    weights = list(directory.rglob("*.safetensors"))
    other_files = [path for path in directory.iterdir() if path.is_file() and path not in weights]
    mode = stat.S_IMODE(other_files[0].stat().st_mode)
    for path in weights:
        path.chmod(mode)
    for path in [*directory.rglob("*"), directory]:
        sync_path(path)


def remove_leftovers(directory: Path) -> None:
    """Remove checkpoints that a killed process left half-written or half-deleted."""
    for path in directory.iterdir():
        if TEMPORARY_CHECKPOINT.fullmatch(path.name):
            shutil.rmtree(path)


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename `temporary` to `final`. At every moment either the old or the new directory is there and complete."""
    sync_tree(temporary)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        if describe_damage(final) is None:
            remove_checkpoint(replaced)
            final.rename(replaced)
        else:
            remove_checkpoint(final)
    temporary.rename(final)
    sync_path(final.parent)
    remove_checkpoint(replaced)


def add_checkpoint(temporary: Path, final: Path, *, keep: int, best_step: int | None = None) -> None:
    """Rename a whole checkpoint to its final name, remove older ones as ``remove_older`` does, and note that it is the latest."""
    put_in_place(temporary, final)
    remove_older(final.parent, newest=final, keep=keep, best_step=best_step)
    write_latest(final.parent, final.name)


def remove_older(directory: Path, *, newest: Path, keep: int, best_step: int | None = None) -> None:
    """Keep `newest` and the newest complete checkpoints before it, `keep` in all. Leave later steps alone.

    The checkpoint of `best_step` remains, however old it is.
    """
    step = step_of(newest)
    older = [path for path in _checkpoints_newest_first(directory) if path != newest and (step_of(path) or 0) <= (step or 0)]
    num_kept = 1
    for path in older:
        if num_kept < max(keep, MIN_KEPT) and describe_damage(path) is None:
            num_kept += 1
        elif step_of(path) != best_step:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Rename a checkpoint and then delete it, so that a half-deleted directory never counts as a checkpoint."""
    if path.exists():
        removed = path.with_name(f"{path.name}.removed.tmp")
        path.rename(removed)
        shutil.rmtree(removed)


def write_latest(directory: Path, name: str) -> None:
    replace_text(directory / LATEST_NAME, f"{name}\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text. At every moment the file holds either the old or the new text."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content as ``replace_text`` does. A process that is killed meanwhile leaves the file NAME.tmp."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    sync_path(temporary)
    temporary.replace(path)
    sync_path(path.parent)
