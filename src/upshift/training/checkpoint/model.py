"""Write and read the model's part of a checkpoint, and the final model: plain Hugging Face directories with safetensors
weights.

Of a model with an adapter the adapter alone is written. Checkpoints keep the model's own tensor names, so that weights go back
in place one by one. The final model is in the format that the architecture is published in. from_pretrained reads both.

Write and read a peft adapter as a directory that peft reads: adapter_config.json, adapter_model.safetensors and a card.

The weights of the model around which the adapter is trained never change and are not in it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from upshift.errors import RequestError
from upshift.internals.transformers_names import ADAPTER_LOADED, NOT_SAVED
from upshift.loading.files.checkpoint import find_safetensors
from upshift.loading.files.safetensors_header import StoredTensor
from upshift.loading.files.tensors import dtype_of, read_into
from upshift.models.source import ADAPTER_FILE, ADAPTER_WEIGHTS
from upshift.training.checkpoint.directory import check_room, file_sizes, replace_text, sync_tree, writing
from upshift.training.checkpoint.optimizer import plain_name
from upshift.units import MIB


def has_adapter(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that are saved, by its own names: all of them, or those that are not frozen if it has an
    adapter."""
    state: dict[str, Tensor] = model.state_dict()
    if not has_adapter(model):
        return state
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    # Beside a 4-bit weight stand its scales, under names that begin with its own.
    return {name: tensor for name, tensor in state.items() if frozen.isdisjoint(_name_prefixes(name))}


def _name_prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def write_adapter(directory: Path, model: Any, weights: dict[str, Tensor]) -> None:
    """Write the adapter. ``weights`` is the result of ``saved_state``, or a copy of it."""
    model.save_pretrained(directory, state_dict=weights, save_embedding_layers=False)


def read_adapter(directory: Path, model: Any) -> None:
    """Copy the weights into the adapter's own tensors, bit for bit. Raise RequestError if the adapter is another one."""
    from peft import set_peft_model_state_dict

    file, (name,) = directory / ADAPTER_WEIGHTS, model.peft_config
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        answer: Any = set_peft_model_state_dict(model, load_file(file), adapter_name=name)
    except (RuntimeError, KeyError) as error:  # torch's words for another shape, peft's for a name that is not there
        raise RequestError(f"{file} is of another adapter ({' '.join(str(error).split())[:200]}); {_ADAPTER_FIX}") from None
    wrong = [*answer.unexpected_keys, *sorted(trained.intersection(answer.missing_keys))]
    if wrong:
        raise RequestError(f"{file} and the model's adapter differ in {wrong[0]}; {_ADAPTER_FIX}")


_ADAPTER_FIX = "give the adapter_config.json that was saved with it"


MODEL_LIST_NAME = "upshift_model.json"  # the files of the final model, so that only those are ever replaced
MODEL_TEMPORARY = "model.tmp"
PARTS_TEMPORARY = "parts.tmp"  # the parts of ranks, from which the final model is put together
MAX_SHARD_SIZE = "4GB"  # safetensors wants every tensor of one file in host memory at once
CONFIG_NAMES = ("config.json", ADAPTER_FILE)  # a directory without either is no model to any reader
JSON_BYTES = MIB  # config, state and file headers
TOKENIZER_ENTRY_BYTES = 128


