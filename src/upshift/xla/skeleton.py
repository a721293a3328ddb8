"""Build the unmodified torch model with empty weights, which is exported. Its weights live in TensorFlow, never in
torch.

Attention and experts are computed the same way for every model. Attention is plain products and a softmax (eager),
which XLA fuses itself. Experts have no shapes that depend on data.

Export a torch module as core ATen, for one shape of its inputs. Data-dependent branches and shapes end here, in
one line.

The first two rules of XLA hold by construction: torch.export refuses a branch or a shape that depends on data, and
every shape of the result is a number.
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
from upshift.internals.torch_names import BUFFERS, PARAMETERS, tree_map
from upshift.internals.transformers_names import EXPERTS_KERNEL, INITIALIZE, INITIALIZED
from upshift.loading.load import build_empty, resolve_class
from upshift.models.source import ModelSource
from upshift.xla import experts


def skeleton(source: ModelSource, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model in evaluation mode. Weights have addresses and are never touched, so that the system gives
    them no memory. Buffers that no checkpoint holds are computed."""
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


def export(module: nn.Module, example: Mapping[str, Any]) -> ExportedProgram:
    """Export a module. ``example`` holds arguments by name, tensors or nested lists of them. Raise RequestError if a
    branch or a shape depends on data, or if torch cannot trace the module."""
    # The same tensor twice would be one input of the graph.
    distinct = tree_map(torch.Tensor, torch.clone, dict(example))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, (), kwargs=distinct, strict=False)
            table = torch.export.default_decompositions()
            # Decomposed it is a scatter, in whose layout XLA keeps, and copies, all keys and values at every step.
            table.pop(torch.ops.aten.index_copy.default)
            decomposed: ExportedProgram = exported.run_decompositions(table)
            return decomposed
    except Exception as error:  # torch.export raises dozens of kinds; each means: this module has no static graph
        raise RequestError(
            f"{type(module).__name__} has no static graph ({type(error).__name__}: {_first_line(error)}); XLA needs one: run "
            "this model without --backend xla"
        ) from error


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
