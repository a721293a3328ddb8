"""Checkpoints of a run under XLA: weights and optimizer as safetensors, where it stands as JSON. No pickle, no TensorFlow format.

A checkpoint is written beside its place and renamed, so that each checkpoint-<step> is whole; its state file, with the
checksums of the others, is written last.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from upshift.errors import JobFailed, RequestError
from upshift.training.checkpoint.state import checksums_of, sealed, unsealed
from upshift.value import Value, first_problem

logger = logging.getLogger(__name__)

NAME = re.compile(r"checkpoint-(\d+)")
STATE, WEIGHTS, OPTIMIZER = "upshift_state.json", "model.safetensors", "optimizer.safetensors"


class Standing(Value):
    """The state of a run apart from tensors: with the same one, and the same data, it goes on the same way."""

    step: int  # optimizer steps done
    losses: tuple[float, ...]
    evaluations: tuple[tuple[int, float], ...] = ()  # (step, held-out loss)
    arguments: dict[str, Any]
    global_batch: int
    data: str = ""  # identity of the training data; empty where the batches have none
    checksums: dict[str, str] = {}  # SHA-256 of every other file


def write_checkpoint(
    output: Path, standing: Standing, weights: Mapping[str, tf.Variable], optimizer: Mapping[str, tf.Variable], *, keep: int
) -> Path:  # fmt: skip
    """Write a checkpoint and remove all but the ``keep`` newest. Raise JobFailed where the disk does not take it."""
    final = output / f"checkpoint-{standing.step}"
    temporary = final.with_name(f"{final.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, variables in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
            save_file({key: variable.numpy() for key, variable in variables.items()}, temporary / name)
        whole = standing.changed(checksums=checksums_of(temporary, (WEIGHTS, OPTIMIZER)))
        (temporary / STATE).write_text(sealed(whole.to_json(indent=1)), encoding="utf-8")
        for file in [*temporary.iterdir(), temporary]:
            _sync(file)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync(output)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise JobFailed(f"{final.name} could not be written to {output}: {error}; earlier ones are still whole") from error
    for old in _found(output)[keep:]:
        shutil.rmtree(old)
    return final


def newest_checkpoint(output: Path) -> tuple[Path, Standing] | None:
    """Return the newest checkpoint that is whole, every byte of it compared with what was saved. Warn of each newer
    one that is not."""
    for path in _found(output):
        standing = _standing(path)
        if standing is not None:
            return path, standing
        logger.warning("skipped a damaged checkpoint: %s is not as it was written", path)
    return None


def restore(path: Path, weights: Mapping[str, tf.Variable], optimizer: Mapping[str, tf.Variable]) -> None:
    """Restore the tensors bit for bit. Raise RequestError if the model or the optimizer is another one."""
    for name, variables in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
        with safe_open(path / name, framework="numpy") as stored:
            if set(stored.keys()) != set(variables):
                other = min(set(stored.keys()) ^ set(variables))
                raise RequestError(f"{path / name} and this run differ in {other}; resume with that run's model and optimizer")
            for key, variable in variables.items():
                value = stored.get_tensor(key)
                if tuple(value.shape) != tuple(variable.shape):
                    raise RequestError(f"{path / name} has {key} as {value.shape}, this run as {tuple(variable.shape)}")
                variable.assign(value)


def _found(output: Path) -> list[Path]:
    """Return the checkpoints, newest first."""
    if not output.is_dir():
        return []
    paths = [path for path in output.iterdir() if path.is_dir() and NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: -int(path.name.rpartition("-")[2]))


def _standing(path: Path) -> Standing | None:
    """Return the state, or None if the checkpoint is not whole."""
    try:
        document = unsealed((path / STATE).read_bytes())
        if document is None:
            return None
        standing = Standing.model_validate(json.loads(document))
        whole = standing.checksums == checksums_of(path, (WEIGHTS, OPTIMIZER))
    except (OSError, ValueError):
        return None
    return standing if whole and path.name == f"checkpoint-{standing.step}" else None


def arguments_of(standing: Standing, kind: type[Value]) -> Any:
    try:
        return kind.model_validate(standing.arguments)
    except ValidationError as error:
        raise RequestError(f"the checkpoint's arguments are not of this version: {first_problem(kind, error)}") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
