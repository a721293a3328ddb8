"""The files of a Trainer's checkpoint besides tensors, and what may not be among them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_utils import sort_checkpoints

from upshift.errors import JobFailed, RequestError
from upshift.training.checkpoint.files import (
    CHECKPOINT,
    check_checkpoint,
    file_sizes,
    find_checkpoints,
    put_in_place,
    remove_checkpoint,
)
from upshift.training.checkpoint.model import write_weights
from upshift.training.checkpoint.optimizer import plain_name, write_optimizer
from upshift.training.checkpoint.plain_json import encode
from upshift.training.checkpoint.state import STATE_NAME, SavedOptimizer, TrainerManifest
from upshift.training.trainer.plain_state import NotPlain, from_json, to_json
from upshift.value import first_problem

ARGUMENTS_NAME = "training_args.json"
OPTIMIZER_NAME = "optimizer.json"  # beside optimizer.safetensors
SCHEDULER_NAME = "scheduler.json"
SCALER_NAME = "scaler.json"
PICKLED_WEIGHTS = frozenset({"pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin"})
NOT_WRITTEN = "not_written"  # the arguments that JSON has no word for
PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
PLAIN_OR = "keep only numbers, strings, containers and tensors there, or set save_only_model=True or save_strategy='no'"


def write_trained(directory: Path, model: nn.Module, weights: dict[str, Tensor], *, original_names: bool) -> None:
    """`weights` as the model's own, in a Hugging Face directory where the model has one."""
    if isinstance(model, PreTrainedModel):
        write_weights(directory, model, weights, original_names=original_names)
    else:
        # A tensor that has several names is written under one of them, as read_weights expects.
        once = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(weights.items())}
        plain = {plain_name(name): weights[name].contiguous() for name in once.values()}
        save_file(plain, directory / "model.safetensors", {"format": "pt"})


def write_arguments(directory: Path, arguments: Any) -> None:
    """TrainingArguments as JSON. Tokens are left out as transformers does; objects are named under "not_written"."""
    written: dict[str, Any] = {}
    objects: dict[str, str] = {}
    for name, value in arguments.to_dict().items():
        try:
            json.dumps(value)
            written[name] = value
        except (TypeError, ValueError):
            objects[name] = f"{type(value).__module__}.{type(value).__qualname__}"
    (directory / ARGUMENTS_NAME).write_text(json.dumps({**written, NOT_WRITTEN: objects}, indent=1), encoding="utf-8")


def write_trainer_optimizer(directory: Path, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    try:
        saved = write_optimizer(directory, optimizer, model)
    except TypeError as error:  # a state value of a class that JSON has no word for
        raise RequestError(f"the state of optimizer {type(optimizer).__name__} cannot be written: {error}; {PLAIN_OR}") from None
    (directory / OPTIMIZER_NAME).write_text(json.dumps(saved.model_dump()), encoding="utf-8")


def read_saved_optimizer(directory: Path) -> SavedOptimizer | None:
    """None: the checkpoint is of a model only."""
    path = directory / OPTIMIZER_NAME
    if not path.is_file():
        return None
    try:
        return SavedOptimizer.model_validate(json.loads(path.read_bytes()))
    except ValidationError as error:
        problem = first_problem(SavedOptimizer, error)
        raise RequestError(f"{path} is no state of this version ({problem}); resume from another checkpoint") from None


def write_state(path: Path, holder: Any) -> None:
    """The state_dict of a scheduler or a scaler. Raises RequestError, naming what cannot be written."""
    path.write_text(json.dumps(plain_state(holder)), encoding="utf-8")


def read_state(path: Path, holder: Any) -> None:
    if path.is_file():
        holder.load_state_dict(from_json(json.loads(path.read_bytes())))


def plain_state(holder: Any) -> Any:
    try:
        return to_json(holder.state_dict(), type(holder).__name__)
    except NotPlain as error:
        raise RequestError(f"{error}, cannot be written to a checkpoint without pickle; {PLAIN_OR}") from None


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises RequestError if the optimizer could not be saved, as far as can be known before its first step."""
    known = set(model.parameters())
    kind = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        if not known.issuperset(group["params"]):
            raise RequestError(
                f"optimizer {kind} trains parameters that the model has not, so no checkpoint could name them; "
                "make it of model.parameters(), or set save_only_model=True or save_strategy='no'"
            )
        for key, value in group.items():
            try:
                encode([] if key == "params" else value)
            except TypeError as error:
                raise RequestError(f"option {key} of group {number} of optimizer {kind}: {error}; {PLAIN_OR}") from None


def check_resumable(directory: Path) -> None:
    """Raises RequestError if this is no whole checkpoint, or one of transformers.Trainer, whose pickles are never loaded."""
    if (directory / STATE_NAME).is_file():
        check_checkpoint(directory)  # a pickle that somebody else added there is left unread
        return
    _refuse_pickles(path for path in directory.glob("*") if path.suffix in PICKLES)
    raise RequestError(f"{directory} is no whole checkpoint, it has no {STATE_NAME}; resume from another checkpoint")


def check_adapters(directory: Path) -> None:
    """Before transformers and peft read a checkpoint's adapters. Raises RequestError if they could take a pickle."""
    check_resumable(directory)
    _refuse_pickles(path for path in directory.rglob("*") if path.name in PICKLED_WEIGHTS)


def _refuse_pickles(found: Iterable[Path]) -> None:
    for path in sorted(found)[:1]:
        raise RequestError(
            f"{path.parent} holds {path.name}, as transformers.Trainer writes: pickles are never loaded, and nothing there was "
            f"changed; start a new run from its weights with from_pretrained({str(path.parent)!r}), or resume it with "
            "transformers.Trainer"
        )


def newest_resumable(directory: Path) -> Path:
    """Raises RequestError when no checkpoint there is whole."""
    found = find_checkpoints(directory)
    if found.newest is not None:
        return found.newest
    for path, _ in found.damaged:
        check_resumable(path)
    raise RequestError(f"{directory} holds no checkpoint; give another output_dir, or start without resume_from_checkpoint")


def rotate(directory: Path, *, newest: Path, best: str | None, limit: int | None) -> None:
    """Keeps `limit` checkpoints (None or 0: all), always `newest` and `best`; which go first is as in transformers."""
    if not limit or limit < 0:
        return
    found = [Path(path) for path in sort_checkpoints(str(directory), use_mtime=True)]
    checkpoints = [path for path in found if CHECKPOINT.fullmatch(path.name)]
    kept = {newest} | ({Path(best)} if best is not None else set())
    doomed = [path for path in checkpoints if path not in kept]
    for path in doomed[: max(0, len(checkpoints) - max(limit, len(kept)))]:
        remove_checkpoint(path)


@contextmanager
def writing_model(directory: Path) -> Iterator[None]:
    """A failed write becomes JobFailed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise JobFailed(f"the model could not be written to {directory}: {reason}; free space there and save again") from error


def finish_checkpoint(run_dir: Path, *, final: Path, temporary: Path, best: str | None, limit: int | None) -> None:
    manifest = TrainerManifest(files=file_sizes(temporary), trainer=transformers.__version__)
    manifest.write(temporary)
    put_in_place(temporary, final)
    rotate(run_dir, newest=final, best=best, limit=limit)
