"""Check whether a run may write to an output directory. Only files that Upshift wrote are ever deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from upshift.errors import RequestError
from upshift.loading.output_lock import LOCK_NAME
from upshift.training.checkpoint.files import CHECKPOINT, LATEST_NAME, TEMPORARY_CHECKPOINT, check_some_whole, find_checkpoints
from upshift.training.checkpoint.model import MODEL_LIST_NAME, MODEL_TEMPORARY, PARTS_TEMPORARY, model_files
from upshift.training.checkpoint.state import STATE_NAME


def check_output_directory(path: Path, *, overwrite: bool, resume: bool, own_files: Collection[str] = ()) -> None:
    """Make `path` ready for a run. Raise RequestError if that would touch a file that Upshift did not write.

    `own_files` are names that the caller itself writes there, such as a record. Overwriting deletes them too.
    """
    if overwrite and resume:
        raise RequestError("--overwrite and --resume exclude each other; use one of them")
    if path.exists() and not path.is_dir():
        raise RequestError(f"output directory {path} is a file; give a directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
        inside = sorted(entry for entry in path.iterdir() if entry.name != LOCK_NAME)
    except OSError as error:
        raise RequestError(f"output directory {path} cannot be used: {error.strerror}; give another one") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise RequestError(f"output directory {path} is not writable; give another one")
    if not inside:
        return
    if not (overwrite or resume):
        raise RequestError(
            f"output directory {path} is not empty ({inside[0].name}); use --resume to continue its run, "
            "--overwrite to delete what Upshift wrote there, or an empty directory"
        )
    own = _written_by_upshift(path, own_files)
    foreign = [entry for entry in inside if entry not in own]
    if resume:
        newest = find_checkpoints(path)
        check_some_whole(newest, path)
        if foreign and newest.newest is None:
            raise RequestError(
                f"output directory {path} has no checkpoint to resume from and holds {foreign[0].name}; "
                "give the directory of an earlier run, or an empty one"
            )
        return
    if foreign:
        raise RequestError(
            f"output directory {path} holds {foreign[0].name}, which Upshift did not write; "
            "move it away or give another directory"
        )
    _delete(path, own)


def _written_by_upshift(directory: Path, own_files: Collection[str]) -> list[Path]:
    temporary = (MODEL_TEMPORARY, PARTS_TEMPORARY, f"{LATEST_NAME}.tmp", f"{MODEL_LIST_NAME}.tmp")
    names = {MODEL_LIST_NAME, LOCK_NAME, *temporary, *own_files}
    model = model_files(directory)
    return [path for path in directory.iterdir() if path.name in names or _is_ours(path, directory, model)]


def _is_ours(path: Path, directory: Path, model: list[str]) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir():
        if CHECKPOINT.fullmatch(path.name):
            return (path / STATE_NAME).is_file()
        if TEMPORARY_CHECKPOINT.fullmatch(path.name):
            return True
        listed = {directory / name for name in model}
        files = [file for file in path.rglob("*") if not file.is_dir()]
        return bool(files) and listed.issuperset(files)
    if path.name == LATEST_NAME:
        return CHECKPOINT.fullmatch(path.read_text(encoding="utf-8", errors="replace").strip()) is not None
    return path.name in model


def _delete(directory: Path, own: list[Path]) -> None:
    # The list of the model's files goes last: without it a rerun could not tell the rest of them from a user's.
    for entry in sorted(own, key=lambda entry: entry.name == MODEL_LIST_NAME):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
