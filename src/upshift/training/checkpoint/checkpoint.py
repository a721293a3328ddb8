"""Save and load checkpoints, and check whether a run may write to an output directory.

A run that stops at any moment, killed or out of disk, continues bit for bit from the newest complete checkpoint.
`checkpoint-<step>` is a Hugging Face directory with the weights (or those of an adapter), config and tokenizer. It also holds
optimizer.safetensors, rng.safetensors and upshift_state.json. Nothing is pickled. One process saves, and every process loads.

Upshift deletes only files that it wrote.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from upshift.errors import RequestError
from upshift.loading.output_lock import LOCK_NAME
from upshift.training.checkpoint.async_save import BackgroundWriter, copy_optimizer, copy_weights, has_room, with_copied_config
from upshift.training.checkpoint.directory import (
    CHECKPOINT,
    LATEST_NAME,
    TEMPORARY_CHECKPOINT,
    TENSORBOARD_FOLDER,
    add_checkpoint,
    check_any_whole,
    check_checkpoint,
    check_empty,
    check_room,
    file_sizes,
    find_checkpoints,
    is_worthless,
    newest_checkpoint,
    remove_leftovers,
    write_latest,
    writing,
)
from upshift.training.checkpoint.model import (
    MODEL_LIST_NAME,
    MODEL_TEMPORARY,
    PARTS_TEMPORARY,
    extra_bytes,
    model_bytes,
    model_files,
    read_weights,
    save_model,
    write_model,
)
from upshift.training.checkpoint.optimizer import (
    decode,
    encode,
    optimizer_bytes,
    optimizer_content,
    read_optimizer,
    write_optimizer,
)
from upshift.training.checkpoint.rng import RngState, capture_rng, read_rng, restore_rng, seed_rng, write_rngs
from upshift.training.checkpoint.state import STATE_NAME, SavedState, TrainState


def check_output_directory(
    path: Path, *, overwrite: bool, resume: bool, own_files: Collection[str] = (), checkpoints: Path | None = None
) -> None:
    """Make `path` ready for a run. Raise RequestError if that would touch a file that Upshift did not write.

    `own_files` are names of other files that the caller writes there, such as a record. Overwriting deletes them too.
    `checkpoints` is the folder of the checkpoints. None: `path`.
    """
    if overwrite and resume:
        raise RequestError("--overwrite and --resume exclude each other; use one of them")
    if path.exists() and not path.is_dir():
        raise RequestError(f"output directory {path} is a file; give a directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
        entries = sorted(entry for entry in path.iterdir() if entry.name != LOCK_NAME)
    except OSError as error:
        raise RequestError(f"output directory {path} cannot be used: {error.strerror}; give another one") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise RequestError(f"output directory {path} is not writable; give another one")
    if not entries:
        return
    if not (overwrite or resume):
        check_empty(path)
    written = _written_by_upshift(path, own_files)
    foreign = [entry for entry in entries if entry not in written]
    if resume:
        _prepare_resume(path, checkpoints or path, foreign)
        return
    if foreign:
        raise RequestError(
            f"output directory {path} holds {foreign[0].name}, which Upshift did not write; "
            "move it away or give another directory"
        )
    _delete_entries(path, [entry for entry in written if overwrite or entry.name != TENSORBOARD_FOLDER])


def _prepare_resume(path: Path, checkpoints: Path, foreign: list[Path]) -> None:
    """Remove what a killed run left half-written. Raise RequestError if no checkpoint is whole, or if the folder is no run's."""
    search = find_checkpoints(checkpoints)
    check_any_whole(search, checkpoints)
    if foreign and search.newest is None:
        raise RequestError(
            f"output directory {path} has no checkpoint to resume from and holds {foreign[0].name}; "
            "give the directory of an earlier run, or an empty one"
        )
    if checkpoints.is_dir():
        remove_leftovers(checkpoints)
    if search.newest is not None and checkpoints == path:
        write_latest(path, search.newest.name)  # a killed run may have written the checkpoint, and not yet this name


def _written_by_upshift(directory: Path, own_files: Collection[str]) -> list[Path]:
    temporary = (MODEL_TEMPORARY, PARTS_TEMPORARY, f"{LATEST_NAME}.tmp", f"{MODEL_LIST_NAME}.tmp")
    names = {MODEL_LIST_NAME, LOCK_NAME, *temporary, *own_files}
    model = model_files(directory)
    entries = [*directory.iterdir()]
    return [path for path in entries if path.name in names or is_worthless(path) or _is_from_upshift(path, directory, model)]


