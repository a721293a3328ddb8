"""Compute one optimizer step's gradients for the Trainer: cut the user's batches by the plan, and recover from out of memory.

Compute the batches of one optimizer step of the Trainer together with the other ranks of a plan.

Each rank's data loader gives it batches of its own, as transformers has it. The job's gradient is the mean over ranks of the
gradients of their losses. Ranks of tensor parallelism compute the batches of all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from upshift.errors import JobFailed
from upshift.planning.plan import Plan
from upshift.training.batches.layout import RowGroup
from upshift.training.batches.user_batches import Batch, InseparableRows, RowBatch, cut_rows, halve_group
from upshift.training.data.corpus import IGNORED
from upshift.training.distributed.fsdp import OomCatchUp, can_catch_up
from upshift.training.distributed.gradients import OverlappedSums, can_overlap, sum_loss
from upshift.training.distributed.mesh import Mesh, all_reduce_max
from upshift.training.hf_trainer.loss_split import Split, is_within
from upshift.training.out_of_memory import BatchHalving


class StepOfRanks:
    """One rank's side of a step. With one process, nothing is exchanged."""

    def __init__(
        self,
        model: nn.Module,
        place: Mesh,
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
        self._together: OomCatchUp | OverlappedSums | None = None
        if can_catch_up(self.plan.layout):
            self._together = OomCatchUp(model, place, shrink=fewest, **same)
        elif can_overlap(self.plan):
            self._together = OverlappedSums(model, place, **same)

    @property
    def can_halve(self) -> bool:
        """Return whether a part may be halved. It may not if ranks wait for one that ran out of memory in the middle of a
        layer."""
        return self._together is not None or not self.plan.layout.exchanges

    @property
    def summed(self) -> bool:
        """Return whether gradients are summed over all ranks with the same weights when the last backward pass has ended."""
        return self.plan.layout.gathers or (isinstance(self._together, OverlappedSums) and self._together.summed)

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
        return parts + [stand_in(parts[-1])] * (all_reduce_max(len(parts), self.plan) - len(parts))

    def run(self, part: Any, compute: Callable[[Any], Tensor], *, last: bool) -> Tensor:
        return compute(part) if self._together is None else self._together.run(part, compute, last=last)

    def run_nothing(self) -> Tensor:
        """Return a zero loss for a rank without parts, while others sum gradients with it."""
        none = torch.zeros((), device=self.plan.device)
        return self._together.run(None, lambda part: none, last=True) if isinstance(self._together, OverlappedSums) else none

    def agree(self) -> None:
        """Agree on success after the last part. Raise Agreed on all ranks that wait for each other if one ran out of memory."""
        if self._together is not None:
            self._together.agree()

    def forget(self) -> None:
        if isinstance(self._together, OverlappedSums):
            self._together.forget()

    def of_job(self, total: Tensor) -> float:
        """Return the loss of the whole step from each rank's share. It is the same on all ranks."""
        whole = total.detach().clone()
        sum_loss(whole, self.place)
        return float(whole)

    def told(self, total: Tensor) -> Tensor:
        """Return the loss that transformers gets, which takes the mean over ranks."""
        return total * self.plan.data_parallel


def gathered_objects(own: Any, place: Mesh) -> list[Any]:
    """Return the objects of the ranks of tensor parallelism, in their order."""
    assert place.device_mesh is not None
    group = place.device_mesh.get_group("tensor")
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    return found


def on_host(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


Loss = Callable[[Any, Any], Tensor]  # inputs and num_items_in_batch -> loss with its graph
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Rows, or a whole batch of the collator's, that are computed at once. ``stands_in`` marks a small part with weight zero."""

    batch: int | None
    group: RowGroup
    stands_in: bool = False

    @property
    def shape(self) -> Shape:
        return len(self.group.rows), self.group.width


Pair = tuple[Part, RowBatch | None]


@dataclass(frozen=True)
class BatchStep:
    plan: Plan
    split: Split
    cuts: bool  # False: the user's batches stay whole until memory runs out
    encoder_decoder: bool
    shifts_labels: bool
    loss: Loss
    backward: Callable[[Tensor], None]
    computing: Callable[[], AbstractContextManager[Any]]  # open around each try
    halvings: BatchHalving[Pair]
    ranks: StepOfRanks
    zero_gradients: Callable[[], None]  # instead of none

    def run(self, batches: list[Batch], num_items: Any, *, scaled: bool) -> Tensor:
        """Sum the gradients of the global batch. Return its loss as transformers.Trainer would report it.

        ``scaled`` says that transformers takes the loss as normalized over the whole step, and does not divide it by the
        number of batches. Raise JobFailed if the loss is not finite, before any weight has moved.
        """
        batches = self.ranks.union(batches)
        rows = self._rows(batches)
        weights = rows.weights(by_labels=self.split.unit == "labels") if rows is not None else []
        scale = self.ranks.share(scaled=scaled) * (1.0 if scaled else 1.0 / len(batches))
        restore = remembered_random_numbers(self.plan.device)

        def compute(pair: Pair) -> Tensor:
            part, _ = pair
            whole = part.batch is not None or rows is None
            inputs = self._whole(batches, part) if whole or rows is None else self._inputs(part, rows)
            weight = 0.0 if part.stands_in else scale if whole else scale * self._share(part, weights)
            loss = self.loss(inputs, num_items) * weight
            if self.plan.optimizer_in_backward:
                check_finite(float(loss.detach()))  # afterwards the weights have moved
            self.backward(loss)
            return loss.detach()

        def work(parts: list[Pair]) -> Tensor:
            restore()
            parts = self.ranks.fill_up(parts, fewest_rows)
            total = torch.zeros((), device=self.plan.device) if parts else self.ranks.run_nothing()
            with self.computing():
                for number, pair in enumerate(parts):
                    loss = self.ranks.run(pair, compute, last=number == len(parts) - 1)
                    total = total.to(loss.device) + loss
            self.ranks.agree()
            return total

        parts = self._parts(batches, rows, weights)
        if not parts and self.plan.num_processes == 1:
            self.zero_gradients()  # no row has a label, and the optimizer steps all the same
        if self.plan.optimizer_in_backward and len(parts) > 1:
            raise JobFailed(f"optimizer_in_backward needs a batch at once, and its rows make {len(parts)} parts; leave it out")
        total = self.halvings.run([(part, rows) for part in parts], work)
        check_finite(self.ranks.of_job(total))
        return self.ranks.told(total)

    def _rows(self, batches: list[Batch]) -> RowBatch | None:
        if self.split.unit is None:
            return None
        try:
            rows = RowBatch(batches, encoder_decoder=self.encoder_decoder, shifts_labels=self.shifts_labels)
        except InseparableRows:
            return None  # this one is not like the sample: it stays as the user's collator made it
        unlike = self.split.even and len({*rows.num_labels}) > 1 or not is_within(rows, self.split.ranges)
        return None if unlike else rows

    def _parts(self, batches: list[Batch], rows: RowBatch | None, weights: list[tuple[float, int]]) -> list[Part]:
        if rows is None:
            return [Part(number, RowGroup((), 0)) for number in range(len(batches))]
        if not any(rows.num_labels) and self.plan.num_processes == 1:  # other ranks may wait in it
            return []
        if not self.cuts:
            firsts = [rows.locations.index((number, 0)) for number in range(len(batches))]
            return [
                Part(number, RowGroup(tuple((first + row,) for row in range(anatomy.num_rows)), anatomy.width))
                for number, (first, anatomy) in enumerate(zip(firsts, rows.schemas, strict=True))
            ]
        groups = cut_rows(rows, self.plan, classes=self._classes(rows, weights), trims=self.split.trims)
        return [Part(None, group) for group in groups if self._counts(group, rows)]

    def _classes(self, rows: RowBatch, weights: list[tuple[float, int]]) -> list[list[int]]:
        """Return groups of rows that may share a part: rows whose labels weigh the same in the loss of the global batch."""
        found: dict[Any, list[int]] = {}
        for row, (number, _) in enumerate(rows.locations):
            weight = 0 if self.split.unit == "items" else weights[row][1]
            found.setdefault(weight if rows.can_mix else (number, weight), []).append(row)
        return list(found.values())

    def _counts(self, group: RowGroup, rows: RowBatch) -> bool:
        """Return whether the group has a label: a mean over no labels is not a number."""
        return any(rows.num_labels[member] for row in group.rows for member in row)

    def _whole(self, batches: list[Batch], part: Part) -> Any:
        inputs = batches[part.batch or 0]
        if not part.stands_in or not isinstance(inputs, Mapping):
            return inputs
        row = slice(_labelled_row(inputs.get("labels")), None)
        return {name: value[row][:1] if isinstance(value, Tensor) and value.ndim else value for name, value in inputs.items()}

    def _inputs(self, part: Part, rows: RowBatch) -> dict[str, Any]:
        drop_mask = self.split.drops_mask and self.cuts
        return dict(rows.build(part.group, pad_multiple=self.plan.pad_multiple, drop_mask=drop_mask))

    def _share(self, part: Part, weights: list[tuple[float, int]]) -> float:
        """Return the weight of a part's own loss in the sum of its batches' losses."""
        if self.split.unit == "items":
            return 1.0
        return sum(weights[member][0] for row in part.group.rows for member in row)


def zero_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise JobFailed("the loss became NaN" if math.isnan(loss) else "the loss became infinite")


def remembered_random_numbers(device: str) -> Callable[[], None]:
    """Return a function that restores the present state of torch's generators: a repeated step then draws the same dropout."""
    host = torch.get_rng_state()
    own = torch.cuda.get_rng_state() if device == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(host)
        if own is not None:
            torch.cuda.set_rng_state(own)

    return restore


def fewest_rows(pair: Pair) -> Pair:
    """Return one row of a part, for its shapes alone. The row has labels: a mean over none is not a number, nor are its
    gradients."""
    part, rows = pair
    if part.batch is not None or rows is None:
        return Part(part.batch, part.group, stands_in=True), rows
    members = [member for row in part.group.rows for member in row]
    chosen = next((member for member in members if rows.num_labels[member]), members[0])
    width = rows.lengths[chosen] if part.group.has_shared_rows else part.group.width
    return Part(None, RowGroup(((chosen,),), width), stands_in=True), rows


def _labelled_row(labels: Any) -> int:
    """Return the row with the most labels, if rows have several labels, and 0 otherwise."""
    if not isinstance(labels, Tensor) or labels.ndim < 2:
        return 0
    return int((labels != IGNORED).flatten(1).sum(1).argmax())


def halve_part(pair: Pair, plan: Plan) -> Any:
    part, rows = pair
    halves = halve_group(part.group, rows, plan) if rows is not None else None
    return None if halves is None else tuple((Part(None, half), rows) for half in halves)
