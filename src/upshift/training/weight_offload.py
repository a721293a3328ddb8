"""Load a model whose frozen weights are read when they are needed, and choose these modules by a plan's ``weight_offload``."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from upshift.benchmarking.meters import tensor_bytes
from upshift.errors import RequestError
from upshift.loading.load import load_source
from upshift.loading.offload import buffer_bytes, mapped_bytes
from upshift.loading.placed import Where
from upshift.models.build import build_model, find_stacks
from upshift.models.source import ModelSource, find_model
from upshift.planning.plan import Plan
from upshift.settings import read_settings

CONVERTED = "offload"  # the cache's folder of weights that are computed in another dtype than they are stored in


def load_elsewhere(
    source: ModelSource, config: PretrainedConfig, model_class: type[PreTrainedModel], plan: Plan, *, dtype: torch.dtype
) -> PreTrainedModel:
    """Load the model with its frozen weights elsewhere. Raise RequestError for a model without an adapter around it.

    Weights on the disk are never trained.
    """
    if source.adapter is None:
        raise RequestError(f"weight_offload={plan.weight_offload} is for frozen weights; add an adapter, such as --lora-rank 16")
    with torch.device("meta"):
        empty = build_model(config, model_class, dtype=dtype)
    where = Where(device_map(empty, plan), None, read_settings().cache_dir / CONVERTED)
    return load_source(find_model(str(source.directory)), dtype=dtype, model_class=model_class, where=where)


def device_map(model: PreTrainedModel, plan: Plan) -> dict[str, str | int]:
    """Return the place of each module.

    The layers are elsewhere, and so is an embedding on the disk if only rows of it are read. The rest is where it is computed.
    """
    here, elsewhere = ("cpu" if plan.device == "cpu" else 0), ("disk" if plan.weight_offload == "disk" else "cpu")
    found: dict[str, str | int] = {"": here} | dict.fromkeys((path for path, _ in find_stacks(model)), elsewhere)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if elsewhere == "disk" and (head is None or head.weight is not embedding.weight):
        found |= {path: elsewhere for path, module in model.named_modules(remove_duplicate=False) if module is embedding}
    return found


def in_memory_bytes(model: nn.Module, *others: object) -> int:
    """Return ``tensor_bytes`` of a model and others. For weights on the disk only the buffers that they are read into count."""
    return tensor_bytes(model, *others) - mapped_bytes(model) + buffer_bytes(model)
