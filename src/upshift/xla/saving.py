"""Save the trained model as a Hugging Face directory: transformers names, shards and writes; the weights come from
TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from upshift.xla.build import XlaModel

MAX_SHARD_SIZE = "4GB"  # safetensors wants every tensor of one file in host memory at once


def save(model: XlaModel, directory: Path) -> None:
    """Save the model in the dtype of the variables."""
    directory.mkdir(parents=True, exist_ok=True)
    state = torch_state(model)
    kept, shown = model.config.dtype, transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    model.config.dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    try:
        model.torch_model.save_pretrained(directory, state_dict=state, max_shard_size=MAX_SHARD_SIZE, save_original_format=True)
    finally:
        model.config.dtype = kept
        if shown:
            transformers_logging.enable_progress_bar()


def torch_state(model: XlaModel) -> dict[str, Tensor]:
    """Return variables as torch's tensors on the same memory, by every name of the state_dict."""
    found = {name: as_torch(variable.numpy()) for name, variable in model.weights.items()}
    return {name: found[first] for name, first in model.names.items()}


def as_torch(numbers: object) -> Tensor:
    if getattr(getattr(numbers, "dtype", None), "name", "") == "bfloat16":
        return torch.from_numpy(numbers.view("uint16").copy()).view(torch.bfloat16)  # type: ignore[attr-defined]
    return torch.from_numpy(numbers)
