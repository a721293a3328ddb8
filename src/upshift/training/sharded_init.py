"""Read only a rank's part of a model's files: build and divide the model without weights, then fill the part.

A weight that is stored as it is used, or in another dtype, is sliced in its file, so that no other pages are read. A weight that
is computed from several stored tensors is computed whole, one weight at a time, and then sliced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from upshift.internals.torch_names import APPLY
from upshift.loading.files.checkpoint import find_checkpoint
from upshift.loading.files.tensors import read_tensor
from upshift.loading.fill_model import CPU, Filling
from upshift.loading.key_mapping import Group, map_names
from upshift.models.source import ModelSource
from upshift.planning.plan import Plan
from upshift.training.checkpoint.sharded import Piece, copy_overlap, piece_of, stages_of


@dataclass(frozen=True)
class EmptyModel:
    """A model without weights, and the mapping that fills it from files. Buffers that are not in the files exist already."""

    model: PreTrainedModel
    filling: Filling


def can_read_slices(source: ModelSource, plan: Plan) -> bool:
    """Return whether ranks have parts of a model whose files can be read in slices."""
    layout = plan.layout
    is_divided = layout.gathers or layout.tensor_parallel > 1 or layout.pipeline_parallel > 1
    is_plain = source.adapter is None and source.quantized_from is None and "quantization_config" not in source.config
    return is_divided and is_plain and layout.expert_parallel == 1 and plan.precision != "fp8" and plan.weight_offload == "none"


def build_empty_model(
    source: ModelSource, config: PretrainedConfig, model_class: type[PreTrainedModel], *, dtype: torch.dtype
) -> EmptyModel | None:
    """Return the model without weights, or None if the files lack a weight.

    A missing weight is initialized, and its random numbers depend on the whole model.
    """
    assert source.directory is not None
    checkpoint = find_checkpoint(source.directory)
    config.dtype = dtype
    with ExitStack() as contexts:
        for context in model_class.get_init_context(dtype, False, False, None):
            if not isinstance(context, torch.device):  # buffers are computed, so no device is set for them
                contexts.enter_context(context)
        contexts.enter_context(_parameters_on_meta())
        model = model_class(config)
    model.tie_weights()
    filling = Filling(model, checkpoint.tensors, map_names(model, checkpoint.tensors), dtype=dtype)
    filled = {name for group in filling.names.groups for name in filling.filled_shapes(group)}
    filling._check_shapes()
    tied = dict(model.all_tied_weights_keys)
    missing = [name for name, weight in model.named_parameters() if name not in filled and not _tied_names(name, tied) & filled]
    if missing or filling.names.unexpected:
        return None
    read_generation_config(model, source)
    return EmptyModel(model, filling)


def read_generation_config(model: nn.Module, source: ModelSource) -> None:
    """Give a model that was built from its config the generation options of its files, as from_pretrained does."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate() or source.directory is None:
        return
    if (source.directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.directory)


def _tied_names(name: str, tied: dict[str, str]) -> set[str]:
    """Return the names of the weight and of those that are tied to it."""
    return {other for pair in tied.items() if name in pair for other in pair}


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put new parameters on the meta device while open."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


@torch.no_grad()
def fill_model(model: nn.Module, empty: EmptyModel, plan: Plan) -> None:
    """Fill ``model``, the rank's part of ``empty.model``, with weights from the files."""
    for part in stages_of(model):
        APPLY.of(part)(_materialize_on(plan.device))
    tied = dict(empty.model.all_tied_weights_keys)
    targets = dict[str, list[Tensor]]()
    for part in stages_of(model):  # a stage may have only one of the names of a tied weight
        for name, tensor in (*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)):
            targets.setdefault(tied.get(name, name), []).append(tensor)
    for group in empty.filling.names.groups:
        target_names = {name: tied.get(name, name) for name in empty.filling.filled_shapes(group)}
        local_targets = {name: targets[target] for name, target in target_names.items() if target in targets}
        if local_targets:
            values = _read_values(empty.filling, group)
            for name, tensors in local_targets.items():
                for tensor in tensors:
                    _copy_slice(tensor, values[name])


def _read_values(filling: Filling, group: Group) -> dict[str, Tensor]:
    """Return the whole weights that a group of stored tensors fills, by name."""
    if group.converter is None:
        ((_, stored),) = group.sources
        return {group.target: read_tensor(filling.tensors[stored])}
    return filling.read_group(group, CPU)


def _materialize_on(device: str) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def _copy_slice(target: Tensor, whole: Tensor) -> None:
    local = target.to_local() if isinstance(target, DTensor) else target
    copy_overlap(local, piece_of(target), whole, Piece(shape=tuple(whole.shape)))
