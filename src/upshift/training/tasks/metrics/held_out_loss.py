"""Add up the losses of the held-out batches, and return their mean: that of one batch of all their rows.

A loss of boxes, or of the parts of an image, divides by the boxes or masks of its batch. Its classes have another divisor than
its boxes, so that no weight of a batch makes the sum that of one batch. Such a loss counts once for each row of its batch, and
depends on the size of the batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator

from upshift.errors import JobFailed
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.tasks.metrics.task_metrics import BatchLoss


class HeldOutLoss:
    """The sum of the losses of some batches, each times the number of labels or rows of which it is the mean.

    transformers gives each batch the weight of a full one, also the last one, and one without labels."""

    def __init__(self, label_name: str, batch_loss: BatchLoss, accelerator: Accelerator) -> None:
        self._label_name = label_name
        self._batch_loss = batch_loss
        self._accelerator = accelerator
        self._sums = torch.zeros(2, dtype=torch.float64)

    def add(self, loss: torch.Tensor, inputs: Mapping[str, Any]) -> None:
        """Add the loss [] of a batch. ``inputs``: those of the model, without a row that counts on another rank."""
        labels = inputs[self._label_name]
        is_of_labels = self._batch_loss == "mean over labels"
        number = int((labels != IGNORED).sum()) if is_of_labels else len(labels)
        if number:
            times = 1 if self._batch_loss == "sum over rows" else number
            self._sums += torch.tensor([float(loss) * times, number], dtype=torch.float64)

    def own_rows(self, inputs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the inputs without the rows that a rank has only so that all ranks have as many, or None if no row is its own.

        The other ranks' rows come last. Only their labels are taken off where a loss is a mean over labels, because other inputs
        of a chat have no entry for each row."""
        labels = inputs[self._label_name]
        num_rows = len(labels)
        loader = self._accelerator.gradient_state
        if self._accelerator.num_processes == 1 or not loader.end_of_dataloader or loader.remainder <= 0:
            return inputs
        num_own = min(max(loader.remainder - self._accelerator.process_index * num_rows, 0), num_rows)
        if num_own == num_rows:
            return inputs
        if num_own == 0:
            return None
        if self._batch_loss == "mean over labels":
            return {**inputs, self._label_name: torch.cat([labels[:num_own], torch.full_like(labels[num_own:], IGNORED)])}
        has_rows = {name: hasattr(value, "__len__") and len(value) == num_rows for name, value in inputs.items()}
        return {name: value[:num_own] if has_rows[name] else value for name, value in inputs.items()}

    def mean(self) -> float:
        """Return the mean of the batches of all ranks. Raise JobFailed if no row has a label."""
        sums = self._sums.to(self._accelerator.device)
        total, number = self._accelerator.reduce(sums, "sum").tolist() if self._accelerator.num_processes > 1 else sums.tolist()
        if not number:
            raise JobFailed("no held-out row has a label, so that there is no held-out loss; give other rows with --eval-data")
        return float(total / number)
