# needs torch
"""Count the experts that compute each token in a mixture of experts.

Configs have no common name for this number (num_experts_per_tok, top_k_experts, moe_topk ...), and routers differ. The matrix
products inside the experts are the same in all models: each token is multiplied with some of the weights that are stacked by
expert. Their FLOPs in a trace therefore give the number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from upshift.models.profile import Experts
from upshift.models.tracing.op_counter import LiveTracker

OUTSIDE = "beside"
TOLERANCE = 1e-6  # how close to a whole number a count must be, as a share of the experts


def count_experts(
    full_model: PreTrainedModel, cut_model: PreTrainedModel, inputs: Callable[[], dict[str, Any]]
) -> Experts | None:
    """Return the experts of ``full_model``, or None if it has none.

    ``cut_model`` has one layer of each kind and runs on ``inputs``."""
    per_token = experts_per_token(cut_model, inputs)
    if not per_token:
        return None
    kinds = {type(cut_model.get_submodule(path)) for path in per_token}
    weights = [weight for module in full_model.modules() if type(module) in kinds for weight in expert_matrices(module)]
    first = next(iter(per_token))
    return Experts(
        count=expert_matrices(cut_model.get_submodule(first))[0].shape[0],
        parameters=sum(weight.numel() for weight in weights),
        per_token=per_token[first],
    )


def experts_per_token(model: PreTrainedModel, inputs: Callable[[], dict[str, Any]]) -> dict[str, int]:
    """Return the number of experts that compute a token, by the path of each module of experts.

    Matrices are experts if each multiplies all features of the module's input. Matrices of heads multiply a part of them.
    ``model`` and the tensors of ``inputs`` are on one device and need no values. Errors of the model are not caught."""
    candidates = {path: module for path, module in model.named_modules() if expert_matrices(module)}
    if not candidates:
        return {}
    handles = []
    widths: dict[str, int] = {}  # features of a module's input

    def enter(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tracker.border(path)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if tensors:
            widths[path] = tensors[0].shape[-1]

    with LiveTracker() as tracker, torch.no_grad():
        for path, module in candidates.items():
            handles.append(module.register_forward_pre_hook(partial(enter, path), with_kwargs=True))
            handles.append(module.register_forward_hook(lambda *_: tracker.border(OUTSIDE)))
        arguments = inputs()
        input_ids = arguments.get("input_ids")
        tracker.border(OUTSIDE)
        try:
            model(**arguments)
        finally:
            for handle in handles:
                handle.remove()
        tracker.border(None)
    if input_ids is None:  # a model of images or sounds: no tokens to count by
        return {}
    tokens = input_ids.numel()
    active = {}
    for path, module in candidates.items():
        flops = sum(interval.matmul_flops for name, interval in tracker.intervals if name == path)
        weights = expert_matrices(module)
        num_experts = weights[0].shape[0]
        experts = flops * num_experts / (2 * tokens * sum(weight.numel() for weight in weights))
        if not any(widths.get(path) in weight.shape[1:] for weight in weights):
            continue  # each matrix multiplies a part of the features, as heads do
        if 1 <= round(experts) <= num_experts and abs(experts - round(experts)) < TOLERANCE * num_experts:
            active[path] = round(experts)
    return active


def expert_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a module, without its submodules, that are matrices stacked by expert.

    A convolution has none: its weights have three dimensions for another reason. A number for each head ([heads, 1, 1]) is no
    matrix."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return []
    stacked = [weight for weight in module.parameters(recurse=False) if weight.ndim == 3 and weight.shape[0] > 1]
    weights = [weight for weight in stacked if weight.numel() > weight.shape[0]]
    return weights if len({weight.shape[0] for weight in weights}) == 1 else []
