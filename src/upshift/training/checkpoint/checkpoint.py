"""Save and load checkpoints: a run that stops at any moment, killed or out of disk, continues from the newest whole one bit
for bit.

`checkpoint-<step>` is a Hugging Face directory (weights, or an adapter's; config, tokenizer) and also holds
optimizer.safetensors, rng.safetensors and upshift_state.json. Nothing is pickled. One process saves; every process loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from upshift.errors import RequestError
from upshift.training.checkpoint.background import BackgroundWriter
from upshift.training.checkpoint.files import (
    FoundCheckpoints,
    check_checkpoint,
    check_room,
    file_sizes,
    find_checkpoints,
    newest_checkpoint,
    put_in_place,
    remove_leftovers,
    remove_older,
    write_latest,
    writing,
)
from upshift.training.checkpoint.model import extra_bytes, model_bytes, read_weights, save_model, write_model
from upshift.training.checkpoint.optimizer import optimizer_bytes, read_optimizer, write_optimizer
from upshift.training.checkpoint.output import check_output_directory
from upshift.training.checkpoint.plain_json import decode, encode
from upshift.training.checkpoint.rng import RngState, capture_rng, read_rng, restore_rng, seed_rng, write_rngs
from upshift.training.checkpoint.snapshot import ParameterNames, copy_optimizer, copy_weights, has_room
from upshift.training.checkpoint.state import SavedState, TrainState

__all__ = [
    "FoundCheckpoints",
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
    writer: BackgroundWriter | None = None,
) -> Path:
    """Write `directory/checkpoint-<step>` and then remove the oldest, so that `keep` (at least 2) remain.

    `rngs` are those of all ranks in order, if there are several; otherwise this process's own are taken. With a `writer` the
    function returns when weights and optimizer state are copied to host memory, if that has room. The writer raises what fails
    later. Raise JobFailed, naming the checkpoint that is still loadable, when the disk is too full or a write fails.
    """
    if writer is not None:
        writer.wait()
    final, temporary = directory / f"checkpoint-{state.step}", directory / f"checkpoint-{state.step}.tmp"
    name, rngs = final.name, rngs or [capture_rng(next(model.parameters()).device)]
    with writing(directory, name=name, temporary=temporary):
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        check_room(directory, name=name, need=(need := model_bytes(model) + optimizer_bytes(optimizer)) + extra_bytes(tokenizer))
        temporary.mkdir()
        behind = writer is not None and has_room(need)
        weights = copy_weights(model) if behind else None
        kept, names = (copy_optimizer(optimizer), ParameterNames(model)) if behind else (optimizer, model)
        scheduler, scaler = encode(scheduler_state), encode(scaler_state)

    def write() -> None:
        with writing(directory, name=name, temporary=temporary):
            write_model(temporary, model, tokenizer, original_names=False, weights=weights)
            saved_optimizer = write_optimizer(temporary, kept, names)
            write_rngs(temporary, rngs)
            saved = SavedState(
                train=state, optimizer=saved_optimizer, scheduler=scheduler, scaler=scaler, files=file_sizes(temporary)
            )
            saved.write(temporary)
            put_in_place(temporary, final)
            remove_older(directory, newest=final, keep=keep)
            write_latest(directory, name)

    writer.start(write) if behind and writer is not None else write()
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
    """Restore everything in place from one checkpoint directory, random number generators last.

    A rank that did not exist when the checkpoint was saved gets a seed made of the run's seed, the step and the rank. Raise
    RequestError when the checkpoint is not whole or is of another model or optimizer.
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
