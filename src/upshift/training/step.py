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
from upshift.training.distributed.fsdp import OomCatchUp, can_catch_up, reshard_weights, set_last_micro_batch
from upshift.training.distributed.gradients import OverlappedSums, can_overlap, copy_tied_weights, sum_loss
from upshift.training.distributed.host_copy import HostCopy
from upshift.training.distributed.mesh import Mesh, all_reduce_max
from upshift.training.distributed.pipeline_parallel import Pipeline
from upshift.training.distributed.weight_update import (
    agree_on_overflow,
    clip_all_gradients,
    make_update_sharding,
    sum_gradients_over_job,
)
from upshift.training.elastic.replica import ReplicaGroup
from upshift.training.evaluate import estimate_kl
from upshift.training.forward_passes import ForwardPasses
from upshift.training.optimizers.build import build_optimizer, update_in_backward
from upshift.training.optimizers.schedule import build_schedule
from upshift.training.out_of_memory import BatchHalving, Halved, MemoryReadings, OnHalved, halve, read_memory, stand_in
from upshift.training.preferences.preference_loss import PreferenceLoss, Rewards
from upshift.training.prepare import chunked_loss, compute_loss, sum_log_ratios

WATCHED_MICRO_BATCHES = 2  # the longest ones, which come first; gradients exist from the second one on
Watch = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step."""

    loss: float  # mean over the label tokens of the whole global batch
    gradient_norm: float | None
    learning_rate: float
    num_tokens: int
    rewards: Rewards | None = None  # the rewards of pairs


class QueuedStep:
    """A step whose work is queued on the device, and whose numbers are on their way to the host.

    Args:
        loss: the global batch's mean loss.
        norm: the norm of the gradients before clipping.
        reward_sums: sums over the pairs of all ranks, as ``PreferenceLoss.sum_over_ranks`` returns them.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        norm: torch.Tensor | None,
        *,
        learning_rate: float,
        num_tokens: int,
        reward_sums: torch.Tensor | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.num_tokens = num_tokens
        self._has_norm = norm is not None
        scalars = [loss] if norm is None else [loss, norm.detach().to(loss.device)]
        rewards = [] if reward_sums is None else [reward_sums.double()]
        # In fp64 each of them stays what it is.
        self._numbers = HostCopy(torch.cat([torch.stack([scalar.double() for scalar in scalars]), *rewards]))

    def read(self) -> StepResult:
        """Return the result of the step. Wait until the device has computed it. Raise JobFailed if the loss is not finite."""
        loss, *others = self._numbers.read()
        check_finite(loss)
        return StepResult(
            loss=loss,
            gradient_norm=others.pop(0) if self._has_norm else None,
            learning_rate=self.learning_rate,
            num_tokens=self.num_tokens,
            rewards=Rewards.of_sums(others) if others else None,
        )


