# needs torch
"""Describe a model: parameters by part, sharding plans, kernels, position limit, and the module in which tracing failed."""

from __future__ import annotations

from collections import Counter

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from upshift.internals.transformers_names import NO_SPLIT, TENSOR_PLAN
from upshift.models.adapter import base_of
from upshift.models.build import explain_build_errors, find_architecture, find_stacks
from upshift.models.config import heads_of, positions_in, text_configs
from upshift.models.profile import CachedLayers, Declares, Parameters, ParameterShape
from upshift.models.quantized import num_weights, stored_bytes, weight_shape
from upshift.models.source import ModelSource
from upshift.text import one_line

VALUE_ERRORS = ("DataDependentOutputException", "DynamicOutputShapeException")  # torch's errors for tensors without values


def attention_kernels(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the attention kernels that the model's class supports."""
    return tuple(
        name
        for name, support_flag in (
            ("sdpa", "_supports_sdpa"),
            ("block", "_supports_sdpa"),
            ("eager", None),
            ("flash_attention_2", "_supports_flash_attn"),
            ("flash_attention_3", "_supports_flash_attn"),
            ("flex_attention", "_supports_flex_attn"),
        )
        if support_flag is None
        or getattr(model, support_flag, False)
        and not (name == "flex_attention" and _has_attention_dropout(model))
    )


def _has_attention_dropout(model: PreTrainedModel) -> bool:
    """Return whether the model uses attention dropout in training, which transformers' flex_attention does not support."""
    settings = vars(model.config.get_text_config())
    return any(
        "drop" in name and ("attn" in name or "attention" in name) and isinstance(value, float) and value > 0
        for name, value in settings.items()
    )


def _input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # the model has none, or several: CLIP
        return None


def count_parameters(model: nn.Module, stack_paths: tuple[str, ...], *, always_fp32: int) -> Parameters:
    """Count the parameters of the full model by part. Tied parameters count once. The model may be on the meta device.

    ``always_fp32``: the number of trainable parameters that stay fp32 if the others are bf16.
    """
    named_parameters = dict(model.named_parameters())
    base = base_of(model)
    embedding = _input_embeddings(base)
    head = base.get_output_embeddings()
    embedding_ids = {id(p) for p in embedding.parameters()} if embedding is not None else set()
    head_ids = {id(p) for p in head.parameters()} if head is not None else set()
    paths = tuple(path + "." for path in stack_paths)
    count_by_part = {"embedding": 0, "layers": 0, "head": 0, "other": 0}
    trainable = {"layers": 0, "head": 0, "outside": 0}
    shapes: Counter[tuple[int, ...]] = Counter()
    frozen_shapes: Counter[tuple[int, ...]] = Counter()
    for name, parameter in named_parameters.items():
        is_in_layers = name.startswith(paths)
        is_in_head = id(parameter) in head_ids
        if is_in_layers:
            part = "layers"
        elif id(parameter) in embedding_ids:
            part = "embedding"
        else:
            part = "head" if is_in_head else "other"
        count_by_part[part] += num_weights(parameter)
        if parameter.requires_grad:
            trained_part = "layers" if is_in_layers else "head" if is_in_head else "outside"
            trainable[trained_part] += parameter.numel()
            shapes[tuple(parameter.shape)] += 1
        else:
            frozen_shapes[weight_shape(parameter)] += 1
    frozen = [parameter for parameter in named_parameters.values() if not parameter.requires_grad]
    packed_weights = [parameter for parameter in frozen if hasattr(parameter, "quant_state")]
    return Parameters(
        total=sum(count_by_part.values()),
        quantized=sum(num_weights(parameter) for parameter in packed_weights),
        quantized_bytes=sum(stored_bytes(parameter) for parameter in packed_weights),
        always_bf16=sum(parameter.numel() for parameter in frozen if parameter.dtype == torch.bfloat16),
        **count_by_part,
        buffers_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        tied=bool(embedding_ids & head_ids),
        trainable=sum(trainable.values()),
        trainable_layers=trainable["layers"],
        trainable_head=trainable["head"],
        always_fp32=always_fp32,
        trainable_bf16=sum(p.numel() for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16),
        trainable_shapes=tuple(ParameterShape(shape=shape, count=count) for shape, count in sorted(shapes.items())),
        looked_up=lookup_table_shapes(model),
        frozen_shapes=tuple(ParameterShape(shape=shape, count=count) for shape, count in sorted(frozen_shapes.items())),
    )


def lookup_table_shapes(model: nn.Module) -> tuple[ParameterShape, ...]:
    """Return the shapes of the trainable embedding tables that no other module uses in a matrix product."""
    tables: dict[int, nn.Parameter] = {}
    used_elsewhere: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                tables[id(parameter)] = parameter
            else:
                used_elsewhere.add(id(parameter))
    lookup_tables = [table for key, table in tables.items() if key not in used_elsewhere and table.requires_grad]
    counts = Counter(tuple(table.shape) for table in lookup_tables)
    return tuple(ParameterShape(shape=shape, count=count) for shape, count in sorted(counts.items()))


def declarations(model: PreTrainedModel) -> Declares:
    """Return the abilities that the model's class and config declare."""
    return Declares(
        tensor_parallel_plan=dict(TENSOR_PLAN.read(model) or getattr(model.config, "base_model_tp_plan", None) or {}),
        pipeline_parallel_plan=tuple(getattr(model.config, "base_model_pp_plan", None) or ()),
        expert_parallel=bool(getattr(model.config.get_text_config(), "base_model_ep_plan", None)),
        no_split_modules=tuple(sorted(NO_SPLIT.of(model) or ())),
        attention_kernels=attention_kernels(model),
        gradient_checkpointing=bool(model.supports_gradient_checkpointing),
        gradient_checkpointing_per_layer=all(
            isinstance(layer, GradientCheckpointingLayer) for _, stack in find_stacks(model) for layer in stack
        ),
        can_generate=bool(model.can_generate()),
    )


def attention_heads(model: PreTrainedModel) -> tuple[int, int] | None:
    """Return the number of heads of queries and of keys, or None if the config states none."""
    heads = heads_of(model.config.get_text_config())
    return None if heads is None else (heads.queries, heads.keys)


def heads_in_cache(heads: tuple[int, int] | None, cache: tuple[CachedLayers, ...]) -> tuple[int, int] | None:
    """Return the heads of queries and of keys. Configs have several fields for shared keys (``multi_query``), the cache one
    shape. Without a cache, the config's numbers are left."""
    key_heads = [layers.heads for layers in cache if layers.per_token]
    return (heads[0], min(key_heads)) if heads is not None and key_heads else heads


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the most tokens that each part of the model has positions for, or None if it sets no limit."""
    limits = [_token_positions(model, limit) for text in text_configs(model.config) if (limit := positions_in(text)) is not None]
    return min(limits, default=None)


def _token_positions(model: PreTrainedModel, limit: int) -> int:
    """Return how many of ``limit`` positions are for tokens: a table may keep some for padding."""
    token_embedding = _input_embeddings(model)
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or module is token_embedding or module.num_embeddings != limit:
            continue
        if module.padding_idx is not None:
            return limit - module.padding_idx - 1  # the positions of real tokens follow that of padding
    return limit


def source_max_positions(source: ModelSource) -> int | None:
    """Build the source's model without values, and return its ``max_positions``. Raise RequestError if it cannot be built."""
    config = source.hf_config
    model_class = find_architecture(config, source.reference).model_class
    with explain_build_errors(repr(source.reference)), torch.device("meta"):
        return max_positions(model_class(config))


def why_untraceable(source: ModelSource, error: BaseException) -> str:
    """Return a message that names the innermost module in the error's traceback."""
    location = "its forward"
    conversions = {method.__code__ for method in (nn.Module.to, nn.Module.float, nn.Module.half, nn.Module.bfloat16)}
    frame = error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if frame.tb_frame.f_code in conversions and location != "its forward":
            return (
                f"{source.reference!r} cannot be traced: {location} converts its own weights while it runs, which a trace "
                "without weights cannot follow; use transformers.Trainer, or report this architecture (transformers "
                f"{transformers.__version__})"
            )
        if isinstance(owner, nn.Module):
            location = f"{type(owner).__name__} ({frame.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.tb_lineno})"
        frame = frame.tb_next
    if type(error).__name__ in VALUE_ERRORS:
        return (
            f"{source.reference!r} cannot be traced: {location} looks at the numbers in its tensors, and a trace without weights "
            f"has none; use transformers.Trainer, or report this architecture (transformers {transformers.__version__})"
        )
    reason = one_line(error, limit=240)
    return (
        f"{source.reference!r} cannot be traced: {location} does not run on sample inputs ({reason}); check the config's sizes, "
        f"use transformers.Trainer, or report this architecture (transformers {transformers.__version__})"
    )
