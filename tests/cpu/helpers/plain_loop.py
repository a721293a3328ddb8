"""A loop of PyTorch alone, whose losses those of a run are compared with."""

from __future__ import annotations

from typing import Any

import torch


def plain_losses(model: Any, inputs: Any, *, steps: int, rate: float) -> list[float]:
    """Return the losses of steps on the same batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
