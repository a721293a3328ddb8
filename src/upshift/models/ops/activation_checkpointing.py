# needs torch
"""Switch activation checkpointing of transformers models for each layer, with full or selective recomputation."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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

    The first layers are chosen because their backward pass comes last, when most memory has been freed.

    - ``full`` recomputes the whole layer.
    - ``selective`` saves the results of matrix products and of attention, and recomputes the rest (Korthikanti et al. 2022,
      section 5, for any operator).
    - ``alternate`` saves attention and every second matrix product of a layer, as torchtitan's selective_ac_option = "op".

    Saved results are matched by their order and must not change. The backward pass raises RuntimeError for a layer that writes
    over them, and for weights that several layers share: autocast casts them once in the forward pass, but once for each layer
    in recomputation.
    """
    base = base_of(model)
    _remove_input_gradient_hooks(base)
    options: dict[str, Any] = {"use_reentrant": False}
    if granularity == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _save_products)
    elif granularity == "alternate":
        options["context_fn"] = _save_every_second_product
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.23; 5.17 has the old name only
        if num_layers != 0:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        elif base.is_gradient_checkpointing:
            base.gradient_checkpointing_disable()
    _remove_input_gradient_hooks(base)
    if num_layers:
        layers = [layer for _, layers_of_stack in find_stacks(model) for layer in layers_of_stack]
        for number, layer in enumerate(layers):
            if isinstance(layer, GradientCheckpointingLayer):
                layer.gradient_checkpointing = number < num_layers


@contextmanager
def restored_checkpointing(model: nn.Module) -> Iterator[None]:
    """Restore on leaving which modules recompute their activations and how, and gradients of frozen embeddings."""

    def settings_of(module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if "gradient_checkpointing" in name}

    settings = [(module, settings_of(module)) for module in model.modules()]
    base = base_of(model)
    requests_input_gradients = INPUT_GRADIENTS.read(base) is not None
    try:
        yield
    finally:
        for module, previous in settings:
            for name in settings_of(module).keys() - previous.keys():
                delattr(module, name)
            for name, value in previous.items():
                setattr(module, name, value)
        if requests_input_gradients and INPUT_GRADIENTS.read(base) is None:
            base.enable_input_require_grads()


@cache
def _attention_operators() -> tuple[Any, ...]:
    """Return the attention operators that have no formula in torch's registry of FLOPs."""
    return FLASH_FOR_CPU.get(), torch.ops.upshift.block_attention


def _save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether to save an operator's result.

    Attention with dropout is recomputed. If it were skipped, it would not draw its random numbers, and later operators would
    draw other numbers than in the forward pass."""
    packet = OPERATOR.of(operator)
    is_product = packet in flop_registry or packet in _attention_operators()
    if is_product and not argument_of(operator, "dropout_p", args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _save_every_second_product() -> Any:
    """Return the contexts of forward and recomputation for one pass through one layer.

    The products of forward and recomputation are counted separately."""
    num_products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if OPERATOR.of(operator) in PRODUCTS:
            num_products[context.is_recompute] += 1
            if num_products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _save_products(context, operator, *args, **kwargs)

    return create_selective_checkpoint_contexts(policy)


def _remove_input_gradient_hooks(base: PreTrainedModel) -> None:
    """Remove transformers' hooks that request gradients for frozen embeddings.

    Only reentrant checkpoints need such a gradient, to keep the gradients of the layers behind."""
    if INPUT_GRADIENTS.read(base) is not None:
        base.disable_input_require_grads()
    # If the hooks are requested twice, as by peft.prepare_model_for_kbit_training, transformers loses track of the first ones.
    for module in base.modules():
        hooks = FORWARD_HOOKS.of(module)
        for key in [key for key, hook in hooks.items() if getattr(hook, "__name__", "") == "make_inputs_require_grads"]:
            del hooks[key]
