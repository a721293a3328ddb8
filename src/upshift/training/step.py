"""One optimizer step over one global batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from upshift.errors import JobFailed, RequestError
from upshift.planning.legal import conflict
from upshift.planning.plan import Plan
from upshift.training.arguments import Arguments
from upshift.training.autopsy import Scene, read_scene
from upshift.training.batches.fill import MicroBatch
from upshift.training.batches.source import GlobalBatch
from upshift.training.optimizers.build import build_optimizer, build_schedule
from upshift.training.optimizers.in_backward import update_in_backward
from upshift.training.out_of_memory import Halving, halve
from upshift.training.prepare import computing, extra_inputs, loss_of

WATCHED_MICRO_BATCHES = 2  # the longest come first; from the second on the gradients exist
Shape = tuple[int, ...]
OnHalved = Callable[[Shape, Shape, str], None]  # the largest micro-batch before and after, and what the allocator said
Watch = Callable[[], AbstractContextManager[object]]
GRADIENT_BUCKET_ELEMENTS = 2**23  # gradients summed over processes in flat buckets of this size


@dataclass(frozen=True)
class StepOutcome:
    loss: float  # mean over the label tokens of the whole global batch
    gradient_norm: float | None
    learning_rate: float
    num_tokens: int


class Stepper:
    """Holds what changes from step to step: weights, optimizer, schedule, loss scale."""

    def __init__(
        self, model: PreTrainedModel, plan: Plan, arguments: Arguments, *, on_halved: OnHalved = lambda old, new, why: None
    ) -> None:
        problem = conflict(plan, clips_gradients=arguments.max_grad_norm > 0)
        if problem is not None:
            raise RequestError(problem)
        self.model, self.plan, self.arguments = model, plan, arguments
        self.optimizer = build_optimizer(model, plan, arguments)
        self.schedule = build_schedule(self.optimizer, arguments)
        self.scaler = torch.amp.GradScaler(plan.device, enabled=plan.precision == "fp16")
        if plan.optimizer_in_backward:
            update_in_backward(self.optimizer)
        self._extra = extra_inputs(model)
        self.scene: Scene  # memory as it was when a step ran out
        # With the optimizer in the backward pass some weights may have moved: there is no going back.
        self._halving = Halving[MicroBatch](
            halve=halve if not plan.optimizer_in_backward else lambda micro_batch: None,
            size=lambda micro_batch: micro_batch.num_padded_tokens,
            restart=self._drop_gradients,
            on_failure=self._look,
            on_halved=lambda old, new, why: on_halved(old.shape, new.shape, why),
        )

    def step(self, batch: GlobalBatch, *, watch: Watch = nullcontext) -> StepOutcome:
        """Gradients are those of the mean loss over all label tokens of the global batch, whatever the layout.

        ``watch`` opens a context around the first micro-batches, and one around the update.
        """
        total = self._gradients(batch, watch)
        with watch():
            return self.update(total, batch.num_tokens)

    def _gradients(self, batch: GlobalBatch, watch: Watch) -> torch.Tensor:
        def work(micro_batches: list[MicroBatch]) -> torch.Tensor:
            with computing(self.model, self.plan):
                total = torch.zeros((), device=self.plan.device)
                with watch():
                    for micro_batch in micro_batches[:WATCHED_MICRO_BATCHES]:
                        total += self.accumulate(micro_batch, batch.num_label_tokens)
                for micro_batch in micro_batches[WATCHED_MICRO_BATCHES:]:
                    total += self.accumulate(micro_batch, batch.num_label_tokens)
            return total

        return self._halving.run(batch.micro_batches, work)

    def _look(self) -> None:
        self.scene = read_scene(self.plan.device)

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.plan.device == "cuda":
            torch.cuda.empty_cache()

    def accumulate(self, micro_batch: MicroBatch, num_label_tokens: int) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns its share of the global batch's mean loss."""
        if micro_batch.num_label_tokens == 0:
            return torch.zeros((), device=self.plan.device)
        loss = loss_of(self.model, self.plan, micro_batch, self._extra)
        share = loss.float() * (micro_batch.num_label_tokens / num_label_tokens)
        if self.plan.optimizer_in_backward:
            check_finite(float(share.detach()))  # afterwards the weights have moved
        self.scaler.scale(share).backward()
        return share.detach()

    def update(self, total: torch.Tensor, num_tokens: int) -> StepOutcome:
        if self.plan.num_processes > 1:
            self._sum_gradients(total)
        self.scaler.unscale_(self.optimizer)
        norm = None
        if self.arguments.max_grad_norm:
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.arguments.max_grad_norm))
        loss = float(total)
        check_finite(loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        learning_rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(loss=loss, gradient_norm=norm, learning_rate=learning_rate, num_tokens=num_tokens)

    def _sum_gradients(self, total: torch.Tensor) -> None:
        """Sum over processes, in flat buckets: each process has its share of the global mean, so no division."""
        gradients = []
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        bucket: list[torch.Tensor] = []
        size = 0
        for gradient in gradients:
            bucket.append(gradient)
            size += gradient.numel()
            if size >= GRADIENT_BUCKET_ELEMENTS:
                _sum_bucket(bucket)
                bucket, size = [], 0
        if bucket:
            _sum_bucket(bucket)
        dist.all_reduce(total)

    def schedule_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.schedule.state_dict()
        return {key: value for key, value in state.items() if isinstance(value, (int, float, list))}


def check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        what = "NaN" if math.isnan(loss) else "infinite"
        raise JobFailed(f"the loss became {what}; lower the learning rate, or use bf16 or fp32 instead of fp16")


def _sum_bucket(bucket: list[torch.Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    dist.all_reduce(flat)
    for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        gradient.copy_(summed.view_as(gradient))
