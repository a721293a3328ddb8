"""Save and load together, by ranks that have the model in parts (divided.py), and write the whole model in the end.

All ranks call each function at the same point of their runs. The thread that trains exchanges there what they agree on. A
thread of each rank writes the files, and exchanges nothing.
"""

from __future__ import annotations

import mmap
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from upshift.errors import JobFailed, RequestError
from upshift.loading.files.tensors import dtype_of
from upshift.planning.layout import Layout
from upshift.training.checkpoint.async_save import BackgroundWriter, has_room
from upshift.training.checkpoint.directory import (
    check_checkpoint,
    check_room,
    file_sizes,
    put_in_place,
    remove_leftovers,
    remove_older,
    write_latest,
    writing,
)
from upshift.training.checkpoint.model import PARTS_TEMPORARY, extra_bytes, save_model, write_tokenizer
from upshift.training.checkpoint.optimizer import class_name, decode, describe_optimizer, encode, restore_options
from upshift.training.checkpoint.rng import RngState, read_rng, restore_rng, seed_rng, write_rngs
from upshift.training.checkpoint.sharded import (
    Piece,
    StoredPieces,
    checksums_of_ranks,
    fill,
    load_shards,
    read_pieces,
    shards_to_write,
    stages_of,
    tied_names,
    updated_names,
)
from upshift.training.checkpoint.state import SavedGroup, SavedOptimizer, SavedState, TrainState
from upshift.training.distributed.mesh import Mesh, all_gather_objects, gather_errors, rank_0_first
from upshift.training.optimizers.sharded import ShardedOptimizer

Seal = Callable[[], None]
ALIGNMENT = 64


def has_shards(optimizer: torch.optim.Optimizer, place: Mesh) -> bool:
    """Return whether a rank has less than the whole model and optimizer state."""
    return isinstance(optimizer, ShardedOptimizer) or place.plan.layout.pipeline_parallel > 1


def save_shards(
    directory: Path,
    *,
    model: nn.Module,
    tokenizer: Any | None,
    optimizer: torch.optim.Optimizer,
    scheduler_state: dict[str, Any],
    scaler_state: dict[str, Any] | None,
    state: TrainState,
    rngs: Sequence[RngState],
    place: Mesh,
    writer: BackgroundWriter,
    keep: int = 2,
) -> tuple[Path, Seal]:
    """Save this rank's parts. Return when they are copied to host memory, if that has room.

    Rank 0 calls ``Seal`` when the writers of all ranks are done. Until then the checkpoint does not count. Raise JobFailed on
    all ranks if one cannot write.
    """
    final, temporary = directory / f"checkpoint-{state.step}", directory / f"checkpoint-{state.step}.tmp"
    own = shards_to_write(model, optimizer, place.plan, place.rank)
    saved_optimizer = describe_all_ranks(model, optimizer, place)
    make_shared_directory(
        temporary, sum(all_gather_objects(own.num_bytes, place.plan)) + extra_bytes(tokenizer), final.name, place
    )
    behind = all(all_gather_objects(has_room(own.num_bytes), place.plan))
    kept = own.copied() if behind else own

    def write() -> None:
        with writing(directory, name=final.name, temporary=None):
            kept.write(temporary)

    with gather_errors(place.plan):
        writer.start(write) if behind else write()

    def seal() -> None:
        with writing(directory, name=final.name, temporary=temporary):
            first_part: Any = stages_of(model)[0]  # a transformers model, or a stage of one
            first_part.config.save_pretrained(temporary)
            if tokenizer is not None:
                write_tokenizer(temporary, tokenizer)
            write_rngs(temporary, rngs)
            saved = SavedState(
                train=state, optimizer=saved_optimizer, scheduler=encode(scheduler_state), scaler=encode(scaler_state),
                files=file_sizes(temporary),
            )  # fmt: skip
            saved.write(temporary, known=checksums_of_ranks(temporary))
            put_in_place(temporary, final)
            remove_older(directory, newest=final, keep=keep)
            write_latest(directory, final.name)

    return final, seal


def describe_all_ranks(model: nn.Module, optimizer: torch.optim.Optimizer, place: Mesh) -> SavedOptimizer:
    """Return the optimizers of all ranks as one, without the tensors of their states."""
    return _merge(all_gather_objects(describe_optimizer(optimizer, updated_names(model, optimizer)), place.plan))


def make_shared_directory(temporary: Path, need: int, name: str, place: Mesh) -> None:
    """Make the directory that all ranks write to, on rank 0."""
    directory = temporary.parent
    with rank_0_first(place.plan), writing(directory, name=name, temporary=temporary):
        if place.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory)
            check_room(directory, name=name, need=need)
            temporary.mkdir()
    with gather_errors(place.plan):
        _check_directory_is_shared(temporary)


