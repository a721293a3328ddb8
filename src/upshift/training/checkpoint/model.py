"""Write and read the model's part of a checkpoint, and the final model, as Hugging Face directories with safetensors weights.

Checkpoints keep the model's own tensor names, so that each weight is copied back in place. The final model has the format in
which the architecture is published. from_pretrained reads both.

If the model has an adapter, only the adapter is written, as a directory that peft reads: adapter_config.json,
adapter_model.safetensors and a card. The weights of the model under the adapter never change and are not in it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
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
from upshift.models.adapter import base_of
from upshift.models.source import ADAPTER_FILE, ADAPTER_WEIGHTS, HEAD_FIELDS, HEAD_FILE
from upshift.models.tasks import HEAD_OUTPUTS, tasks_of
from upshift.training.checkpoint.directory import check_room, file_sizes, replace_text, sync_tree, writing
from upshift.training.checkpoint.optimizer import plain_name
from upshift.units import MIB


def has_adapter(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that are saved, by the model's own names.

    These are all tensors, or those that are not frozen if the model has an adapter.
    """
    state: dict[str, Tensor] = model.state_dict()
    if not has_adapter(model):
        return state
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    # The scales of a 4-bit weight have names that begin with the name of the weight.
    return {name: tensor for name, tensor in state.items() if frozen.isdisjoint(_name_prefixes(name))}


def _name_prefixes(name: str) -> list[str]:
    """Return the dotted prefixes of a name, itself included."""
    components = name.split(".")
    return [".".join(components[:end]) for end in range(1, len(components) + 1)]


def write_adapter(directory: Path, model: Any, weights: dict[str, Tensor]) -> None:
    """Write the adapter of a model, and the class and labels of its head. ``weights`` is the result of ``saved_state``, or a copy
    of it."""
    model.save_pretrained(directory, state_dict=weights, save_embedding_layers=False)
    base = base_of(model)
    if any(task.output in HEAD_OUTPUTS for task in tasks_of(type(base).__name__)):
        fields = {**base.config.to_dict(), "architectures": [type(base).__name__]}
        head = {name: fields[name] for name in HEAD_FIELDS if fields.get(name) is not None}
        (directory / HEAD_FILE).write_text(json.dumps(head, indent=2), encoding="utf-8")


def read_adapter(directory: Path, model: Any) -> None:
    """Copy saved weights into the adapter's own tensors, bit for bit. Raise RequestError if the adapter is another one."""
    from peft import set_peft_model_state_dict

    file = directory / ADAPTER_WEIGHTS
    (adapter_name,) = model.peft_config
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        loaded: Any = set_peft_model_state_dict(model, load_file(file), adapter_name=adapter_name)
    except (RuntimeError, KeyError) as error:  # raised by torch for another shape, and by peft for a missing name
        raise RequestError(f"{file} is of another adapter ({' '.join(str(error).split())[:200]}); {_ADAPTER_FIX}") from None
    differing = [*loaded.unexpected_keys, *sorted(trained.intersection(loaded.missing_keys))]
    if differing:
        raise RequestError(f"{file} and the model's adapter differ in {differing[0]}; {_ADAPTER_FIX}")


_ADAPTER_FIX = "give the adapter_config.json that was saved with it"


MODEL_LIST_NAME = "upshift_model.json"  # lists the files of the final model, because only those may be replaced
MODEL_TEMPORARY = "model.tmp"
PARTS_TEMPORARY = "parts.tmp"  # the shards of ranks, from which the final model is assembled
MAX_SHARD_SIZE = "4GB"  # safetensors needs all tensors of one file in host memory at once
CONFIG_NAMES = ("config.json", ADAPTER_FILE)  # no reader takes a directory without either of them for a model
JSON_BYTES = MIB  # config, state and file headers
TOKENIZER_ENTRY_BYTES = 128