def _is_from_upshift(path: Path, directory: Path, model: list[str]) -> bool:
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


def _delete_entries(directory: Path, entries: list[Path]) -> None:
    # The list of the model's files goes last. Without it a rerun could not tell files of the model from files of the user.
    for entry in sorted(entries, key=lambda entry: entry.name == MODEL_LIST_NAME):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


__all__ = [
    "RngState",
    "SavedState",
    "TrainState",
    "capture_rng",
    "check_checkpoint",
    "check_output_directory",
    "find_checkpoints",
    "load_checkpoint",
    "newest_checkpoint",
    "save_checkpoint",
    "save_model",
]


class Restorable(Protocol):
    """A learning-rate schedule or a gradient scaler."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def save_checkpoint(
    directory: Path,
    *,
    model: nn.Module,
    tokenizer: Any | None,
    optimizer: torch.optim.Optimizer,
    scheduler_state: dict[str, Any],
    scaler_state: dict[str, Any] | None,
    state: TrainState,
    rngs: Sequence[RngState] | None = None,
    keep: int = 2,
    best_step: int | None = None,
    writer: BackgroundWriter | None = None,
) -> Path:
    """Write `directory/checkpoint-<step>`, and remove older ones until `keep` (at least 2) remain, and that of `best_step`.

    `rngs` are the states of all ranks in order. None: only the state of this process. With a `writer`, return when weights and
    optimizer state are copied to host memory, if there is room for the copies. The writer then raises later errors. Raise
    JobFailed if the disk is too full or a write fails. The message names the checkpoint that can still be loaded.
    """
    if writer is not None:
        writer.wait()
    final = directory / f"checkpoint-{state.step}"
    temporary = directory / f"checkpoint-{state.step}.tmp"
    name = final.name
    rngs = rngs or [capture_rng(next(model.parameters()).device)]
    weights: dict[str, Tensor] | None = None
    written = model
    content = optimizer_content(optimizer, model)
    with writing(directory, name=name, temporary=temporary):
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        num_bytes = model_bytes(model) + optimizer_bytes(optimizer)
        check_room(directory, name=name, need=num_bytes + extra_bytes(tokenizer))
        temporary.mkdir()
        in_background = writer is not None and has_room(num_bytes)
        if in_background:
            weights = copy_weights(model)
            written = with_copied_config(model)
            content = copy_optimizer(content)
        scheduler = encode(scheduler_state)
        scaler = encode(scaler_state)

    def write() -> None:
        with writing(directory, name=name, temporary=temporary):
            write_model(temporary, written, tokenizer, original_names=False, weights=weights)
            saved_optimizer = write_optimizer(temporary, content)
            write_rngs(temporary, rngs)
            saved = SavedState(
                train=state, optimizer=saved_optimizer, scheduler=scheduler, scaler=scaler, files=file_sizes(temporary)
            )
            saved.write(temporary)
            add_checkpoint(temporary, final, keep=keep, best_step=best_step)

    if in_background and writer is not None:
        writer.start(write)
    else:
        write()
    return final


def load_checkpoint(
    directory: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Restorable | None = None,
    scaler: Restorable | None = None,
    rank: int = 0,
) -> TrainState:
    """Restore everything in place from one checkpoint directory, the random number generators last.

    A rank that did not exist when the checkpoint was saved is seeded by the run's seed, the step and the rank. Raise
    RequestError if the checkpoint is not complete, or belongs to another model or optimizer.
    """
    saved = check_checkpoint(directory, contents=rank == 0)  # one rank reads the bytes for all
    if not isinstance(saved, SavedState):
        raise RequestError(f"{directory} is of a Trainer; resume it with trainer.train(resume_from_checkpoint=True)")
    read_weights(directory, model)
    read_optimizer(directory, saved.optimizer, optimizer, model)
    if scheduler is not None:
        scheduler.load_state_dict(decode(saved.scheduler))
    if scaler is not None and saved.scaler is not None:
        scaler.load_state_dict(decode(saved.scaler))
    rng = read_rng(directory, rank=rank)
    if rng is not None:
        restore_rng(rng, next(model.parameters()).device)
    else:
        seed_rng(saved.train.seed, saved.train.step, rank)
    return saved.train
