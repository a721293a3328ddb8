"""Activation checkpointing of transformers models, switched per layer."""

from __future__ import annotations

import warnings

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from upshift.models.adapter import base_of
from upshift.models.build import find_stacks


def recompute_layers(model: nn.Module, num_layers: int | None) -> None:
    """Recompute the first ``num_layers`` layers in the backward pass (None: all; 0: none).

    The first ones, because theirs is the last backward, when most memory has been freed.
    """
    base = base_of(model)
    _leave_inputs(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.23; 5.17 knows the old name only
        if num_layers != 0:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        elif base.is_gradient_checkpointing:
            base.gradient_checkpointing_disable()
    _leave_inputs(base)
    if num_layers:
        layers = [layer for _, stack in find_stacks(model) for layer in stack]
        for number, layer in enumerate(layers):
            if isinstance(layer, GradientCheckpointingLayer):
                layer.gradient_checkpointing = number < num_layers


def _leave_inputs(base: PreTrainedModel) -> None:
    """Frozen embeddings need no gradient: transformers asks for one because reentrant checkpoints would lose the others."""
    if hasattr(base, "_require_grads_hook"):
        base.disable_input_require_grads()
