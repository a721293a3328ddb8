"""Compute the held-out loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from upshift.planning.plan import Plan
from upshift.training.batches.collate import MicroBatch
from upshift.training.batches.sampler import GlobalBatch
from upshift.training.distributed.fsdp import reshard_weights
from upshift.training.distributed.pipeline_parallel import Pipeline
from upshift.training.forward_passes import ForwardPasses
from upshift.training.loop.events import FailedPass
from upshift.training.preferences.preference_loss import PreferenceLoss, kl_term
from upshift.training.prepare import chunked_loss, compute_loss, sum_log_ratios


def evaluate(passes: ForwardPasses, batches: Iterable[GlobalBatch], preference: PreferenceLoss | None = None) -> float:
    """Return the mean loss over all label tokens of all ranks, with dropout off. The model is left in training mode.

    Each rank adds up its losses and its labels, and both sums are added over ranks. The ranks of one replica count the same
    labels, or each its own. Ranks that share sequences have a share of the mean. Only the last pipeline stage counts.
    ``preference`` gets the rewards of pairs and of rated answers, and has the KL term of these (``estimate_held_out_kl``).
    """
    model, plan = passes.model, passes.plan
    model.train(False)
    try:
        with torch.no_grad():
            if plan.layout.pipeline_parallel > 1:
                total, num_labels = _add_pipeline_losses(model, plan, batches)
            else:
                total, num_labels = _add_losses(passes, batches, preference or PreferenceLoss())
    finally:
        model.train()
        reshard_weights(model)
    if plan.num_processes > 1:
        sums = torch.tensor([total, num_labels], dtype=torch.float64, device=plan.device)
        dist.all_reduce(sums)
        total = float(sums[0])
        num_labels = int(sums[1])
    return total / max(num_labels, 1)


def estimate_held_out_kl(passes: ForwardPasses, batches: Iterable[GlobalBatch]) -> torch.Tensor:
    """Return KTO's KL term over all batches, so that no batch size changes the held-out loss.

    The model is left in training mode.
    """
    passes.model.train(False)
    try:
        with chunked_loss(passes.model, passes.plan):
            return estimate_kl(passes, batches, of="evaluation")
    finally:
        passes.model.train()


def estimate_kl(passes: ForwardPasses, batches: Iterable[GlobalBatch], *, of: FailedPass) -> torch.Tensor:
    """Return KTO's KL term over global batches of all ranks, so that no division into micro-batches changes the loss."""
    model, plan = passes.model, passes.plan
    sums = torch.zeros(2, dtype=torch.float64, device=plan.device)
    for batch in batches:
        for part in passes.run(batch.micro_batches, lambda micro_batch: sum_log_ratios(model, plan, micro_batch), of=of):
            sums += part
    return kl_term(sums, num_processes=plan.num_processes)


def _add_losses(passes: ForwardPasses, batches: Iterable[GlobalBatch], preference: PreferenceLoss) -> tuple[float, int]:
    model, plan = passes.model, passes.plan
    total = 0.0
    num_labels = 0

    def compute(micro_batch: MicroBatch) -> tuple[float, int]:
        mean = float(compute_loss(model, plan, micro_batch, preference)) * plan.layout.context_parallel
        return mean * micro_batch.num_label_tokens, micro_batch.num_label_tokens

    with chunked_loss(model, plan):
        for batch in batches:
            for loss, labels in passes.run(batch.micro_batches, compute, of="evaluation", begin=preference.start_from_here()):
                total += loss
                num_labels += labels
    return total, num_labels


def _add_pipeline_losses(model: nn.Module, plan: Plan, batches: Iterable[GlobalBatch]) -> tuple[float, int]:
    pipeline = Pipeline(model, plan)
    total = 0.0
    num_labels = 0
    for batch in batches:
        total += float(pipeline.losses(batch.micro_batches)) * plan.layout.context_parallel
        num_labels += sum(micro_batch.num_label_tokens for micro_batch in batch.micro_batches) * pipeline.has_loss
    return total, num_labels
