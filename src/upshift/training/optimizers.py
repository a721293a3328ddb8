"""Builds the plan's optimizer and the user's learning-rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from upshift.errors import MissingExtra
from upshift.planning.plan import Plan
from upshift.training.arguments import Arguments


def build_optimizer(model: nn.Module, plan: Plan, arguments: Arguments) -> torch.optim.Optimizer:
    """AdamW as transformers.Trainer builds it: no weight decay on biases and norms (vectors)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": arguments.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adam: dict[str, Any] = {
        "lr": arguments.learning_rate,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
    }
    if plan.optim == "adamw_torch_fused":
        return torch.optim.AdamW(groups, fused=True, **adam)
    if plan.optim == "adamw_torch":
        return torch.optim.AdamW(groups, foreach=True, **adam)
    if plan.optim == "adafactor":
        return torch.optim.Adafactor(groups, lr=arguments.learning_rate, foreach=False)
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise MissingExtra(library="torchao", extra="quant", purpose="optim=adamw_torch_8bit") from None
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, **adam)
    return optimizer


def build_schedule(optimizer: torch.optim.Optimizer, arguments: Arguments) -> Any:
    return get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.warmup_steps,
        num_training_steps=arguments.max_steps,
    )