def save_model(directory: Path, model: nn.Module, tokenizer: Any | None, *, weights: dict[str, Tensor] | None = None) -> None:
    """Write the final Hugging Face directory. Raise JobFailed when it cannot be written, RequestError over a user's file.

    ``weights`` are given for a model that has none itself. Files move into place one by one, the config last.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if weights is None:
        check_room(directory, name="the final model", need=model_bytes(model) + extra_bytes(tokenizer))
    temporary = directory / MODEL_TEMPORARY
    with writing(directory, name="the final model", temporary=temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_model(temporary, model, tokenizer, original_names=True, weights=weights)
        sync_tree(temporary)
        _move_into(directory, temporary)


def _move_into(directory: Path, temporary: Path) -> None:
    names = list(file_sizes(temporary))
    before = model_files(directory)
    foreign = [name for name in names if (directory / name).exists() and name not in before]
    if foreign:
        raise RequestError(f"{directory / foreign[0]} is not from Upshift and stays; choose another output directory")
    for mark in CONFIG_NAMES:
        (directory / mark).unlink(missing_ok=True)
    replace_text(directory / MODEL_LIST_NAME, json.dumps(sorted({*names, *before})))
    for name in set(before) - set(names):
        (directory / name).unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: name in CONFIG_NAMES):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).replace(directory / name)
    shutil.rmtree(temporary)
    replace_text(directory / MODEL_LIST_NAME, json.dumps(names))


def model_files(directory: Path) -> list[str]:
    """Return the files of the final model that save_model wrote, or was writing, into `directory`.

    Raise RequestError if the list of them is damaged.
    """
    path = directory / MODEL_LIST_NAME
    if not path.is_file():
        return []
    try:
        names = [str(name) for name in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError):
        raise RequestError(
            f"{path} is damaged, so Upshift cannot tell which files of {directory} it wrote; use another output directory, or "
            "move that file and the final model away"
        ) from None
    inside = directory.resolve()
    return [name for name in names if (inside / name).resolve().is_relative_to(inside)]


def write_model(
    directory: Path,
    model: nn.Module,
    tokenizer: Any | None,
    *,
    original_names: bool,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write the model and the tokenizer. `weights` is a copy of the model's saved_state, if the model trains on meanwhile."""
    if ADAPTER_LOADED.read(model, False):
        raise RequestError("a model with adapters cannot be saved whole; merge the adapters first")
    weights = saved_state(model) if weights is None else weights
    if has_adapter(model):
        write_adapter(directory, model, weights)
    else:
        write_weights(directory, model, weights, original_names=original_names)
    if tokenizer is not None:
        write_tokenizer(directory, tokenizer)


def write_weights(directory: Path, model: nn.Module, weights: dict[str, Tensor], *, original_names: bool) -> None:
    """Write the weights and the configs. `weights` is the model's state_dict, or a copy of it."""
    library_model: Any = model  # one of transformers'
    with _no_progress_bars():
        library_model.save_pretrained(
            directory,
            state_dict={plain_name(name): tensor for name, tensor in weights.items()},
            max_shard_size=MAX_SHARD_SIZE,
            save_original_format=original_names,
        )


def write_tokenizer(directory: Path, tokenizer: Any) -> None:
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:  # the Rust library has no class for its I/O errors; a subclass is Python's own
        if type(error) is not Exception:
            raise
        raise OSError(f"the tokenizer: {error}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights on disk. Tied tensors count once."""
    unique = {(tensor.data_ptr(), tensor.shape): tensor for tensor in saved_state(model).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def extra_bytes(tokenizer: Any | None) -> int:
    return JSON_BYTES + (len(tokenizer) * TOKENIZER_ENTRY_BYTES if tokenizer is not None else 0)


def read_weights(directory: Path, model: nn.Module) -> None:
    """Copy the weights into the model's own tensors, bit for bit. Raise RequestError if the model is another one."""
    if has_adapter(model):
        read_adapter(directory, model)
        return
    targets = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    filled: set[int] = set()
    for name, stored in find_safetensors(directory).tensors.items():
        _copy_weight(stored, targets=targets, directory=directory)
        filled.add(targets[name].data_ptr())
    not_saved = [re.compile(pattern) for pattern in NOT_SAVED.read(model) or ()]
    for name, tensor in targets.items():
        # A tied weight is saved under one of its names.
        if tensor.data_ptr() not in filled and not any(pattern.search(name) for pattern in not_saved):
            raise RequestError(f"{directory} has no weight {name}; resume with the model that the run was started with")


def _copy_weight(stored: StoredTensor, *, targets: dict[str, Tensor], directory: Path) -> None:
    name, target = stored.name, targets.get(stored.name)
    if target is None:
        raise RequestError(f"{directory} has weight {name}, which the model has not; resume with the model of that run")
    if stored.shape != tuple(target.shape) or dtype_of(stored) != target.dtype:
        raise RequestError(
            f"{directory} has weight {name} as {stored.shape} {dtype_of(stored)}, the model as "
            f"{tuple(target.shape)} {target.dtype}; resume with the model and precision of that run"
        )
    read_into(stored, target)
