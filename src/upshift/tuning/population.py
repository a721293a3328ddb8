"""Support population-based training, which Ray's scheduler of that name directs.

A trial goes on from another one's checkpoint with hyper-parameters of its own. A checkpoint holds the hyper-parameters that it
was trained with; here the trial's win."""

from __future__ import annotations

from typing import Any

from transformers.trainer_utils import HPSearchBackend

from upshift.internals.torch_names import LAST_RATE
from upshift.training.trainer.library import LibraryTrainer


class OfPopulation(LibraryTrainer):
    """A class that is mixed in before the Trainer."""

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        own = [{name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.hp_search_backend == HPSearchBackend.RAY:
            keep_own(self.optimizer, self.lr_scheduler, own)


def keep_own(optimizer: Any, scheduler: Any, own: list[dict[str, Any]]) -> None:
    """Keep the trial's learning rate, weight decay and the rest, at the checkpoint's place in the schedule."""
    for group, values in zip(optimizer.param_groups, own, strict=True):
        share = group["lr"] / group["initial_lr"]
        group.update(values, lr=share * values["initial_lr"])
    scheduler.base_lrs = [values["initial_lr"] for values in own]
    LAST_RATE.put(scheduler, [group["lr"] for group in optimizer.param_groups])
