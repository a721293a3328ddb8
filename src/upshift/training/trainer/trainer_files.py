"""Write and check the files of a Trainer's checkpoint besides tensors, and refuse what may not be among them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import nn
from transformers.trainer_utils import sort_checkpoints

from upshift.errors import JobFailed, RequestError
from upshift.loading.header import read_header
from upshift.training.checkpoint.divided import is_divided
from upshift.training.checkpoint.files import (
    CHECKPOINT,
    check_checkpoint,
    file_sizes,
    put_in_place,
    remove_checkpoint,
    step_of,
)
from upshift.training.checkpoint.plain_json import encode
from upshift.training.checkpoint.state import STATE_NAME, SavedOptimizer, TrainerManifest
from upshift.training.trainer.library_files import OPTIMIZER_FILE, PLAIN_OR, SCHEDULER_FILE
from upshift.value import first_problem

logger = logging.getLogger(__name__)

ARGUMENTS_NAME = "training_args.json"
PARTS_OPTIMIZER_NAME = "optimizer.json"  # of ranks that have parts of the model
TRAINER_STATE_NAME = "trainer_state.json"
PICKLED_ADAPTER = "adapter_model.bin"
WEIGHTS = frozenset(
    {
        "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
        "adapter_model.safetensors", PICKLED_ADAPTER,
    }
)  # fmt: skip
NOT_WRITTEN = "not_written"  # the key for arguments that JSON cannot hold


def write_arguments(directory: Path, arguments: Any) -> None:
    """Write TrainingArguments as JSON. Tokens are left out as transformers does; objects are named under "not_written"."""
    written: dict[str, Any] = {}
    objects: dict[str, str] = {}
    for name, value in arguments.to_dict().items():
        try:
            json.dumps(value)
            written[name] = value
        except (TypeError, ValueError):
            objects[name] = f"{type(value).__module__}.{type(value).__qualname__}"
    (directory / ARGUMENTS_NAME).write_text(json.dumps({**written, NOT_WRITTEN: objects}, indent=1), encoding="utf-8")


def read_saved_optimizer(directory: Path) -> SavedOptimizer | None:
    """Return the optimizer state of a checkpoint that ranks wrote in parts, or None if the checkpoint has a model only."""
    path = directory / PARTS_OPTIMIZER_NAME
    if not path.is_file():
        return None
    try:
        return SavedOptimizer.model_validate(json.loads(path.read_bytes()))
    except ValidationError as error:
        problem = first_problem(SavedOptimizer, error)
        raise RequestError(f"{path} is no state of this version ({problem}); resume from another checkpoint") from None


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise RequestError if the optimizer could not be saved, as far as can be known before its first step."""
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
    """Raise RequestError if this is no whole checkpoint of upshift.Trainer or transformers.Trainer. Read no tensors."""
    if is_own(directory):
        _check_own(directory)
        return
    if not (directory / TRAINER_STATE_NAME).is_file():  # transformers writes it last
        raise RequestError(f"{directory} is no whole checkpoint, it has no {TRAINER_STATE_NAME}; resume from another checkpoint")
    weights = [path for path in directory.rglob("*") if path.name in WEIGHTS]
    if not weights:
        raise RequestError(
            f"{directory} has no weights in {', '.join(sorted(WEIGHTS))}; resume it with the launcher that wrote it, or "
            "resume from another checkpoint"
        )
    if any(path.suffix == ".safetensors" for path in weights):
        for path in directory.glob("*.safetensors"):
            read_header(path)
    if (directory / OPTIMIZER_FILE).is_file() != (directory / SCHEDULER_FILE).is_file():
        names = [OPTIMIZER_FILE, SCHEDULER_FILE]
        missing = next(name for name in names if not (directory / name).is_file())
        raise RequestError(f"{directory} is no whole checkpoint, it has no {missing}; resume from another checkpoint")


def is_own(directory: Path) -> bool:
    """Return whether upshift.Trainer wrote a checkpoint, and not transformers.Trainer."""
    return (directory / STATE_NAME).is_file()


def _check_own(directory: Path) -> None:
    if not isinstance(check_checkpoint(directory), TrainerManifest):
        raise RequestError(
            f"{directory} is of upshift train; go on with  upshift train --resume, or start a new run from its weights with "
            f"from_pretrained({str(directory)!r})"
        )
    if not is_divided(directory) and any(directory.glob("optimizer*.safetensors")):
        raise RequestError(
            f"{directory} was written by an earlier version of Upshift; finish the run with that version, or start a new one "
            f"from its weights with from_pretrained({str(directory)!r})"
        )


def check_adapters(directory: Path) -> None:
    """Raise RequestError where peft would have to unpickle a checkpoint's adapters."""
    check_resumable(directory)
    for path in sorted(path for path in directory.rglob("*") if path.name == PICKLED_ADAPTER)[:1]:
        raise RequestError(
            f"{path} is pickled, and pickles of adapters are never loaded; save the adapter with safe_serialization=True, or "
            "resume from another checkpoint"
        )


def newest_resumable(directory: Path) -> Path:
    """Return the newest whole checkpoint. Raise RequestError when there is none."""
    found = [path for path in directory.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    problems = []
    for path in sorted(found, key=lambda path: (-(step_of(path) or 0), path.name)):
        try:
            check_resumable(path)
        except RequestError as error:
            problems.append(error)
            continue
        for problem in problems:
            logger.warning("skipped a damaged checkpoint: %s", problem)
        return path
    if problems:
        raise problems[0]
    raise RequestError(f"{directory} holds no checkpoint; give another output_dir, or start without resume_from_checkpoint")


def rotate(directory: Path, *, newest: Path, best: str | None, limit: int | None) -> None:
    """Keep `limit` checkpoints (None or 0: all), always `newest` and `best`. The order of removal is that of transformers."""
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
    """Raise JobFailed if a write fails while open."""
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
