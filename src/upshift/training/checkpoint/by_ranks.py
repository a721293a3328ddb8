"""Save and load sharded checkpoints together, and write the full model at the end.

All ranks call each function at the same point of their runs. The training thread exchanges everything on which the ranks
agree. One thread of each rank writes the files, and exchanges nothing.
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
from torch.optim.lr_scheduler import LambdaLR

from upshift.errors import JobFailed, RequestError
from upshift.loading.files.tensors import dtype_of
from upshift.planning.layout import Layout
from upshift.training.checkpoint.async_save import BackgroundWriter, has_room
from upshift.training.checkpoint.directory import (
    add_checkpoint,
    check_checkpoint,
    check_room,
    file_sizes,
    remove_leftovers,
    writing,
)
from upshift.training.checkpoint.model import PARTS_TEMPORARY, extra_bytes, save_model, write_tokenizer
from upshift.training.checkpoint.optimizer import (
    cannot_divide,
    check_same_optimizer,
    decode,
    describe_optimizer,
    encode,
    restore_options,
)
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


def has_shards(optimizer: torch.optim.Optimizer, mesh: Mesh) -> bool:
    """Return whether a rank has only shards of the model or of the optimizer state."""
    return isinstance(optimizer, ShardedOptimizer) or mesh.plan.layout.pipeline_parallel > 1


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
    mesh: Mesh,
    writer: BackgroundWriter,
    keep: int = 2,
    best_step: int | None = None,
) -> tuple[Path, Seal]:
    """Save this rank's shards. Return after copying them to host memory if there is room, and else after writing them.

    Return the path of the checkpoint and a function that completes it. Rank 0 calls that function when the writers of all ranks
    are done. Until then the checkpoint does not count. Raise JobFailed on all ranks if one of them cannot write.
    """
    final = directory / f"checkpoint-{state.step}"
    temporary = directory / f"checkpoint-{state.step}.tmp"
    shards = shards_to_write(model, optimizer, mesh.plan, mesh.rank)
    saved_optimizer = describe_all_ranks(model, optimizer, mesh)
    num_bytes = sum(all_gather_objects(shards.num_bytes, mesh.plan))
    make_shared_directory(temporary, num_bytes + extra_bytes(tokenizer), final.name, mesh)
    in_background = all(all_gather_objects(has_room(shards.num_bytes), mesh.plan))
    if in_background:
        shards = shards.copied()

    def write() -> None:
        with writing(directory, name=final.name, temporary=None):
            shards.write(temporary)

    with gather_errors(mesh.plan):
        writer.start(write) if in_background else write()

    def seal() -> None:
        with writing(directory, name=final.name, temporary=temporary):
            stage: Any = stages_of(model)[0]  # a model of transformers, or a stage of one
            stage.config.save_pretrained(temporary)
            if tokenizer is not None:
                write_tokenizer(temporary, tokenizer)
            write_rngs(temporary, rngs)
            saved = SavedState(
                train=state,
                optimizer=saved_optimizer,
                scheduler=encode(scheduler_state),
                scaler=encode(scaler_state),
                files=file_sizes(temporary),
            )
            saved.write(temporary, earlier_checksums=checksums_of_ranks(temporary))
            add_checkpoint(temporary, final, keep=keep, best_step=best_step)

    return final, seal


def describe_all_ranks(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> SavedOptimizer:
    """Return one description of the optimizers of all ranks, without the tensors of their states."""
    return _merge(all_gather_objects(describe_optimizer(optimizer, updated_names(model, optimizer)), mesh.plan))


def make_shared_directory(temporary: Path, num_bytes: int, name: str, mesh: Mesh) -> None:
    """Make the directory to which all ranks write, on rank 0. It needs ``num_bytes`` of free space."""
    directory = temporary.parent
    with rank_0_first(mesh.plan), writing(directory, name=name, temporary=temporary):
        if mesh.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory)
            check_room(directory, name=name, need=num_bytes)
            temporary.mkdir()
    with gather_errors(mesh.plan):
        _check_directory_is_shared(temporary)


def restore_shards(
    directory: Path,
    saved: SavedOptimizer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    stored: dict[str, StoredPieces] | None = None,
) -> None:
    """Load the weights and the optimizer state of this rank's shards.

    ``stored`` are the pieces of the checkpoint's files; None: read them from the files. Raise RequestError if the checkpoint is
    of another optimizer, or its state cannot be divided.
    """
    check_same_optimizer(directory, saved.optimizer_class, optimizer)
    if saved.subclasses:
        raise cannot_divide(directory)
    restore_options(directory, saved, optimizer, updated_names(model, optimizer), allow_subset=True)
    load_shards(directory, model, optimizer, lambda name: decode(saved.numbers.get(name, {})), stored=stored)


def load_sharded_checkpoint(
    directory: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: Any, mesh: Mesh
) -> TrainState:
    """Load this rank's shards from a checkpoint of any number of ranks in any layout.

    Random numbers continue if the layout is the same. Otherwise they are seeded by the run's seed, the step and the rank. Raise
    RequestError if the checkpoint does not match this run.
    """
    saved = check_checkpoint(directory, contents=mesh.rank == 0)  # one rank reads the bytes for all
    if not isinstance(saved, SavedState):
        raise RequestError(f"{directory} is of a Trainer; resume it with trainer.train(resume_from_checkpoint=True)")
    restore_shards(directory, saved.optimizer, model, optimizer)
    load_schedule(scheduler, decode(saved.scheduler))
    if saved.scaler is not None:
        scaler.load_state_dict(decode(saved.scaler))
    plan = mesh.plan
    has_same_layout = (
        saved.train.plan["num_processes"] == plan.num_processes and Layout(**saved.train.plan["layout"]) == plan.layout
    )
    rng = read_rng(directory, rank=mesh.rank) if has_same_layout else None
    if rng is not None:
        restore_rng(rng, next(model.parameters()).device)
    else:
        seed_rng(saved.train.seed, saved.train.step, mesh.rank // plan.layout.tensor_parallel)
    return saved.train


def load_schedule(schedule: LambdaLR, saved: dict[str, Any]) -> None:
    """Go on with the steps of a saved schedule, at the learning rates of this rank's parameter groups.

    The saved lists have the rates of the groups of the rank that wrote them, and a pipeline stage may have fewer groups.
    """
    groups = schedule.optimizer.param_groups
    own_lists = {
        "base_lrs": [group["initial_lr"] for group in groups],
        "_last_lr": [group["lr"] for group in groups],
        "lr_lambdas": [None] * len(groups),
    }
    schedule.load_state_dict({**saved, **own_lists})


def export(directory: Path, *, model: nn.Module, tokenizer: Any | None, skeleton: Callable[[], Any], mesh: Mesh) -> None:
    """Write the final Hugging Face directory.

    Each rank writes its shards. Rank 0 assembles them in a memory-mapped file, so that no rank needs memory for the full model.
    ``skeleton`` returns the model without weights. Raise JobFailed on all ranks if one of them cannot write.
    """

    def save(weights: dict[str, Tensor]) -> None:
        empty_model = skeleton()
        save_model(directory, empty_model, tokenizer, weights=drop_tied_names(weights, empty_model))

    export_weights(directory, model=model, tokenizer=tokenizer, save=save, mesh=mesh)


def drop_tied_names(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the weights without the second names of tied ones."""
    duplicates = {tied for tied, name in tied_names(model).items() if name in weights}
    return {name: weight for name, weight in weights.items() if name not in duplicates}