class TrainStep:
    """Run optimizer steps. It holds everything that a step changes: weights, optimizer, schedule and loss scale."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        arguments: Arguments,
        *,
        on_halved: OnHalved = lambda halved: None,
        copies: ReplicaGroup | None = None,
    ) -> None:
        plan = mesh.plan
        conflict_message = conflict(plan, clips_gradients=arguments.max_grad_norm > 0)
        if conflict_message is not None:
            raise RequestError(conflict_message)
        self.model = model
        self.mesh = mesh
        self.plan = plan
        self.arguments = arguments
        self.optimizer = build_optimizer(model, plan, arguments, sharding=make_update_sharding(model, mesh))
        self.schedule = build_schedule(self.optimizer, arguments)
        self.scaler = torch.amp.GradScaler(plan.device, enabled=plan.precision == "fp16")
        if plan.optimizer_in_backward:
            update_in_backward(self.optimizer)
        self.preference = PreferenceLoss.of(arguments)
        self._copies = copies
        self.memory_at_failure: MemoryReadings
        self._pipeline = Pipeline(model, plan) if plan.layout.pipeline_parallel > 1 else None
        self._oom_catch_up = OomCatchUp(model, mesh, on_failure=self._read_memory) if can_catch_up(plan.layout) else None
        self._overlapped_sums = OverlappedSums(model, mesh, on_failure=self._read_memory) if can_overlap(plan) else None
        self.passes = ForwardPasses(model, plan, catch_up=self._oom_catch_up, on_failure=self._read_memory, on_halved=on_halved)
        self._halving = BatchHalving[MicroBatch](
            halve=self._halve_micro_batch,
            size=lambda micro_batch: micro_batch.num_padded_tokens,
            restart=self._drop_gradients,
            on_failure=self._read_memory,
            on_halved=lambda old, new, message: on_halved(Halved(old.shape, new.shape, message)),
            equalize=self._add_stand_ins,
        )

    def _halve_micro_batch(self, micro_batch: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
        """Return two halves, or None if the micro-batch is indivisible or the step cannot be repeated.

        With the optimizer in the backward pass, some weights have already changed. Ranks that share a layer or a sequence wait
        within it for a rank that ran out of memory.
        """
        if self.plan.optimizer_in_backward or (self.plan.layout.exchanges and self._oom_catch_up is None):
            return None
        return halve(micro_batch)

    def _add_stand_ins(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches, with stand-ins so that ranks in lockstep have equally many."""
        if self._oom_catch_up is None:
            return micro_batches
        missing = all_reduce_max(len(micro_batches), self.plan) - len(micro_batches)
        return micro_batches + [stand_in(micro_batches[-1])] * missing

    def step(self, batch: GlobalBatch, *, watch: Watch = nullcontext) -> StepResult:
        """Run one step, and wait for its result. The arguments are those of ``queue``."""
        return self.queue(batch, watch=watch).read()

    def queue(self, batch: GlobalBatch, *, watch: Watch = nullcontext) -> QueuedStep:
        """Run one step on a CPU, or queue its work on a GPU, for which the host does not wait.

        Its gradients are those of the mean loss over all label tokens of the global batch in every layout. ``watch`` opens a
        context around the first micro-batches, and one around the update.
        """
        loss = self._accumulate_batch(batch, watch)
        with watch():
            norm, learning_rate = self.update(loss)
        sums = None
        if batch.has_pairs:
            sums = self.preference.sum_over_ranks(device=self.plan.device, num_processes=self.plan.num_processes)
        return QueuedStep(loss, norm, learning_rate=learning_rate, num_tokens=batch.num_tokens, reward_sums=sums)

    def _accumulate_batch(self, batch: GlobalBatch, watch: Watch) -> torch.Tensor:
        """Accumulate the gradients of a global batch. Return this rank's share of its mean loss."""

        def accumulate_all(micro_batches: list[MicroBatch]) -> torch.Tensor:
            self.preference.reset()
            if self._pipeline is not None:
                with watch():
                    return self._pipeline.gradients(micro_batches, batch.num_label_tokens, self.scaler.scale)
            last = len(micro_batches) - 1
            with chunked_loss(self.model, self.plan):
                loss = torch.zeros((), device=self.plan.device)
                with watch():
                    for number, micro_batch in enumerate(micro_batches[:WATCHED_MICRO_BATCHES]):
                        loss += self.accumulate(micro_batch, batch.num_label_tokens, last=number == last)
                for number, micro_batch in enumerate(micro_batches[WATCHED_MICRO_BATCHES:], WATCHED_MICRO_BATCHES):
                    loss += self.accumulate(micro_batch, batch.num_label_tokens, last=number == last)
            self.agree()
            return loss

        self.preference.mean_tokens = batch.mean_answer_tokens
        if batch.has_ratings and self.preference.ratings.has_kl:
            with chunked_loss(self.model, self.plan):
                self.preference.kl = estimate_kl(self.passes, [batch], of="KL pass")
        return self._halving.run(batch.micro_batches, accumulate_all)

    def compute_mismatched(self, micro_batch: MicroBatch) -> None:
        """Run the forward pass of a micro-batch's mismatched answers as a step does, for a trial. Others have none."""
        if micro_batch.ratings is not None and self.preference.ratings.has_kl:
            with torch.no_grad():
                sum_log_ratios(self.model, self.plan, micro_batch)
            reshard_weights(self.model)

    def agree(self) -> None:
        """Agree after the last micro-batch that it fitted. Raise on all ranks that exchange if one of them ran out of memory."""
        lockstep = self._oom_catch_up or self._overlapped_sums
        if lockstep is not None:
            lockstep.agree()

    def _read_memory(self) -> None:
        self.memory_at_failure = read_memory(self.plan.device)

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self._overlapped_sums is not None:
            self._overlapped_sums.forget()

    def _drop_gradients(self) -> None:
        self.forget_gradients()
        if self.plan.device == "cuda":
            torch.cuda.empty_cache()

    def accumulate(self, micro_batch: MicroBatch, num_label_tokens: int, *, last: bool = True) -> torch.Tensor:
        """Run forward and backward passes of one micro-batch. Return its share of the global batch's mean loss.

        ``last`` says that it is the step's last one. A micro-batch without labels runs only if other ranks exchange tensors
        with this rank meanwhile.
        """
        if self._pipeline is not None:
            return self._pipeline.gradients([micro_batch], num_label_tokens, self.scaler.scale)
        if micro_batch.num_label_tokens == 0 and not (self.plan.layout.exchanges or self._overlapped_sums):
            return torch.zeros((), device=self.plan.device)
        lockstep = self._oom_catch_up or self._overlapped_sums
        if lockstep is None:
            set_last_micro_batch(self.model, self.plan, last=last)
            return self._run_passes(micro_batch, num_label_tokens)
        return lockstep.run(micro_batch, lambda smaller: self._run_passes(smaller, num_label_tokens), last=last)

    def _run_passes(self, micro_batch: MicroBatch, num_label_tokens: int) -> torch.Tensor:
        loss = compute_loss(self.model, self.plan, micro_batch, self.preference)
        share = loss.float() * (micro_batch.num_label_tokens / max(num_label_tokens, 1))
        if self.plan.optimizer_in_backward and self.plan.device == "cpu":
            check_finite(float(share.detach()))  # the backward pass changes the weights
        self.scaler.scale(share).backward()
        return share.detach()

    def update(self, loss_share: torch.Tensor) -> tuple[torch.Tensor | None, float]:
        """Sum the gradients over ranks, clip them, and update the weights. Return their norm and the learning rate.

        ``loss_share`` is this rank's share of the global batch's mean loss. It becomes the mean loss.
        """
        if self._copies is not None:
            self._copies.sum_gradients(self.model.parameters(), loss_share)
        overlapped = self._overlapped_sums
        sum_gradients_over_job(
            self.optimizer,
            self.model,
            self.mesh,
            summed=self.plan.layout.gathers or (overlapped is not None and overlapped.summed),
            is_used=None if overlapped is None else overlapped.is_used,
        )
        sum_loss(loss_share, self.mesh)
        self.scaler.unscale_(self.optimizer)
        agree_on_overflow(self.scaler, self.optimizer, self.mesh)
        norm = None
        if self.arguments.max_grad_norm:
            norm = clip_all_gradients(self.optimizer, self.model, self.mesh, self.arguments.max_grad_norm)
        if self.plan.device == "cpu":
            check_finite(float(loss_share))
        self.scaler.step(self.optimizer)
        if rounds_stochastically(self.plan):
            copy_tied_weights(self.model)
        self.scaler.update()
        learning_rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        self.forget_gradients()
        return norm, learning_rate

    @property
    def halvings(self) -> int:
        """Return how many times the micro-batches were halved."""
        return self._halving.count

    def schedule_state(self) -> dict[str, Any]:
        """Return the numbers in the state of the learning-rate schedule."""
        state: dict[str, Any] = self.schedule.state_dict()
        return {key: value for key, value in state.items() if isinstance(value, (int, float, list))}


def check_finite(loss: float) -> None:
    """Raise JobFailed if the loss is NaN or infinite."""
    if not math.isfinite(loss):
        value = "NaN" if math.isnan(loss) else "infinite"
        raise JobFailed(f"the loss became {value}; lower the learning rate, or use bf16 or fp32 instead of fp16")
