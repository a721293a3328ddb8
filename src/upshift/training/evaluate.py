"""Held-out loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from upshift.planning.plan import Plan
from upshift.training.batches.source import GlobalBatch
from upshift.training.parallel.fully_shard import let_go
from upshift.training.prepare import computing, extra_inputs, loss_of


def evaluate(model: PreTrainedModel, plan: Plan, batches: Iterable[GlobalBatch]) -> float:
    """Mean loss over all label tokens of all ranks, dropout off; the model is left in training mode. Ranks of one replica count
    the same labels, or each its own, and so does their sum."""
    extra = extra_inputs(model)
    total, num_labels = 0.0, 0
    model.train(False)
    try:
        with torch.no_grad(), computing(model, plan):
            for micro_batch in (m for batch in batches for m in batch.micro_batches):
                if micro_batch.num_label_tokens or plan.layout.exchanges:
                    total += float(loss_of(model, plan, micro_batch, extra)) * micro_batch.num_label_tokens
                    num_labels += micro_batch.num_label_tokens
    finally:
        model.train()
        let_go(model)
    if plan.num_processes > 1:
        sums = torch.tensor([total, num_labels], dtype=torch.float64, device=plan.device)
        dist.all_reduce(sums)
        total, num_labels = float(sums[0]), int(sums[1])
    return total / max(num_labels, 1)