def save_model(directory: Path, model: nn.Module, tokenizer: Any | None, *, weights: dict[str, Tensor] | None = None) -> None:
    """Write the final Hugging Face directory.

    ``weights`` are the weights of a model that has none itself. Files move into place one by one, the config last. Raise
    JobFailed if the directory cannot be written, and RequestError if a file of the user is in the way.
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
    """Move the files of the final model into place. Raise RequestError if a file of the user is in the way."""
    names = list(file_sizes(temporary))
    earlier_names = model_files(directory)
    foreign = [name for name in names if (directory / name).exists() and name not in earlier_names]
    if foreign:
        raise RequestError(f"{directory / foreign[0]} is not from Upshift and stays; choose another output directory")
    for config_name in CONFIG_NAMES:
        (directory / config_name).unlink(missing_ok=True)
    replace_text(directory / MODEL_LIST_NAME, json.dumps(sorted({*names, *earlier_names})))
    for name in sorted(set(earlier_names) - set(names)):
        (directory / name).unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: name in CONFIG_NAMES):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).replace(directory / name)
    shutil.rmtree(temporary)
    replace_text(directory / MODEL_LIST_NAME, json.dumps(names))


def model_files(directory: Path) -> list[str]:
    """Return the files of the final model that save_model wrote, or began to write, into `directory`.

    Raise RequestError if the list of these files is damaged.
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
    root = directory.resolve()
    return [name for name in names if (root / name).resolve().is_relative_to(root)]


def write_model(
    directory: Path,
    model: nn.Module,
    tokenizer: Any | None,
    *,
    original_names: bool,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write the model and the tokenizer. `weights` is a copy of saved_state, for a model whose training goes on meanwhile."""
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
    library_model: Any = model  # a model of transformers
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
    except Exception as error:  # the Rust library raises Exception itself for an I/O error
        if type(error) is not Exception:
            raise
        raise OSError(f"the tokenizer: {error}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def model_bytes(model: nn.Module) -> int:
    """Return the size of the saved weights in bytes. Tied tensors count once."""
    unique = {(tensor.data_ptr(), tensor.shape): tensor for tensor in saved_state(model).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def extra_bytes(tokenizer: Any | None) -> int:
    """Return an estimate of the bytes of all other files of a checkpoint."""
    return JSON_BYTES + (len(tokenizer) * TOKENIZER_ENTRY_BYTES if tokenizer is not None else 0)


def read_weights(directory: Path, model: nn.Module) -> None:
    """Copy saved weights into the model's own tensors, bit for bit. Raise RequestError if the model is another one."""
    if has_adapter(model):
        read_adapter(directory, model)
        return
    targets = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    filled: set[int] = set()
    for name, stored in find_safetensors(directory).tensors.items():
        read_into(stored, checked_target(stored, targets, directory))
        filled.add(targets[name].data_ptr())
    never_saved = never_saved_names(model)
    for name, tensor in targets.items():
        # A tied weight is saved under only one of its names.
        if tensor.data_ptr() not in filled and name not in never_saved:
            raise RequestError(f"{directory} has no weight {name}; resume with the model that the run was started with")


def never_saved_names(model: nn.Module) -> set[str]:
    """Return the names of the weights that transformers never saves of this model. It takes them as whole names."""
    return set(NOT_SAVED.read(base_of(model)) or ())


def checked_target(stored: StoredTensor, targets: Mapping[str, Tensor], directory: Path) -> Tensor:
    """Return the model's tensor for a stored one. Raise RequestError if the model has none of its shape and dtype."""
    name = stored.name
    target = targets.get(name)
    if target is None:
        raise RequestError(f"{directory} has weight {name}, which the model has not; resume with the model of that run")
    if stored.shape != tuple(target.shape) or dtype_of(stored) != target.dtype:
        raise RequestError(
            f"{directory} has weight {name} as {stored.shape} {dtype_of(stored)}, the model as "
            f"{tuple(target.shape)} {target.dtype}; resume with the model and precision of that run"
        )
    return target
