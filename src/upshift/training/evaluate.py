"""Compute the held-out loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from upshift.planning.plan import Plan
from upshift.training.batches.sampler import GlobalBatch
from upshift.training.distributed.fsdp import reshard_weights
from upshift.training.distributed.pipeline_parallel import Pipeline
from upshift.training.preferences.preference_loss import PreferenceLoss, kl_term
from upshift.training.prepare import chunked_loss, compute_loss, sum_log_ratios


def evaluate(model: nn.Module, plan: Plan, batches: Iterable[GlobalBatch], preference: PreferenceLoss | None = None) -> float:
    """Return the mean loss over all label tokens of all ranks, with dropout off. The model is left in training mode.

    Each rank adds up its losses and its labels, and both sums are added over ranks. The ranks of one replica count the same
    labels, or each its own. Ranks that share sequences have a share of the mean. Only the last pipeline stage counts.
    ``preference`` gets the rewards of pairs and of rated answers, and has the KL term of these (``estimate_kl``).
    """
    total = 0.0
    num_labels = 0
    model.train(False)
    try:
        with torch.no_grad():
            if plan.layout.pipeline_parallel > 1:
                total, num_labels = _add_pipeline_losses(model, plan, batches)
            else:
                total, num_labels = _add_losses(model, plan, batches, preference)
    finally:
        model.train()
        reshard_weights(model)
    if plan.num_processes > 1:
        sums = torch.tensor([total, num_labels], dtype=torch.float64, device=plan.device)
        dist.all_reduce(sums)
        total = float(sums[0])
        num_labels = int(sums[1])
    return total / max(num_labels, 1)


def estimate_kl(model: nn.Module, plan: Plan, batches: Iterable[GlobalBatch]) -> torch.Tensor:
    """Return KTO's KL term over all batches of all ranks, so that no batch size changes the held-out loss.

    The model is left in training mode.
    """
    model.train(False)
    try:
        with chunked_loss(model, plan):
            sums = torch.zeros(2, dtype=torch.float64, device=plan.device)
            for batch in batches:
                sums += sum_log_ratios(model, plan, batch.micro_batches)
    finally:
        model.train()
    return kl_term(sums, num_processes=plan.num_processes)


def _add_losses(
    model: nn.Module, plan: Plan, batches: Iterable[GlobalBatch], preference: PreferenceLoss | None
) -> tuple[float, int]:
    total = 0.0
    num_labels = 0
    with chunked_loss(model, plan):
        for micro_batch in (micro_batch for batch in batches for micro_batch in batch.micro_batches):
            if micro_batch.num_label_tokens or plan.layout.exchanges:
                mean = float(compute_loss(model, plan, micro_batch, preference)) * plan.layout.context_parallel
                total += mean * micro_batch.num_label_tokens
                num_labels += micro_batch.num_label_tokens
    return total, num_labels


def _add_pipeline_losses(model: nn.Module, plan: Plan, batches: Iterable[GlobalBatch]) -> tuple[float, int]:
    pipeline = Pipeline(model, plan)
    total = 0.0
    num_labels = 0
    for batch in batches:
        total += float(pipeline.losses(batch.micro_batches)) * plan.layout.context_parallel
        num_labels += sum(micro_batch.num_label_tokens for micro_batch in batch.micro_batches) * pipeline.has_loss
    return total, num_labels