def export_weights(
    directory: Path, *, model: nn.Module, tokenizer: Any | None, save: Callable[[dict[str, Tensor]], None], mesh: Mesh
) -> None:
    """Assemble the full weights in a memory-mapped file, and call ``save`` with them on rank 0."""
    shard_directory = directory / PARTS_TEMPORARY
    shards = shards_to_write(model, None, mesh.plan, mesh.rank)
    size = sum(all_gather_objects(shards.num_bytes, mesh.plan))  # on disk three times: in shards, assembled, and as the model
    with rank_0_first(mesh.plan):
        if mesh.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(shard_directory, ignore_errors=True)
            with writing(directory, name="the final model", temporary=shard_directory):
                check_room(directory, name="the final model", need=3 * size + extra_bytes(tokenizer))
                shard_directory.mkdir()
    with gather_errors(mesh.plan), writing(directory, name="the final model", temporary=None):
        _check_directory_is_shared(shard_directory)
        shards.write(shard_directory)
    with rank_0_first(mesh.plan):
        if mesh.rank == 0:
            try:
                with tempfile.TemporaryFile(dir=shard_directory) as file:
                    save(_assemble(read_pieces(shard_directory)["weights"], shard_directory, file))
            finally:
                shutil.rmtree(shard_directory, ignore_errors=True)


def _check_directory_is_shared(temporary: Path) -> None:
    """Raise JobFailed if this rank does not see the directory that rank 0 made."""
    if not temporary.is_dir():
        raise JobFailed(
            f"{temporary.parent} on {socket.gethostname()} is not the one that rank 0 writes to; ranks that share a model save "
            "into one directory: give --output on a file system that all hosts have"
        )


def _assemble(stored: StoredPieces, directory: Path, file: Any) -> dict[str, Tensor]:
    """Return each full tensor in the memory-mapped pages of ``file``."""
    formats = {name: (pieces[0][0].shape, dtype_of(pieces[0][1])) for name, pieces in stored.items()}
    page_sizes = [-(-dtype.itemsize * prod(shape) // ALIGNMENT) * ALIGNMENT for shape, dtype in formats.values()]
    file.truncate(max(sum(page_sizes), ALIGNMENT))
    mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    weights = {}
    for (name, (shape, dtype)), pages in zip(formats.items(), mapped.split(page_sizes or [ALIGNMENT]), strict=True):
        weights[name] = pages[: dtype.itemsize * prod(shape)].view(dtype).view(shape)
        fill(weights[name], Piece(shape=shape), name, stored, directory)
    return weights


def _merge(optimizers: Sequence[SavedOptimizer]) -> SavedOptimizer:
    """Merge the descriptions of all ranks. The groups of pipeline stages have the same options and different parameters."""
    groups: dict[str, SavedGroup] = {}
    for group in (group for optimizer in optimizers for group in optimizer.groups):
        earlier = groups.get(repr(group.options))
        parameters = earlier.parameters if earlier is not None else ()
        groups[repr(group.options)] = group.changed(parameters=tuple(dict.fromkeys((*parameters, *group.parameters))))
    numbers = {name: values for optimizer in optimizers for name, values in optimizer.numbers.items()}
    return optimizers[0].changed(groups=tuple(groups.values()), numbers=numbers)
