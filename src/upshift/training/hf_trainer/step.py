"""Compute the gradients of one optimizer step of the Trainer: cut the user's batches by the plan, and recover from out of memory.

Each rank has its own batches from its data loader, as in transformers. The gradient of the job is the mean over ranks of the
gradients of their losses. Ranks of tensor parallelism compute the batches of all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from upshift.errors import JobFailed
from upshift.planning.plan import Plan
from upshift.training.batches.layout import RowGroup
from upshift.training.batches.user_batches import Batch, InseparableRows, RowBatch, cut_rows, halve_group
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.distributed.fsdp import OomCatchUp, can_catch_up
from upshift.training.distributed.gradients import OverlappedSums, can_overlap, sum_loss
from upshift.training.distributed.mesh import Mesh, all_reduce_max
from upshift.training.hf_trainer.loss_split import Split, is_within, raise_for_inputs
from upshift.training.out_of_memory import BatchHalving


class StepExchange:
    """One rank's communication with the others during a step. With one process it exchanges nothing."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        on_failure: Callable[[], None],
        halve: Callable[[Any], object],
        shrink: Callable[[Any], Any],
    ) -> None:
        """Prepare the exchange of a step.

        ``halve`` and ``shrink`` make a micro-batch smaller. ``on_failure`` is called when memory has run out, before anything
        is freed.
        """
        self.mesh = mesh
        self.plan = mesh.plan
        self._exchange: OomCatchUp | OverlappedSums | None = None
        if can_catch_up(self.plan.layout):
            self._exchange = OomCatchUp(model, mesh, on_failure=on_failure, halve=halve, shrink=shrink)
        elif can_overlap(self.plan):
            self._exchange = OverlappedSums(model, mesh, on_failure=on_failure, halve=halve)

    @property
    def can_halve(self) -> bool:
        """Return whether a micro-batch may be halved.

        It may not if the other ranks would wait in the middle of a layer for a rank that ran out of memory.
        """
        return self._exchange is not None or not self.plan.layout.exchanges

    @property
    def summed(self) -> bool:
        """Return whether the gradients are summed over all ranks of the same weights after the last backward pass."""
        return self.plan.layout.gathers or (isinstance(self._exchange, OverlappedSums) and self._exchange.summed)

    @property
    def is_used(self) -> Callable[[nn.Parameter], bool] | None:
        """Return what says whether this rank used a parameter in the step, or None if its gradient tells."""
        return self._exchange.is_used if isinstance(self._exchange, OverlappedSums) else None

    def gather_batches(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches of all ranks that compute together."""
        if self.plan.layout.ranks_per_replica == 1:
            return batches
        gathered = gather_objects([to_host(batch) for batch in batches], self.mesh)
        return [batch for rank_batches in gathered for batch in rank_batches]

    def loss_share(self, *, scaled: bool) -> float:
        """Return the weight of a rank's loss in the job's loss.

        ``scaled`` means that the loss was divided by the label count of all ranks. Otherwise it is the mean over the batches of
        ``gather_batches``.
        """
        return 1.0 / (self.plan.num_processes if scaled else self.plan.data_parallel)

    def pad_items(self, items: list[Any], stand_in: Callable[[Any], Any]) -> list[Any]:
        """Append stand-ins until this rank has as many items as the others, if ranks wait for each other in each item."""
        if not self.plan.layout.exchanges:
            return items
        if not items:
            raise JobFailed(f"the batches of rank {self.mesh.rank} have no label, and others wait for it; leave such rows out")
        return items + [stand_in(items[-1])] * (all_reduce_max(len(items), self.plan) - len(items))

    def run(self, item: Any, compute: Callable[[Any], Tensor], *, last: bool) -> Tensor:
        return compute(item) if self._exchange is None else self._exchange.run(item, compute, last=last)

    def run_empty(self) -> Tensor:
        """Return a zero loss for a rank without items. Take part in the sums of the other ranks."""
        zero = torch.zeros((), device=self.plan.device)
        if not isinstance(self._exchange, OverlappedSums):
            return zero
        return self._exchange.run(None, lambda item: zero, last=True)

    def agree(self) -> None:
        """Agree on success after the last item.

        If a rank ran out of memory, raise OomOnSomeRank on all ranks that wait for each other.
        """
        if self._exchange is not None:
            self._exchange.agree()

    def discard_gradients(self) -> None:
        if isinstance(self._exchange, OverlappedSums):
            self._exchange.forget()

    def job_loss(self, rank_loss: Tensor) -> float:
        """Return the loss of the whole step, the same on all ranks, from each rank's share."""
        loss = rank_loss.detach().clone()
        sum_loss(loss, self.mesh)
        return float(loss)

    def loss_for_transformers(self, rank_loss: Tensor) -> Tensor:
        """Return the loss whose mean over ranks, which transformers takes, is the loss of the job."""
        return rank_loss * self.plan.data_parallel


def gather_objects(value: Any, mesh: Mesh) -> list[Any]:
    """Return the values of all ranks of tensor parallelism, in the order of the ranks."""
    assert mesh.device_mesh is not None
    group = mesh.device_mesh.get_group("tensor")
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def to_host(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


LossFunction = Callable[[Any, Any], Tensor]  # inputs and num_items_in_batch -> loss with its graph
Shape = tuple[int, ...]


@dataclass(frozen=True)
class CollatedMicroBatch:
    """Rows, or a whole batch of the collator, that are computed at once.

    ``stands_in`` marks a small one whose loss has weight zero, for a rank that has fewer than the others.
    """

    batch: int | None  # the number of the whole batch, or None
    group: RowGroup
    stands_in: bool = False

    @property
    def shape(self) -> Shape:
        return len(self.group.rows), self.group.width


WorkItem = tuple[CollatedMicroBatch, RowBatch | None]


@dataclass(frozen=True)
class BatchStep:
    """The computation of one optimizer step: batches in, gradients and a loss out."""

    plan: Plan
    split: Split
    cuts_batches: bool  # False: the user's batches stay whole until memory runs out
    encoder_decoder: bool
    shifts_labels: bool
    compute_loss: LossFunction
    backward: Callable[[Tensor], None]
    loss_context: Callable[[], AbstractContextManager[Any]]  # open around each attempt
    label_limit: Callable[..., AbstractContextManager[Any]]  # as labels_counted, around the loss of a micro-batch
    halving: BatchHalving[WorkItem]
    exchange: StepExchange
    zero_gradients: Callable[[], None]  # sets them to zero, not to None

    def run(self, batches: list[Batch], num_items: Any, *, scaled: bool) -> Tensor:
        """Sum the gradients of the global batch. Return its loss as transformers.Trainer would report it.

        ``scaled`` means that transformers takes the loss as normalized over the whole step, and does not divide it by the
        number of batches. Raise JobFailed if the loss is not finite, before any weight has moved.
        """
        batches = self.exchange.gather_batches(batches)
        rows = self._collate_rows(batches)
        weights = rows.weights(by_labels=self.split.unit == "labels") if rows is not None else []
        scale = self.exchange.loss_share(scaled=scaled) * (1.0 if scaled else 1.0 / len(batches))
        restore_rng = rng_restorer(self.plan.device)

        def compute(item: WorkItem) -> Tensor:
            micro_batch, _ = item
            counting: AbstractContextManager[Any] = nullcontext()
            if micro_batch.batch is not None or rows is None:
                inputs = self._batch_inputs(batches, micro_batch)
                weight = scale
            else:
                inputs = self._row_inputs(micro_batch, rows)
                weight = scale * self._loss_weight(micro_batch, weights)
                counting = self._counting_labels(micro_batch, rows, inputs.get("labels"))
            if micro_batch.stands_in:
                weight = 0.0
            with counting:
                loss = self._loss(inputs, num_items) * weight
            if self.plan.optimizer_in_backward:
                check_finite(float(loss.detach()))  # the backward pass moves the weights
            self.backward(loss)
            return loss.detach()

        def run_items(items: list[WorkItem]) -> Tensor:
            restore_rng()
            items = self.exchange.pad_items(items, smallest_item)
            total = torch.zeros((), device=self.plan.device) if items else self.exchange.run_empty()
            with self.loss_context():
                for number, item in enumerate(items):
                    loss = self.exchange.run(item, compute, last=number == len(items) - 1)
                    total = total.to(loss.device) + loss
            self.exchange.agree()
            return total

        micro_batches = self._cut(batches, rows, weights)
        if not micro_batches and self.plan.num_processes == 1:
            self.zero_gradients()  # no row has a label, and the optimizer steps all the same
        if self.plan.optimizer_in_backward and len(micro_batches) > 1:
            raise JobFailed(
                f"optimizer_in_backward needs a batch at once, and its rows make {len(micro_batches)} parts; leave it out"
            )
        total = self.halving.run([(micro_batch, rows) for micro_batch in micro_batches], run_items)
        check_finite(self.exchange.job_loss(total))
        return self.exchange.loss_for_transformers(total)

    def _counting_labels(
        self, micro_batch: CollatedMicroBatch, rows: RowBatch, labels: Tensor | None
    ) -> AbstractContextManager[Any]:
        """Return a context in which a loss in chunks knows how many labels the rows have at most."""
        if labels is None:
            return nullcontext()
        members = [member for row in micro_batch.group.rows for member in row]
        # A model that does not shift its labels counts the first one of a row, too.
        return self.label_limit(sum(rows.num_labels[row] + 1 for row in members), positions=labels.numel())

    def _loss(self, inputs: Any, num_items: Any) -> Tensor:
        """Return the loss. Raise RequestError if the model cannot use the mask or the ids that it gets."""
        try:
            return self.compute_loss(inputs, num_items)
        except Exception as error:  # each model fails in its own way with a mask that it cannot use
            raise_for_inputs(error)
            raise

    def _collate_rows(self, batches: list[Batch]) -> RowBatch | None:
        """Return the rows of the batches, or None if the batches must stay whole."""
        if self.split.unit is None:
            return None
        try:
            rows = RowBatch(
                batches,
                encoder_decoder=self.encoder_decoder,
                shifts_labels=self.shifts_labels,
                sampled=self.split.structure,
            )
        except InseparableRows:
            return None  # these batches are not like the sample
        if self.plan.packing and not rows.can_flatten:
            return None
        has_uneven_labels = self.split.needs_equal_labels and len({*rows.num_labels}) > 1
        return rows if not has_uneven_labels and is_within(rows, self.split.ranges) else None

    def _cut(self, batches: list[Batch], rows: RowBatch | None, weights: list[tuple[float, int]]) -> list[CollatedMicroBatch]:
        if rows is None:
            return [CollatedMicroBatch(number, RowGroup((), 0)) for number in range(len(batches))]
        if not any(rows.num_labels) and self.plan.num_processes == 1:  # with several ranks, others may wait in it
            return []
        if not self.cuts_batches:
            return self._whole_batches(rows)
        groups = cut_rows(rows, self.plan, classes=self._row_classes(rows, weights), trims=self.split.trims)
        return [CollatedMicroBatch(None, group) for group in groups if self._has_label(group, rows)]

    def _whole_batches(self, rows: RowBatch) -> list[CollatedMicroBatch]:
        micro_batches = []
        for number, schema in enumerate(rows.schemas):
            first_row = rows.locations.index((number, 0))
            members = tuple((first_row + row,) for row in range(schema.num_rows))
            micro_batches.append(CollatedMicroBatch(number, RowGroup(members, schema.width)))
        return micro_batches

    def _row_classes(self, rows: RowBatch, weights: list[tuple[float, int]]) -> list[list[int]]:
        """Return groups of rows that may share a micro-batch, because their labels have the same weight in the job's loss."""
        classes: dict[Any, list[int]] = {}
        for row, (number, _) in enumerate(rows.locations):
            weight = 0 if self.split.unit == "items" else weights[row][1]
            key = weight if rows.can_mix else (number, weight)
            classes.setdefault(key, []).append(row)
        return list(classes.values())

    def _has_label(self, group: RowGroup, rows: RowBatch) -> bool:
        """Return whether the group has a label. A mean over no labels is not a number."""
        return any(rows.num_labels[member] for row in group.rows for member in row)

    def _batch_inputs(self, batches: list[Batch], micro_batch: CollatedMicroBatch) -> Any:
        """Return a whole batch, or one row of it for a stand-in."""
        inputs = batches[micro_batch.batch or 0]
        if not micro_batch.stands_in or not isinstance(inputs, Mapping):
            return inputs
        row = _row_with_most_labels(inputs.get("labels"))
        return {name: value[row:][:1] if isinstance(value, Tensor) and value.ndim else value for name, value in inputs.items()}

    def _row_inputs(self, micro_batch: CollatedMicroBatch, rows: RowBatch) -> dict[str, Any]:
        # The mask of a batch that is not like the sample may hide more than padding on the right.
        drop_mask = self.split.drops_mask and self.cuts_batches and rows.can_flatten
        return dict(rows.build(micro_batch.group, pad_multiple=self.plan.pad_multiple, drop_mask=drop_mask))

    def _loss_weight(self, micro_batch: CollatedMicroBatch, weights: list[tuple[float, int]]) -> float:
        """Return the weight of a micro-batch's loss in the sum of its batches' losses."""
        if self.split.unit == "items":
            return 1.0
        return sum(weights[member][0] for row in micro_batch.group.rows for member in row)


def zero_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise JobFailed("the loss became NaN" if math.isnan(loss) else "the loss became infinite")


def rng_restorer(device: str) -> Callable[[], None]:
    """Return a function that restores the present state of torch's generators, so that a repeated step draws the same dropout."""
    host_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if device == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(host_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)

    return restore


def smallest_item(item: WorkItem) -> WorkItem:
    """Return a stand-in of one row, which only has to have the right shapes.

    The row has labels if any row has, because a mean over no labels, and its gradient, is not a number.
    """
    micro_batch, rows = item
    if micro_batch.batch is not None or rows is None:
        return CollatedMicroBatch(micro_batch.batch, micro_batch.group, stands_in=True), rows
    members = [member for row in micro_batch.group.rows for member in row]
    chosen = next((member for member in members if rows.num_labels[member]), members[0])
    width = rows.lengths[chosen] if micro_batch.group.has_shared_rows else micro_batch.group.width
    return CollatedMicroBatch(None, RowGroup(((chosen,),), width), stands_in=True), rows


def _row_with_most_labels(labels: Any) -> int:
    """Return the row with the most labels if each row has several, and 0 otherwise."""
    if not isinstance(labels, Tensor) or labels.ndim < 2:
        return 0
    return int((labels != IGNORED).flatten(1).sum(1).argmax())


def halve_item(item: WorkItem, plan: Plan) -> Any:
    """Return the item in two halves, or None if it has one row, or rows that cannot be told apart."""
    micro_batch, rows = item
    halves = halve_group(micro_batch.group, rows, plan) if rows is not None else None
    if halves is None:
        return None
    return tuple((CollatedMicroBatch(None, half), rows) for half in halves)
