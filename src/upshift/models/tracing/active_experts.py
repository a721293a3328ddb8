"""Count how many of a mixture's experts a token meets, by the products that run inside the experts when the model is traced.

Configs have no common name for this number (num_experts_per_tok, top_k_experts, moe_topk ...), and routers differ. The
products are the same in all models: each token is multiplied with some of the weights that are stacked by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from upshift.models.profile import Experts
from upshift.models.tracing.op_counter import LiveTracker

REST = "beside"
CLOSE = 1e-6  # how close to a whole number a count must be, as a share of the experts


def count_experts(whole: PreTrainedModel, cut: PreTrainedModel, inputs: Callable[[], dict[str, Any]]) -> Experts | None:
    """Return the experts of ``whole``, or None if there are none. ``cut`` has a layer of each kind and runs on ``inputs``."""
    met = experts_met(cut, inputs)
    if not met:
        return None
    kinds = {type(cut.get_submodule(path)) for path in met}
    weights = [weight for module in whole.modules() if type(module) in kinds for weight in stacked(module)]
    first = next(iter(met))
    return Experts(
        count=stacked(cut.get_submodule(first))[0].shape[0],
        parameters=sum(weight.numel() for weight in weights),
        per_token=met[first],
    )


def experts_met(model: PreTrainedModel, inputs: Callable[[], dict[str, Any]]) -> dict[str, int]:
    """Return, by the path of each module of experts, how many of them a token meets. Errors of the model are not caught.

    ``model`` and ``inputs``: on one device, without numbers."""
    candidates = {path: module for path, module in model.named_modules() if stacked(module)}
    if not candidates:
        return {}
    handles = []
    with LiveTracker() as tracker, torch.no_grad():
        for path, module in candidates.items():
            handles.append(module.register_forward_pre_hook(lambda *_, name=path: tracker.border(name)))
            handles.append(module.register_forward_hook(lambda *_: tracker.border(REST)))
        given = inputs()
        tokens = given["input_ids"].numel()
        tracker.border(REST)
        try:
            model(**given)
        finally:
            for handle in handles:
                handle.remove()
        tracker.border(None)
    met = {}
    for path, module in candidates.items():
        flops = sum(interval.matmul_flops for name, interval in tracker.intervals if name == path)
        weights = stacked(module)
        number = weights[0].shape[0]
        per_token = flops * number / (2 * tokens * sum(weight.numel() for weight in weights))
        if 1 <= round(per_token) <= number and abs(per_token - round(per_token)) < CLOSE * number:
            met[path] = round(per_token)
    return met


def stacked(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's own weights that are matrices stacked by expert. A convolution's weights are stacked otherwise."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return []
    weights = [weight for weight in module.parameters(recurse=False) if weight.ndim == 3 and weight.shape[0] > 1]
    return weights if len({weight.shape[0] for weight in weights}) == 1 else []
