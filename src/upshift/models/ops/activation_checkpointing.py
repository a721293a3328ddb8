"""Switch activation checkpointing of transformers models per layer: recompute a layer whole, or all of it but (some of) its
products."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from upshift.internals.torch_names import FLASH_FOR_CPU, FORWARD_HOOKS, OPERATOR
from upshift.internals.transformers_names import INPUT_GRADIENTS
from upshift.models.adapter import base_of
from upshift.models.build import find_stacks
from upshift.models.profile import Granularity
from upshift.models.tracing.op_counter import argument_of

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def recompute_layers(model: nn.Module, num_layers: int | None, granularity: Granularity = "full") -> None:
    """Recompute the first ``num_layers`` layers in the backward pass (None: all; 0: none).

    The first ones, because theirs is the last backward, when most memory has been freed. ``selective``: results of matrix
    products and of attention are kept, cheap operations run again (Korthikanti et al. 2022, section 5, for any operator).
    ``alternate``: of products the first, third and so on of a layer are kept, as torchtitan's selective_ac_option = "op" does.
    Kept results are found again by their number and must not be written over. A layer that writes over them, or whose weights
    serve several layers (cast once in autocast's forward pass, and for each layer when it is made again), raises RuntimeError
    in its backward pass.
    """
    base = base_of(model)
    _leave_inputs(base)
    options: dict[str, Any] = {"use_reentrant": False}
    if granularity == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    elif granularity == "alternate":
        options["context_fn"] = _keep_every_second
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.23; 5.17 knows the old name only
        if num_layers != 0:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        elif base.is_gradient_checkpointing:
            base.gradient_checkpointing_disable()
    _leave_inputs(base)
    if num_layers:
        layers = [layer for _, stack in find_stacks(model) for layer in stack]
        for number, layer in enumerate(layers):
            if isinstance(layer, GradientCheckpointingLayer):
                layer.gradient_checkpointing = number < num_layers


@cache
def _attention_operators() -> tuple[Any, ...]:
    """Return the attention operators that have no formula in torch's registry of FLOPs."""
    return FLASH_FOR_CPU.get(), torch.ops.upshift.block_attention


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether to keep an operator's result.

    Attention with dropout inside runs again: if it were skipped, it would not draw its random numbers, and later operators
    would draw other numbers than in the forward pass."""
    packet = OPERATOR.of(operator)
    product = packet in flop_registry or packet in _attention_operators()
    if product and not argument_of(operator, "dropout_p", args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keep_every_second() -> Any:
    """Return the contexts for one pass through one layer.

    Products of the forward pass and of recomputation are counted separately."""
    seen: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if OPERATOR.of(operator) in PRODUCTS:
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _keep_products(context, operator, *args, **kwargs)

    return create_selective_checkpoint_contexts(policy)


def _leave_inputs(base: PreTrainedModel) -> None:
    """Remove transformers' hooks that ask for gradients of frozen embeddings.

    The embeddings need none: transformers asks for one because reentrant checkpoints would lose the others."""
    if INPUT_GRADIENTS.read(base) is not None:
        base.disable_input_require_grads()
    # Asked twice, as by peft.prepare_model_for_kbit_training, transformers forgets the hooks that it made first.
    for hooks in [FORWARD_HOOKS.of(module) for module in base.modules() if FORWARD_HOOKS.of(module)]:
        for key in [key for key, hook in hooks.items() if getattr(hook, "__name__", "") == "make_inputs_require_grads"]:
            del hooks[key]
