"""Build the unmodified torch model with empty weights, which is exported. Its weights live in TensorFlow, never in
torch.

Attention and experts are computed the same way for every model. Attention is plain products and a softmax (eager),
which XLA fuses itself. Experts have no shapes that depend on data."""

from __future__ import annotations

import mmap

import torch
from torch import nn
from transformers import PreTrainedModel

from upshift.internals.torch_names import BUFFERS, PARAMETERS
from upshift.internals.transformers_names import EXPERTS_KERNEL, INITIALIZE, INITIALIZED
from upshift.loading.load import build_empty, class_of
from upshift.models.source import ModelSource
from upshift.xla import experts


def skeleton(source: ModelSource, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model in evaluation mode. Weights have addresses and are never touched, so that the system gives
    them no memory. Buffers that no checkpoint holds are computed."""
    config = source.hf_config
    config.dtype = dtype
    model = build_empty(class_of(config, source), config, dtype)
    stored = set(model.state_dict())
    _allocate(model, dtype)
    for name in stored:
        INITIALIZED.put(model.get_parameter_or_buffer(name), True)
    INITIALIZE.of(model)(False)
    model.tie_weights(recompute_mapping=False)
    set_implementations(model).eval()
    return model


def set_implementations(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("eager")
    name = experts.register()
    for part in model.modules():  # a part's config may be its own
        config = getattr(part, "config", None)
        if EXPERTS_KERNEL.read(config) is not None:
            EXPERTS_KERNEL.put(config, name)
    return model


def _allocate(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, parameter in PARAMETERS.of(module).items():
            if parameter is not None and parameter.is_meta:
                empty = untouched(parameter.shape, parameter.dtype)
                PARAMETERS.of(module)[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in BUFFERS.of(module).items():
            if buffer is not None and buffer.is_meta:
                BUFFERS.of(module)[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def untouched(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return addresses without memory behind them until somebody writes: torch.empty may give memory that was used
    before."""
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, shape.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def names_of(model: PreTrainedModel) -> dict[str, str]:
    """Return every name of the state_dict, with the first name of the weight that it is tied to."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}