def load_sharded_checkpoint(
    directory: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: Any, place: Mesh
) -> TrainState:
    """Load this rank's parts from a checkpoint that any number of ranks with any layout wrote.

    Random numbers go on if the same layout goes on. Otherwise they are seeded by the run's seed, the step, and the rank. Raise
    RequestError if the checkpoint does not match this run.
    """
    saved = check_checkpoint(directory, contents=place.rank == 0)  # one rank reads the bytes for all
    if not isinstance(saved, SavedState):
        raise RequestError(f"{directory} is of a Trainer; resume it with trainer.train(resume_from_checkpoint=True)")
    if saved.optimizer.optimizer_class != class_name(optimizer):
        raise RequestError(
            f"{directory} was trained with {saved.optimizer.optimizer_class}, this run uses {class_name(optimizer)}; "
            "resume with the optim that the run was started with"
        )
    if saved.optimizer.subclasses:
        raise RequestError(f"{directory} has an optimizer of 8 or 4 bits, whose state does not come apart; resume in one process")
    names = updated_names(model, optimizer)
    restore_options(directory, saved.optimizer, optimizer, names, some=True)
    load_shards(directory, model, optimizer, lambda name: decode(saved.optimizer.numbers.get(name, {})))
    scheduler.load_state_dict(decode(saved.scheduler))
    if saved.scaler is not None:
        scaler.load_state_dict(decode(saved.scaler))
    plan = place.plan
    same = saved.train.plan["num_processes"] == plan.num_processes and Layout(**saved.train.plan["layout"]) == plan.layout
    rng = read_rng(directory, rank=place.rank) if same else None
    if rng is not None:
        restore_rng(rng, next(model.parameters()).device)
    else:
        seed_rng(saved.train.seed, saved.train.step, place.rank // plan.layout.tensor_parallel)
    return saved.train


def export(directory: Path, *, model: nn.Module, tokenizer: Any | None, skeleton: Callable[[], Any], place: Mesh) -> None:
    """Write the final Hugging Face directory.

    Each rank writes its parts. Rank 0 puts them together in a file that is mapped, so no rank holds the whole model.
    ``skeleton`` makes the model without weights. Raise JobFailed on all ranks if one cannot write.
    """

    def save(weights: dict[str, Tensor]) -> None:
        whole = skeleton()
        save_model(directory, whole, tokenizer, weights=drop_tied_names(weights, whole))

    export_weights(directory, model=model, tokenizer=tokenizer, save=save, mesh=place)


def drop_tied_names(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return each weight under one of its names."""
    twice = {tied for tied, name in tied_names(model).items() if name in weights}
    return {name: weight for name, weight in weights.items() if name not in twice}


def export_weights(
    directory: Path, *, model: nn.Module, tokenizer: Any | None, save: Callable[[dict[str, Tensor]], None], place: Mesh
) -> None:
    """Collect the whole weights in a file that is mapped, and call ``save`` with them on rank 0."""
    parts = directory / PARTS_TEMPORARY
    own = shards_to_write(model, None, place.plan, place.rank)
    size = sum(all_gather_objects(own.num_bytes, place.plan))  # needed three times: in parts, put together, and as the model
    with rank_0_first(place.plan):
        if place.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(parts, ignore_errors=True)
            with writing(directory, name="the final model", temporary=parts):
                check_room(directory, name="the final model", need=3 * size + extra_bytes(tokenizer))
                parts.mkdir()
    with gather_errors(place.plan), writing(directory, name="the final model", temporary=None):
        _check_directory_is_shared(parts)
        own.write(parts)
    with rank_0_first(place.plan):
        if place.rank == 0:
            try:
                with tempfile.TemporaryFile(dir=parts) as file:
                    save(_assemble(read_pieces(parts)["weights"], parts, file))
            finally:
                shutil.rmtree(parts, ignore_errors=True)


def _check_directory_is_shared(temporary: Path) -> None:
    """Check that this rank sees the directory that rank 0 made. Raise JobFailed if not."""
    if not temporary.is_dir():
        raise JobFailed(
            f"{temporary.parent} on {socket.gethostname()} is not the one that rank 0 writes to; ranks that share a model save "
            "into one directory: give --output on a file system that all hosts have"
        )


def _assemble(stored: StoredPieces, directory: Path, file: Any) -> dict[str, Tensor]:
    """Return each tensor whole, in the pages of ``file``."""
    found = {name: (pieces[0][0].shape, dtype_of(pieces[0][1])) for name, pieces in stored.items()}
    sizes = {name: -(-dtype.itemsize * prod(shape) // ALIGNMENT) * ALIGNMENT for name, (shape, dtype) in found.items()}
    file.truncate(max(sum(sizes.values()), ALIGNMENT))
    mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    weights = {}
    for (name, (shape, dtype)), pages in zip(found.items(), mapped.split(list(sizes.values()) or [ALIGNMENT]), strict=True):
        weights[name] = pages[: dtype.itemsize * prod(shape)].view(dtype).view(shape)
        fill(weights[name], Piece(shape=shape), name, stored, directory)
    return weights


def _merge(said: Sequence[SavedOptimizer]) -> SavedOptimizer:
    """Merge the descriptions of all ranks. A stage of a pipeline has its own parameters alone, in groups of the same options."""
    groups: dict[str, SavedGroup] = {}
    for group in (group for one in said for group in one.groups):
        before = groups.get(repr(group.options))
        known = before.parameters if before is not None else ()
        groups[repr(group.options)] = group.changed(parameters=tuple(dict.fromkeys((*known, *group.parameters))))
    numbers = {name: values for one in said for name, values in one.numbers.items()}
    return said[0].changed(groups=tuple(groups.values()), numbers=numbers)
