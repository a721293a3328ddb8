"""Write and restore checkpoints of a run under XLA: weights and optimizer as safetensors, the state of the run as JSON.

A checkpoint is written into a temporary folder that is then renamed, so each checkpoint-<step> is complete. Its state file, with
the checksums of the other files, is written last.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from upshift.atomic_file import sync_path
from upshift.errors import JobFailed, RequestError
from upshift.training.checkpoint.state import checksums_of, seal, unseal
from upshift.value import Value

logger = logging.getLogger(__name__)

NAME = re.compile(r"checkpoint-(\d+)")
STATE = "upshift_state.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"


class RunState(Value):
    """Hold the state of a run except its tensors. With the same state and the same data a run continues in the same way."""

    step: int  # optimizer steps done
    losses: tuple[float, ...]
    evaluations: tuple[tuple[int, float], ...] = ()  # (step, held-out loss)
    arguments: dict[str, Any]
    global_batch: int
    data: str = ""  # identity of the training data; empty where the batches have none
    checksums: dict[str, str] = {}  # SHA-256 of every other file


def write_checkpoint(
    output: Path, state: RunState, weights: Mapping[str, tf.Variable], optimizer: Mapping[str, tf.Variable], *, keep: int
) -> Path:
    """Write a checkpoint and remove all but the ``keep`` newest. Raise JobFailed if it cannot be written."""
    final = output / f"checkpoint-{state.step}"
    temporary = final.with_name(f"{final.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, variables in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
            save_file({key: variable.numpy() for key, variable in variables.items()}, temporary / name)
        with_checksums = state.changed(checksums=checksums_of(temporary, (WEIGHTS, OPTIMIZER)))
        (temporary / STATE).write_text(seal(with_checksums.to_json(indent=1)), encoding="utf-8")
        for file in [*temporary.iterdir(), temporary]:
            sync_path(file)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync_path(output)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise JobFailed(f"{final.name} could not be written to {output}: {error}; earlier ones are still whole") from error
    for outdated in _checkpoints(output)[keep:]:
        shutil.rmtree(outdated)
    return final


def newest_checkpoint(output: Path) -> tuple[Path, RunState] | None:
    """Return the newest checkpoint whose files have their checksums. Log a warning for each newer one that is damaged."""
    for path in _checkpoints(output):
        state = _read_state(path)
        if state is not None:
            return path, state
        logger.warning("skipped a damaged checkpoint: %s is not as it was written", path)
    return None


def restore(path: Path, weights: Mapping[str, tf.Variable], optimizer: Mapping[str, tf.Variable]) -> None:
    """Restore the tensors bit for bit. Raise RequestError if they are of another model or optimizer."""
    for name, variables in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
        with safe_open(path / name, framework="numpy") as stored:
            if set(stored.keys()) != set(variables):
                name_of_difference = min(set(stored.keys()) ^ set(variables))
                raise RequestError(
                    f"{path / name} and this run differ in {name_of_difference}; resume with that run's model and optimizer"
                )
            for key, variable in variables.items():
                value = stored.get_tensor(key)
                if tuple(value.shape) != tuple(variable.shape):
                    raise RequestError(f"{path / name} has {key} as {value.shape}, this run as {tuple(variable.shape)}")
                variable.assign(value)


def _checkpoints(output: Path) -> list[Path]:
    """Return the checkpoints, newest first."""
    if not output.is_dir():
        return []
    paths = [path for path in output.iterdir() if path.is_dir() and NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: -int(path.name.rpartition("-")[2]))


def _read_state(path: Path) -> RunState | None:
    """Return the state of a checkpoint, or None if a file is missing or damaged."""
    try:
        document = unseal((path / STATE).read_bytes())
        if document is None:
            return None
        state = RunState.model_validate(json.loads(document))
        is_whole = state.checksums == checksums_of(path, (WEIGHTS, OPTIMIZER))
    except (OSError, ValueError):
        return None
    return state if is_whole and path.name == f"checkpoint-{state.step}" else None
