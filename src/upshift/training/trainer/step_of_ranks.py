"""Compute the batches of one optimizer step of the Trainer together with the other ranks of a plan.

Each rank's data loader gives it batches of its own, as transformers has it. The job's gradient is the mean over ranks of the
gradients of their losses. Ranks of tensor parallelism compute the batches of all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from upshift.errors import JobFailed
from upshift.training.batches.collated import Batch
from upshift.training.parallel.gradients import sum_loss
from upshift.training.parallel.keep_pace import KeepPace, can_keep_pace
from upshift.training.parallel.overlap import Overlap, overlaps
from upshift.training.parallel.place import Place
from upshift.training.parallel.ranks import highest


class StepOfRanks:
    """One rank's side of a step. With one process, nothing is exchanged."""

    def __init__(
        self,
        model: nn.Module,
        place: Place,
        *,
        on_failure: Callable[[], None],
        halve: Callable[[Any], object],
        fewest: Callable[[Any], Any],
    ) -> None:
        """Prepare the exchange of a step. ``halve`` and ``fewest`` take what is computed at once.

        ``on_failure`` is called before anything of it is dropped.
        """
        self.place, self.plan = place, place.plan
        same: dict[str, Any] = {"on_failure": on_failure, "halve": halve}
        self._together: KeepPace | Overlap | None = None
        if can_keep_pace(self.plan.layout):
            self._together = KeepPace(model, place, fewest=fewest, **same)
        elif overlaps(self.plan):
            self._together = Overlap(model, place, **same)

    @property
    def can_halve(self) -> bool:
        """Return whether a part may be halved. It may not if ranks wait for one that ran out of memory in the middle of a
        layer."""
        return self._together is not None or not self.plan.layout.exchanges

    @property
    def summed(self) -> bool:
        """Return whether gradients are summed over all ranks with the same weights when the last backward pass has ended."""
        return self.plan.layout.gathers or (isinstance(self._together, Overlap) and self._together.summed)

    def union(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches of all ranks that compute the same."""
        ranks = self.plan.layout.ranks_per_replica
        if ranks == 1:
            return batches
        return [batch for own in gathered_objects([on_host(batch) for batch in batches], self.place) for batch in own]

    def share(self, *, scaled: bool) -> float:
        """Return the weight of a rank's loss in the job's loss.

        ``scaled`` says that the loss was divided by the count of all ranks. Otherwise the mean over the batches of ``union``
        is taken.
        """
        return 1.0 / (self.plan.num_processes if scaled else self.plan.data_parallel)

    def fill_up(self, parts: list[Any], stand_in: Callable[[Any], Any]) -> list[Any]:
        """Return as many parts as other ranks have, if ranks wait for each other in each part."""
        if not self.plan.layout.exchanges:
            return parts
        if not parts:
            raise JobFailed(f"the batches of rank {self.place.rank} have no label, and others wait for it; leave such rows out")
        return parts + [stand_in(parts[-1])] * (highest(len(parts), self.plan) - len(parts))

    def run(self, part: Any, compute: Callable[[Any], Tensor], *, last: bool) -> Tensor:
        return compute(part) if self._together is None else self._together.run(part, compute, last=last)

    def run_nothing(self) -> Tensor:
        """Return a zero loss for a rank without parts, while others sum gradients with it."""
        none = torch.zeros((), device=self.plan.device)
        return self._together.run(None, lambda part: none, last=True) if isinstance(self._together, Overlap) else none

    def agree(self) -> None:
        """Agree on success after the last part. Raise Agreed on all ranks that wait for each other if one ran out of memory."""
        if self._together is not None:
            self._together.agree()

    def forget(self) -> None:
        if isinstance(self._together, Overlap):
            self._together.forget()

    def of_job(self, total: Tensor) -> float:
        """Return the loss of the whole step from each rank's share. It is the same on all ranks."""
        whole = total.detach().clone()
        sum_loss(whole, self.place)
        return float(whole)

    def told(self, total: Tensor) -> Tensor:
        """Return the loss that transformers gets, which takes the mean over ranks."""
        return total * self.plan.data_parallel


def gathered_objects(own: Any, place: Place) -> list[Any]:
    """Return the objects of the ranks of tensor parallelism, in their order."""
    assert place.mesh is not None
    group = place.mesh.get_group("tensor")
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    return found


def on_host(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
