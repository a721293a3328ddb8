"""Build the unmodified torch model with empty weights, and export it as core ATen for one shape of its inputs.

The weights are in TensorFlow, never in torch. Attention is computed as plain products and a softmax (eager), which XLA fuses
itself, and experts have no shapes that depend on data. torch.export rejects a branch or a shape that depends on data, and all
shapes of its result are numbers, so two of XLA's rules hold by construction.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.torch_names import BUFFERS, PARAMETERS, fast_export, is_fake, tree_map
from upshift.internals.transformers_names import EXPERTS_KERNEL, INITIALIZE, INITIALIZED
from upshift.loading.load import build_empty, resolve_class
from upshift.models.source import ModelSource
from upshift.text import one_line
from upshift.xla import experts


def skeleton(source: ModelSource, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model in evaluation mode, with unbacked weights. Buffers that no checkpoint stores are computed."""
    config = source.hf_config
    config.dtype = dtype
    model = build_empty(resolve_class(config, source), config, dtype)
    stored = set(model.state_dict())
    _allocate(model, dtype)
    for name in stored:
        INITIALIZED.put(model.get_parameter_or_buffer(name), True)
    INITIALIZE.of(model)(False)
    model.tie_weights(recompute_mapping=False)
    set_implementations(model).eval()
    return model


def set_implementations(model: PreTrainedModel) -> PreTrainedModel:
    """Make the model compute attention and experts in ways that have a static graph."""
    model.set_attn_implementation("eager")
    name = experts.register()
    for module in model.modules():  # a submodule may have a config of its own
        config = getattr(module, "config", None)
        if EXPERTS_KERNEL.read(config) is not None:
            EXPERTS_KERNEL.put(config, name)
    return model


def _allocate(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, parameter in PARAMETERS.of(module).items():
            if parameter is not None and parameter.is_meta:
                empty = unbacked_tensor(parameter.shape, parameter.dtype)
                PARAMETERS.of(module)[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in BUFFERS.of(module).items():
            if buffer is not None and buffer.is_meta:
                BUFFERS.of(module)[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def unbacked_tensor(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of mapped pages that take no memory until they are written. torch.empty may reuse memory instead."""
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, shape.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def first_names(model: PreTrainedModel) -> dict[str, str]:
    """Map every name of the state_dict to the first name of its weight: tied weights have several names."""
    first_name: dict[int, str] = {}
    return {name: first_name.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def export(module: nn.Module, example: Mapping[str, Any]) -> ExportedProgram:
    """Export a module. ``example``: its arguments by name, tensors or nested lists of tensors.

    Raise RequestError if a branch or a shape depends on data, or if torch cannot trace the module."""
    # torch.export would merge two inputs that are the same tensor.
    distinct = tree_map(torch.Tensor, torch.clone, dict(example))
    try:
        with torch.no_grad(), fast_export(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, (), kwargs=distinct, strict=False)
            table = torch.export.default_decompositions()
            # Its decomposition is a scatter. XLA would copy all keys and values into the scatter's layout at every step.
            table.pop(torch.ops.aten.index_copy.default)
            decomposed: ExportedProgram = exported.run_decompositions(table)
            return decomposed
    except Exception as error:  # torch.export raises dozens of types, all because the module has no static graph
        raise RequestError(
            f"{type(module).__name__} has no static graph ({type(error).__name__}: {one_line(error)}); XLA needs one: run "
            "this model without --backend xla"
        ) from error
    finally:
        _drop_traced_attributes(module)


def _drop_traced_attributes(module: nn.Module) -> None:
    """Delete the tensors without values that a model stored while it was traced.

    transformers keeps the factors of longrope so, and the next export would take them for its own."""
    for submodule in module.modules():
        for name, value in list(vars(submodule).items()):
            if isinstance(value, torch.Tensor) and is_fake(value):
                delattr(submodule, name)
