"""Run one optimizer step over one global batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from upshift.errors import JobFailed, RequestError
from upshift.planning.cost.optimizer import rounds_stochastically
from upshift.planning.search.constraints import conflict
from upshift.training.arguments import Arguments
from upshift.training.batches.collate import MicroBatch
from upshift.training.batches.sampler import GlobalBatch
from upshift.training.distributed.fsdp import OomCatchUp, can_catch_up, set_last_micro_batch
from upshift.training.distributed.gradients import OverlappedSums, can_overlap, copy_tied_weights, sum_loss
from upshift.training.distributed.mesh import Mesh, all_reduce_max
from upshift.training.distributed.pipeline_parallel import Pipeline
from upshift.training.distributed.weight_update import (
    agree_on_overflow,
    clip_all_gradients,
    make_update_sharding,
    sum_gradients_over_job,
)
from upshift.training.elastic.replica import ReplicaGroup
from upshift.training.optimizers.build import build_optimizer, update_in_backward
from upshift.training.optimizers.schedule import build_schedule
from upshift.training.out_of_memory import BatchHalving, MemoryReadings, halve, read_memory, stand_in
from upshift.training.prepare import chunked_loss, compute_loss

WATCHED_MICRO_BATCHES = 2  # the longest come first; from the second on the gradients exist
Shape = tuple[int, ...]
OnHalved = Callable[[Shape, Shape, str], None]  # the largest micro-batch before and after, and what the allocator said
Watch = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class StepResult:
    loss: float  # mean over the label tokens of the whole global batch
    gradient_norm: float | None
    learning_rate: float
    num_tokens: int


class TrainStep:
    """The holder of what changes from step to step: weights, optimizer, schedule, loss scale."""

    def __init__(
        self, model: nn.Module, place: Mesh, arguments: Arguments, *,
        on_halved: OnHalved = lambda old, new, why: None, copies: ReplicaGroup | None = None,
    ) -> None:  # fmt: skip
        plan = place.plan
        problem = conflict(plan, clips_gradients=arguments.max_grad_norm > 0)
        if problem is not None:
            raise RequestError(problem)
        self.model = model
        self.place = place
        self.plan = plan
        self.arguments = arguments
        self.optimizer = build_optimizer(model, plan, arguments, division=make_update_sharding(model, place))
        self.schedule = build_schedule(self.optimizer, arguments)
        self.scaler = torch.amp.GradScaler(plan.device, enabled=plan.precision == "fp16")
        if plan.optimizer_in_backward:
            update_in_backward(self.optimizer)
        self._copies = copies
        self.scene: MemoryReadings  # memory as it was when a step ran out
        # With the optimizer in the backward pass some weights may have moved: there is no going back.
        self._pipeline = Pipeline(model, plan) if plan.layout.pipeline_parallel > 1 else None
        self._pace = OomCatchUp(model, place, on_failure=self._look) if can_catch_up(plan.layout) else None
        self._overlap = OverlappedSums(model, place, on_failure=self._look) if can_overlap(plan) else None
        self._halving = BatchHalving[MicroBatch](
            halve=self._halve,
            size=lambda micro_batch: micro_batch.num_padded_tokens,
            restart=self._drop_gradients,
            on_failure=self._look,
            on_halved=lambda old, new, why: on_halved(old.shape, new.shape, why),
            level=self._level,
        )

    def _halve(self, micro_batch: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
        """Return two halves, or None if the micro-batch is indivisible or there is no going back.

        With the optimizer in the backward pass some weights may have moved. Ranks that share a layer or a sequence wait, in
        the middle of it, for one that ran out of memory.
        """
        if self.plan.optimizer_in_backward or (self.plan.layout.exchanges and self._pace is None):
            return None
        return halve(micro_batch)

    def _level(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        if self._pace is None:
            return micro_batches
        missing = all_reduce_max(len(micro_batches), self.plan) - len(micro_batches)
        return micro_batches + [stand_in(micro_batches[-1])] * missing

    def step(self, batch: GlobalBatch, *, watch: Watch = nullcontext) -> StepResult:
        """Run one step. Gradients are those of the mean loss over all label tokens of the global batch, whatever the layout.

        ``watch`` opens a context around the first micro-batches, and one around the update.
        """
        total = self._gradients(batch, watch)
        with watch():
            return self.update(total, batch.num_tokens)

    def _gradients(self, batch: GlobalBatch, watch: Watch) -> torch.Tensor:
        def work(micro_batches: list[MicroBatch]) -> torch.Tensor:
            if self._pipeline is not None:
                with watch():
                    return self._pipeline.gradients(micro_batches, batch.num_label_tokens, self.scaler.scale)
            last = len(micro_batches) - 1
            with chunked_loss(self.model, self.plan):
                total = torch.zeros((), device=self.plan.device)
                with watch():
                    for number, micro_batch in enumerate(micro_batches[:WATCHED_MICRO_BATCHES]):
                        total += self.accumulate(micro_batch, batch.num_label_tokens, last=number == last)
                for number, micro_batch in enumerate(micro_batches[WATCHED_MICRO_BATCHES:], WATCHED_MICRO_BATCHES):
                    total += self.accumulate(micro_batch, batch.num_label_tokens, last=number == last)
            self.agree()
            return total

        return self._halving.run(batch.micro_batches, work)

    def agree(self) -> None:
        """Agree on success after the last micro-batch. Raise on all ranks that wait for each other if one ran out of memory."""
        together = self._pace or self._overlap
        if together is not None:
            together.agree()

    def _look(self) -> None:
        self.scene = read_memory(self.plan.device)

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self._overlap is not None:
            self._overlap.forget()

    def _drop_gradients(self) -> None:
        self.forget_gradients()
        if self.plan.device == "cuda":
            torch.cuda.empty_cache()

    def accumulate(self, micro_batch: MicroBatch, num_label_tokens: int, *, last: bool = True) -> torch.Tensor:
        """Run forward and backward of one micro-batch, the ``last`` of the step or not. Return its share of the global batch's
        mean loss.

        A stand-in for a micro-batch runs if other ranks exchange with this one meanwhile.
        """
        if self._pipeline is not None:
            return self._pipeline.gradients([micro_batch], num_label_tokens, self.scaler.scale)
        if micro_batch.num_label_tokens == 0 and not (self.plan.layout.exchanges or self._overlap):
            return torch.zeros((), device=self.plan.device)
        together = self._pace or self._overlap
        if together is None:
            set_last_micro_batch(self.model, self.plan, last=last)
            return self._pass(micro_batch, num_label_tokens)
        return together.run(micro_batch, lambda one: self._pass(one, num_label_tokens), last=last)

    def _pass(self, micro_batch: MicroBatch, num_label_tokens: int) -> torch.Tensor:
        loss = compute_loss(self.model, self.plan, micro_batch)
        share = loss.float() * (micro_batch.num_label_tokens / max(num_label_tokens, 1))
        if self.plan.optimizer_in_backward:
            check_finite(float(share.detach()))  # afterwards the weights have moved
        self.scaler.scale(share).backward()
        return share.detach()

    def update(self, total: torch.Tensor, num_tokens: int) -> StepResult:
        if self._copies is not None:
            self._copies.sum_gradients(self.model.parameters(), total)
        overlapped = self._overlap is not None and self._overlap.summed
        sum_gradients_over_job(self.optimizer, self.model, self.place, summed=overlapped or self.plan.layout.gathers)
        sum_loss(total, self.place)
        self.scaler.unscale_(self.optimizer)
        agree_on_overflow(self.scaler, self.optimizer, self.place)
        norm = None
        if self.arguments.max_grad_norm:
            norm = clip_all_gradients(self.optimizer, self.model, self.place, self.arguments.max_grad_norm)
        loss = float(total)
        check_finite(loss)
        self.scaler.step(self.optimizer)
        if rounds_stochastically(self.plan):
            copy_tied_weights(self.model)
        self.scaler.update()
        learning_rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        self.forget_gradients()
        return StepResult(loss=loss, gradient_norm=norm, learning_rate=learning_rate, num_tokens=num_tokens)

    @property
    def halvings(self) -> int:
        return self._halving.count

    def schedule_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.schedule.state_dict()
        return {key: value for key, value in state.items() if isinstance(value, (int, float, list))}


def check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        what = "NaN" if math.isnan(loss) else "infinite"
        raise JobFailed(f"the loss became {what}; lower the learning rate, or use bf16 or fp32 instead of fp16")
