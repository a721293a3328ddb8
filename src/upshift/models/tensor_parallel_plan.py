# needs torch
"""Describe a model's tensor-parallel plan, and reduce the model to the part that one rank runs.

A plan of transformers names, for each weight, the dimension that is divided (transformers.distributed.tensor_parallel). A
module with one rank's slices computes what the rank computes between two collectives, so it can be measured without other
ranks. The head of a language model stays whole: its output is gathered, and every rank computes the loss over all words.
"""

from __future__ import annotations

import re
from math import gcd

from torch import nn
from transformers import PreTrainedModel

from upshift.internals.transformers_names import TENSOR_PLAN
from upshift.models.config import heads_of
from upshift.models.profile import TensorParallel

# For each style, the dimension of a weight that is divided, from the end. A bias is divided if its weight's rows are.
DIVIDED_DIMENSION = {
    "colwise": -2,
    "packed_colwise": -2,
    "colwise_gather_output": -2,
    "colwise_rep": -2,
    "rowwise": -1,
    "packed_rowwise": -1,
    "rowwise_split_input": -1,
    "rowwise_rep": -1,
    "embedding_rowwise": -2,
    "embedding_colwise": -1,
}
PACKED_STYLES = ("packed_colwise", "packed_rowwise")  # two halves that are divided separately: gates, then their factors
GATHERED_STYLES = ("colwise_gather_output", "colwise_rep")  # every rank gathers the whole output
UNDIVIDED_STYLES = (
    "replicated_with_grad_allreduce",
    "all_reduce",
    "sequence_parallel",
    "moe_tp_experts",
    "moe_identity_expert",
    "replicate",
    "local_params",
)


def declared_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the style for each weight or module that the model's plan names. A name has ``*`` for the number of a layer."""
    return dict(TENSOR_PLAN.read(model) or {})


def describe_tensor_parallel(model: PreTrainedModel) -> TensorParallel | str:
    """Return the parts that the model's plan divides, or why they are unknown. ``model`` may be on the meta device."""
    plan = declared_plan(model)
    unknown = unknown_styles(plan)
    if not plan or set(plan.values()) <= set(GATHERED_STYLES):
        return "the model declares no tensor-parallel plan for its layers"
    if unknown is not None:
        return f"the model's tensor-parallel plan has {unknown}, which no plan of ours predicts"
    divisor = _head_divisor(model)
    layers = 0
    outside = 0
    for name, parameter in model.named_parameters():
        style = _style_of(name, plan)
        dimension = _dimension_of_style(style, parameter)
        if dimension is None:
            continue
        divisor = gcd(divisor, parameter.shape[dimension])
        if re.search(r"\.\d+\.", name):
            layers += parameter.numel()
        else:
            outside += parameter.numel()
    if not layers:
        return "the model's tensor-parallel plan names none of its weights"
    return TensorParallel(divisor=divisor, layers=layers, outside=outside)


def keep_slice(model: PreTrainedModel, degree: int) -> None:
    """Replace each weight that the plan divides, except gathered ones, by an empty tensor of one rank's shape."""
    plan = declared_plan(model)
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            style = _style_of(f"{path}.{name}", plan)
            dimension = _dimension_of_style(style, parameter)
            if dimension is None or style in GATHERED_STYLES:
                continue
            shape = list(parameter.shape)
            shape[dimension] //= degree
            local_weight = parameter.new_empty(shape)
            setattr(module, name, nn.Parameter(local_weight, requires_grad=parameter.requires_grad))
            padding_idx = getattr(module, "padding_idx", None)  # an nn.Embedding has it, and so do classes of models like it
            if isinstance(padding_idx, int) and padding_idx >= shape[0]:
                module.padding_idx = None  # the row is another rank's


def _head_divisor(model: PreTrainedModel) -> int:
    """Return the greatest common divisor of the heads of queries and of keys, or 0 if the config states no heads."""
    config = model.config.get_text_config()
    heads = heads_of(config)
    return 0 if heads is None else gcd(heads.queries, heads.keys)


def divided_dimension(name: str, parameter: nn.Parameter, plan: dict[str, str]) -> tuple[int, bool] | None:
    """Return the dimension of this weight or bias that is divided, and whether it has two halves. Return None if it is whole."""
    style = _style_of(name, plan)
    dimension = _dimension_of_style(style, parameter)
    return None if dimension is None else (dimension, style in PACKED_STYLES and parameter.ndim > 1)


def unknown_styles(plan: dict[str, str]) -> str | None:
    """Return the styles that this module does not know, separated by commas, or None."""
    return ", ".join(sorted({style for style in plan.values() if style not in (*DIVIDED_DIMENSION, *UNDIVIDED_STYLES)})) or None


def _style_of(parameter: str, plan: dict[str, str]) -> str | None:
    name = re.sub(r"\.\d+(?=\.|$)", ".*", parameter)
    for candidate in (name, name.rpartition(".")[0]):
        for plan_name in (candidate, candidate.partition(".")[2]):  # a plan may leave out the base model's prefix
            if plan_name in plan:
                return plan[plan_name]
    return None


def _dimension_of_style(style: str | None, parameter: nn.Parameter) -> int | None:
    """Return the dimension of this weight or bias that is divided, or None if each rank has all of it."""
    if style not in DIVIDED_DIMENSION:
        return None
    dimension = DIVIDED_DIMENSION[style]
    if parameter.ndim == 1:
        return -1 if dimension == -2 else None
    return dimension
