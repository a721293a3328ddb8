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
from upshift.models.build import building, find_architecture, find_stacks
from upshift.models.config import heads_of, positions_in
from upshift.models.profile import Declares, Parameters, ParameterShape
from upshift.models.quantized import num_weights, stored_bytes, weight_shape
from upshift.models.source import ModelSource

NEEDS_NUMBERS = ("DataDependentOutputException", "DynamicOutputShapeException")  # torch's errors for tensors without numbers


def attention_kernels(model: PreTrainedModel) -> tuple[str, ...]:
    return tuple(
        name
        for name, flag in (
            ("sdpa", "_supports_sdpa"),
            ("block", "_supports_sdpa"),
            ("eager", None),
            ("flash_attention_2", "_supports_flash_attn"),
            ("flash_attention_3", "_supports_flash_attn"),
            ("flex_attention", "_supports_flex_attn"),
        )
        if flag is None or getattr(model, flag, False) and not (name == "flex_attention" and _drops_attention(model))
    )


def _drops_attention(model: PreTrainedModel) -> bool:
    """Return whether the model drops attention in training, which transformers' flex_attention refuses."""
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
    """Count the parameters of the whole model by part. Tied parameters count once. The model may be on the meta device.

    ``always_fp32``: the number of trainable parameters that are fp32 where the others are bf16.
    """
    named = dict(model.named_parameters())
    base = base_of(model)
    embedding = _input_embeddings(base)
    head = base.get_output_embeddings()
    embedding_ids = {id(p) for p in embedding.parameters()} if embedding is not None else set()
    head_ids = {id(p) for p in head.parameters()} if head is not None else set()
    paths = tuple(path + "." for path in stack_paths)
    parts = {"embedding": 0, "layers": 0, "head": 0, "other": 0}
    trainable = {"layers": 0, "head": 0, "outside": 0}
    shapes: Counter[tuple[int, ...]] = Counter()
    frozen_shapes: Counter[tuple[int, ...]] = Counter()
    for name, parameter in named.items():
        part = (
            "layers"
            if name.startswith(paths)
            else "embedding"
            if id(parameter) in embedding_ids
            else "head"
            if id(parameter) in head_ids
            else "other"
        )
        parts[part] += num_weights(parameter)
        if parameter.requires_grad:
            in_head = id(parameter) in head_ids
            trainable["layers" if part == "layers" else "head" if in_head else "outside"] += parameter.numel()
            shapes[tuple(parameter.shape)] += 1
        else:
            frozen_shapes[weight_shape(parameter)] += 1
    frozen = [parameter for parameter in named.values() if not parameter.requires_grad]
    packed = [parameter for parameter in frozen if hasattr(parameter, "quant_state")]
    return Parameters(
        total=sum(parts.values()),
        quantized=sum(num_weights(parameter) for parameter in packed),
        quantized_bytes=sum(stored_bytes(parameter) for parameter in packed),
        always_bf16=sum(parameter.numel() for parameter in frozen if parameter.dtype == torch.bfloat16),
        **parts,
        buffers_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        tied=bool(embedding_ids & head_ids),
        trainable=sum(trainable.values()),
        trainable_layers=trainable["layers"],
        trainable_head=trainable["head"],
        always_fp32=always_fp32,
        trainable_shapes=tuple(ParameterShape(shape=shape, count=count) for shape, count in sorted(shapes.items())),
        looked_up=looked_up(model),
        frozen_shapes=tuple(ParameterShape(shape=shape, count=count) for shape, count in sorted(frozen_shapes.items())),
    )


def looked_up(model: nn.Module) -> tuple[ParameterShape, ...]:
    """Return the shapes of all trainable embedding tables that no other module computes a product with."""
    tables: dict[int, nn.Parameter] = {}
    multiplied: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                tables[id(parameter)] = parameter
            else:
                multiplied.add(id(parameter))
    alone = [table for key, table in tables.items() if key not in multiplied and table.requires_grad]
    counts = Counter(tuple(table.shape) for table in alone)
    return tuple(ParameterShape(shape=shape, count=count) for shape, count in sorted(counts.items()))


def declarations(model: PreTrainedModel) -> Declares:
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


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the most tokens that the model has positions for, in each of its parts, or None if it sets no limit."""
    limit = positions_in(model.config.get_text_config())
    if limit is None:
        return None
    tokens = _input_embeddings(model)
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or module is tokens or module.num_embeddings != limit:
            continue
        if module.padding_idx is not None:
            return limit - module.padding_idx - 1  # the positions of real tokens start behind that of padding
    return limit


def empty_positions(source: ModelSource) -> int | None:
    """Return ``max_positions`` of a model that is built without numbers. Raise RequestError if it cannot be built."""
    config = source.hf_config
    model_class = find_architecture(config, source.reference).model_class
    with building(repr(source.reference)), torch.device("meta"):
        return max_positions(model_class(config))


def why_untraceable(source: ModelSource, error: BaseException) -> str:
    """Return a message that names the innermost module of transformers (or of torch) that the traceback went through."""
    where = "its forward"
    frame = error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            where = f"{type(owner).__name__} ({frame.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.tb_lineno})"
        frame = frame.tb_next
    if type(error).__name__ in NEEDS_NUMBERS:
        return (
            f"{source.reference!r} cannot be traced: {where} looks at the numbers in its tensors, and a trace without weights "
            f"has none; use transformers.Trainer, or report this architecture (transformers {transformers.__version__})"
        )
    reason = " ".join(str(error).split())[:240]
    return (
        f"{source.reference!r} cannot be traced: {where} does not run on sample inputs ({reason}); check the config's sizes, use "
        f"transformers.Trainer, or report this architecture (transformers {transformers.__version__})"
    )
