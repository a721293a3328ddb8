"""Write and read checkpoints and the final model of a Trainer whose ranks have the model in parts.

Each rank writes and reads its own parts. A checkpoint has the parts in place of whole files (checkpoint/divided.py), and all
else that a Trainer's has. A run goes on from it with any number of ranks in any layout, one process included. All ranks call
these functions together.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from upshift.errors import RequestError
from upshift.loading.header import read_header
from upshift.models.build import build_model
from upshift.training.checkpoint.adapter import has_adapter, write_adapter
from upshift.training.checkpoint.divided import Stored, load_parts, own_parts, read_pieces, updated_names
from upshift.training.checkpoint.files import writing
from upshift.training.checkpoint.model import extra_bytes
from upshift.training.checkpoint.of_ranks import described, export_weights, make_shared, without_tied
from upshift.training.checkpoint.optimizer import class_name, restore_options
from upshift.training.checkpoint.pieces import Piece
from upshift.training.checkpoint.plain_json import decode
from upshift.training.checkpoint.state import SavedOptimizer
from upshift.training.parallel.place import Place
from upshift.training.parallel.ranks import gather, on_rank_0, together
from upshift.training.trainer.library_files import by_names
from upshift.training.trainer.model_files import write_trained
from upshift.training.trainer.trainer_files import PARTS_OPTIMIZER_NAME, read_saved_optimizer


def write_shared(
    temporary: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokenizer: Any | None,
    rest: Callable[[], None],
    seal: Callable[[], None],
    place: Place,
) -> None:
    """Write a checkpoint in parts. ``rest`` is called on all ranks, then ``seal`` on rank 0.

    Raise JobFailed on all ranks if one could not write.
    """
    plan, name = place.plan, temporary.stem
    own = own_parts(model, optimizer, plan, place.rank)
    saved = described(model, optimizer, place)
    make_shared(temporary, sum(gather(own.num_bytes, plan)) + extra_bytes(tokenizer), name, place)
    with together(plan), writing(temporary.parent, name=name, temporary=None):
        own.write(temporary)
    rest()
    with on_rank_0(plan), writing(temporary.parent, name=name, temporary=temporary):
        if place.rank == 0:
            described_by: Any = getattr(model, "config", model)
            described_by.save_pretrained(temporary)
            (temporary / PARTS_OPTIMIZER_NAME).write_text(json.dumps(saved.model_dump()), encoding="utf-8")
            seal()


def read_into_parts(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint that one process or transformers wrote whole into this rank's parts. Raise RequestError if it does not
    match."""
    names = updated_names(model, optimizer)
    groups = tuple(tuple(names[part] for part in group["params"]) for group in optimizer.param_groups)
    saved, tensors = by_names(directory, groups, class_name(optimizer))
    with tempfile.TemporaryDirectory(prefix="upshift-resume-") as folder:
        file = Path(folder) / "optimizer.safetensors"
        save_file(tensors, file)
        stored = read_pieces(directory)
        stored["optimizer"] = {one.name: [(Piece(shape=one.shape), one)] for one in read_header(file).tensors}
        _read_parts(directory, saved, model, optimizer, stored)


def read_shared(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read weights and optimizer state from a checkpoint of any ranks into this rank's parts.

    Raise RequestError if they do not match this run.
    """
    saved = read_saved_optimizer(directory)
    assert saved is not None  # the caller looked
    _read_parts(directory, saved, model, optimizer, None)


def _read_parts(
    directory: Path, saved: SavedOptimizer, model: nn.Module, optimizer: torch.optim.Optimizer, stored: dict[str, Stored] | None
) -> None:
    if saved.optimizer_class != class_name(optimizer):
        raise RequestError(
            f"{directory} was trained with {saved.optimizer_class}, this run uses {class_name(optimizer)}; "
            "resume with the optim that the run was started with"
        )
    if saved.subclasses:
        raise RequestError(f"{directory} has an optimizer of 8 or 4 bits, whose state does not come apart; resume in one process")
    restore_options(directory, saved, optimizer, updated_names(model, optimizer), some=True)
    load_parts(directory, model, optimizer, lambda name: decode(saved.numbers.get(name, {})), stored=stored)


def export_trained(directory: Path, *, model: nn.Module, model_class: Any, tokenizer: Any | None, place: Place) -> None:
    """Write the whole model from rank 0, as one process saves it. ``model_class`` is the class before fully_shard replaced it."""

    def save(weights: dict[str, Tensor]) -> None:
        weights = without_tied(weights, model)
        if has_adapter(model):
            write_adapter(directory, model, weights)
            return
        write_trained(directory, _bare(model, model_class), weights, original_names=True)

    export_weights(directory, model=model, tokenizer=tokenizer, save=save, place=place)


def _bare(model: Any, model_class: Any) -> Any:
    """Return the model without weights."""
    with torch.device("meta"):
        bare: Any = build_model(model.config, model_class, dtype=next(model.parameters()).dtype)
    bare.generation_config = getattr(model, "generation_config", None)
    return bare
