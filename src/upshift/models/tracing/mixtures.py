# needs torch
"""Trace mixtures of experts: count the experts that compute each token, and answer what a model's code asks about the routing.

Configs have no common name for the number of experts (num_experts_per_tok, top_k_experts, moe_topk ...), and routers differ. The
matrix products inside the experts are the same in all models: each token is multiplied with some of the weights that are stacked
by expert. Their FLOPs in a trace therefore give the number.

Most mixtures multiply all experts at once, and the sizes of their tensors do not depend on the routing, which a trace without
numbers does not have. Others ask which experts have tokens (``hits.nonzero()``), and which tokens an expert has
(``torch.where(mask)``), or read how many tokens each expert has (``counts.tolist()`` after ``topk``). A trace then sends all
tokens to the first expert, and none to the others, which run all the same. The sums over the experts are exact: products, saved
activations, and a gradient for each weight. Memory that is free again after each expert is that of the most uneven batch. Some
routers also convert their own weights to fp32 while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from upshift.internals.torch_names import FAKE_TENSOR, PARAMETERS, is_fake
from upshift.models.profile import Experts
from upshift.models.tracing.op_counter import LiveTracker

TO = nn.Module.to
WHERE = torch.where
OUTSIDE = "beside"
TOLERANCE = 1e-6  # how close to a whole number a count must be, as a share of the experts


def sum_experts(full_model: nn.Module, cut_model: nn.Module, per_token: dict[str, int]) -> Experts:
    """Return the experts of ``full_model``. ``cut_model`` has one layer of each kind; ``per_token`` is of its modules."""
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


class _Routing:
    """Answer the questions of one mixture's loop after the other, for fake tensors. Real tensors have their own answers."""

    def __init__(self, fake_tensor_class: Any) -> None:
        self._topk = fake_tensor_class.topk
        self._nonzero = fake_tensor_class.nonzero
        self._tolist = fake_tensor_class.tolist
        self._num_routed = 0  # pairs of a token and an expert, as the last topk chose them
        self._num_scored = 0  # experts from which it chose
        self._num_experts = 0  # experts of the loop that runs
        self._num_waiting = 0  # those that have not asked for their tokens yet

    def topk(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self._topk(tensor, *args, **kwargs)
        self._num_routed = result[1].numel()
        self._num_scored = tensor.shape[-1]
        return result

    def nonzero(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return all experts, as rows of numbers: no fake tensor has a number to name an expert by."""
        if args or kwargs or tensor.ndim != 1 or tensor.dtype != torch.bool:
            return self._nonzero(tensor, *args, **kwargs)
        self._num_experts = len(tensor)
        self._num_waiting = len(tensor)
        return [[expert] for expert in range(len(tensor))]

    def where(self, condition: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the indices of all elements of the mask for the first expert, and no indices for the others.

        A mask that no expert asks about stays unknown, and the model cannot be traced."""
        if args or kwargs or not self._num_waiting or not is_fake(condition):
            return WHERE(condition, *args, **kwargs)
        num_tokens = condition.numel() if self._num_waiting == self._num_experts else 0
        self._num_waiting -= 1
        return tuple(condition.new_empty(num_tokens, dtype=torch.int64) for _ in range(condition.ndim))

    def tolist(self, tensor: torch.Tensor) -> Any:
        """Return the number of tokens of each expert.

        Other numbers than one for each expert of the last topk stay unknown, and the model cannot be traced."""
        if tensor.shape != (self._num_scored,) or tensor.is_floating_point() or not self._num_routed:
            return self._plain_list(tensor)
        return [self._num_routed, *[0] * (len(tensor) - 1)]

    def _plain_list(self, tensor: torch.Tensor) -> Any:
        """Return what torch answers. It asks for each row of a tensor, and a row may be as long as there are experts."""
        return [self._plain_list(row) for row in tensor] if tensor.ndim > 1 else self._tolist(tensor)


@contextmanager
def all_tokens_to_one_expert() -> Iterator[None]:
    """Answer what mixtures ask about the routing of fake tensors, while the context is open."""
    fake_tensor_class = FAKE_TENSOR.get()
    routing = _Routing(fake_tensor_class)
    with ExitStack() as patches:
        for name in ("topk", "nonzero", "tolist"):
            answer = getattr(routing, name)
            patches.enter_context(mock.patch.object(fake_tensor_class, name, partialmethod(_ask, answer)))
        patches.enter_context(mock.patch.object(torch, "where", routing.where))
        patches.enter_context(mock.patch.object(nn.Module, "to", _convert))
        yield


def _ask(tensor: torch.Tensor, answer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return answer(tensor, *args, **kwargs)


def _convert(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Convert a module as ``module.to`` does. PyTorch cannot convert fake weights that a graph or a hook holds."""
    is_dtype_alone = len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs
    if not is_dtype_alone or not all(is_fake(weight) for weight in module.parameters()):
        return TO(module, *args, **kwargs)
    for part in module.modules():
        weights = PARAMETERS.of(part)
        for name, weight in weights.items():
            if weight is not None and weight.is_floating_point() and weight.dtype != args[0]:
                weights[name] = nn.Parameter(torch.empty_like(weight, dtype=args[0]), requires_grad=weight.requires_grad)
    return module
