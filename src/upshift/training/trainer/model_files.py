"""Write and read the weights of a Trainer's checkpoint through the model's own methods, as transformers does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.transformers_names import NOT_SAVED
from upshift.loading.checkpoint import find_safetensors
from upshift.loading.header import StoredTensor
from upshift.loading.tensors import dtype_of
from upshift.training.checkpoint.model import write_weights
from upshift.training.checkpoint.optimizer import plain_name

OF_THAT_RUN = "resume with the model and precision of that run"


def has_own_format(model: nn.Module) -> bool:
    """Return whether the model's class saves or loads itself in its own way, under any names."""
    library: Any = PreTrainedModel if isinstance(model, PreTrainedModel) else nn.Module
    methods = ["state_dict", "load_state_dict", *(["save_pretrained"] if isinstance(model, PreTrainedModel) else [])]
    return any(getattr(type(model), name, None) is not getattr(library, name, None) for name in methods)


def write_trained(directory: Path, model: nn.Module, weights: dict[str, Tensor] | None, *, original_names: bool) -> None:
    """Write the model, as a Hugging Face directory if its class has one. ``weights`` is a copy of its state_dict, or None."""
    if isinstance(model, PreTrainedModel):
        if has_own_format(model):
            model.save_pretrained(directory, state_dict=weights, is_main_process=True)
        else:
            write_weights(directory, model, model.state_dict() if weights is None else weights, original_names=original_names)
        return
    state = model.state_dict() if weights is None else weights
    # A tensor that has several names is written under one of them, as read_trained expects.
    once = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(state.items())}
    plain = {plain_name(name): state[name].contiguous() for name in once.values()}
    save_file(plain, directory / "model.safetensors", {"format": "pt"})


def read_trained(directory: Path, model: nn.Module) -> None:
    """Load the weights by the model's load_state_dict. Raise RequestError if they belong to another model."""
    stored = find_safetensors(directory).tensors
    names = {plain_name(name): name for name in model.state_dict()}
    if not has_own_format(model):
        _check_stored(directory, stored, model)
    weights: dict[str, Tensor] = {}
    for file in sorted({one.file for one in stored.values()}):
        weights |= {names.get(name, name): tensor for name, tensor in load_file(file).items()}
    model.load_state_dict(weights, strict=False)


def _check_stored(directory: Path, stored: Mapping[str, StoredTensor], model: nn.Module) -> None:
    targets = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    for name, one in stored.items():
        target = targets.get(name)
        if target is None:
            raise RequestError(f"{directory} has weight {name}, which the model has not; resume with the model of that run")
        if one.shape != tuple(target.shape) or dtype_of(one) != target.dtype:
            raise RequestError(
                f"{directory} has weight {name} as {one.shape} {dtype_of(one)}, the model as {tuple(target.shape)} "
                f"{target.dtype}; {OF_THAT_RUN}"
            )
    missing = names_not_stored(stored, model)
    if missing:
        raise RequestError(f"{directory} has no weight {missing[0]}; resume with the model that the run was started with")


def names_not_stored(stored: Any, model: nn.Module) -> list[str]:
    """Return the names of the model's weights that are not stored, and not tied to a stored weight."""
    targets = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    filled = {(tensor.data_ptr(), tensor.shape) for name, tensor in targets.items() if name in stored}
    patterns = [re.compile(pattern) for pattern in NOT_SAVED.read(model) or ()]
    return [
        name
        for name, tensor in targets.items()
        if name not in stored
        and (tensor.data_ptr(), tensor.shape) not in filled
        and not any(pattern.search(name) for pattern in patterns)
    ]


def read_published_names(directory: Path, model: nn.Module) -> bool:
    """Load weights that have the names of the published format, as transformers' checkpoints do.

    Return False if there is nothing to translate. Raise RequestError if the weights do not fit this model.
    """
    if not isinstance(model, PreTrainedModel) or has_own_format(model) or not any(directory.glob("*.safetensors")):
        return False
    stored = find_safetensors(directory).tensors
    missing = names_not_stored(stored, model)
    foreign = sorted(stored.keys() - {plain_name(name) for name in model.state_dict()})
    if not missing and not foreign:
        return False
    both: Any = type(model).from_pretrained(  # the model, and what was found in the files
        directory, config=model.config, dtype=next(model.parameters()).dtype, output_loading_info=True
    )
    loaded, report = both
    problems = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if problems:
        raise RequestError(f"{directory} and the model differ in weight {problems[0]}; resume with the model of that run")
    names = {plain_name(name): name for name in model.state_dict()}
    model.load_state_dict({names[name]: tensor for name, tensor in loaded.state_dict().items()})
    return True
