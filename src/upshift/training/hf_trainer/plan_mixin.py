"""Collect the user's arguments, the live model and a sample of the data, from which ``upshift.Trainer`` chooses its plan.

Let rank 0 make a decision for all ranks.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from upshift import errors
from upshift.errors import JobFailed, RequestError, UpshiftError
from upshift.hardware.spec import Host
from upshift.internals.transformers_names import ATTENTION, LOSS_FUNCTION, PREPARE_INPUTS
from upshift.models.adapter import base_of
from upshift.models.build import find_stacks
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.planner import find_host
from upshift.planning.search.constraints import PACKED_KERNELS
from upshift.training.batches.user_batches import InseparableRows, RowBatch
from upshift.training.checkpoint.rng import undisturbed_rng
from upshift.training.distributed.parallelize import why_cannot_run
from upshift.training.hf_trainer.arguments import (
    OWN_LOOP_OPTIMIZERS,
    allowed_by_hand,
    fixed_fields,
    layout_fields,
    local_ranks,
    not_in_trainer,
    optimizer_name,
)
from upshift.training.hf_trainer.choose_plan import (
    SHORT_RUN_SECONDS,
    Choice,
    NoSample,
    Request,
    Sample,
    check_given,
    choose,
    draw_sample,
    isolated,
    plain_plan,
    too_short,
    words_of,
)
from upshift.training.hf_trainer.loss_split import (
    LARGER,
    LossProbes,
    Split,
    evaluating_loss,
    exact_products,
    gradient_of,
    measure_split,
    training_loss,
)
from upshift.training.hf_trainer.loss_state import NOT_OF_THE_LOSS, KeptState
from upshift.training.hf_trainer.monitor import tell, trial_line
from upshift.training.hf_trainer.patching import LibraryTrainer
from upshift.training.hf_trainer.planned_state import PlannedState

T = TypeVar("T")


def chosen_by_rank_0(choose: Callable[[], T]) -> T:
    """Return what ``choose`` returns on rank 0. All ranks call this function together.

    Raise on each rank the error that ``choose`` raised. Random numbers stay the same on all ranks.
    """
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            with undisturbed_rng():
                said = [choose()]
        except UpshiftError as error:
            kind = type(error) if type(error) in (RequestError, errors.NothingFits) else JobFailed
            said = [kind(str(error))]
        except Exception as error:  # whatever it is, the others must not wait for what does not come
            dist.broadcast_object_list([JobFailed(f"rank 0: {type(error).__name__}: {error}")])
            raise
    dist.broadcast_object_list(said)
    if isinstance(said[0], UpshiftError):
        raise said[0]
    return said[0]  # type: ignore[no-any-return]


STEP_OVER_FORWARD = 3.0  # GUIDES H20: the backward pass has twice the FLOPs of the forward pass


class Choosing(LibraryTrainer):
    """A mix-in of transformers' Trainer classes, below ``PlannedTraining``, which sets the options of the user."""

    args: Any
    data_collator: Any
    state: Any
    model: Any
    _prepare_inputs: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    _upshift_is_divided: bool
    _upshift_library_class: type[transformers.Trainer]
    _upshift_requested_layout: Layout
    _upshift_planned: PlannedState

    if TYPE_CHECKING:

        @property
        def _upshift_steps_by_batch(self) -> bool: ...

    def _upshift_choose(self) -> tuple[Choice, Split]:
        """Return the plan, and how the loss splits.

        Once ranks have their parts of the model, the first choice stays. Raise RequestError if the user's options for the plan
        cannot be met, and NothingFits if no plan fits.
        """
        last_choice = self._upshift_planned.last_choice
        if last_choice is None or not self._upshift_is_divided:
            if self.args.world_size > 1:
                last_choice = chosen_by_rank_0(self._upshift_choose_on_this_rank)
            else:
                with undisturbed_rng():
                    last_choice = self._upshift_choose_on_this_rank()
            problem = self._upshift_reason_not(last_choice[0].plan)
            if problem is not None:
                raise RequestError(problem)
            self._upshift_planned = replace(self._upshift_planned, last_choice=last_choice)
        return last_choice

    def _upshift_choose_on_this_rank(self) -> tuple[Choice, Split]:
        asked = self._upshift_planned
        demanded = asked.is_demanded
        host = self._upshift_host(probe=False)
        device, batch = torch.device(self.args.device).type, self._train_batch_size
        accumulation = self.args.gradient_accumulation_steps
        plain = plain_plan(
            host, device=device, batch=batch, accumulation=accumulation, num_processes=self.args.world_size,
            layout=self._upshift_requested_layout,
        )  # fmt: skip
        whole = Split(None)
        if self._upshift_updates_in_backward:
            return Choice(plain, f"optim={optimizer_name(self.args)} updates inside the backward pass"), whole
        if self._upshift_steps_by_batch:
            which = "of each rank" if self.args.world_size > 1 else "that is accumulated"
            reason = f"the script's own training_step runs for each batch {which}, and a plan's for all of them"
            return self._upshift_without_plan(plain, reason, demanded or asked.plan is not None), whole
        if PREPARE_INPUTS.of(type(self)) is not PREPARE_INPUTS.of(self._upshift_library_class):
            reason = "the script's own _prepare_inputs may make its batches, and a plan cuts those of the data loader"
            return self._upshift_without_plan(plain, reason, demanded or asked.plan is not None), whole
        loader = self.get_train_dataloader()
        try:
            data = KeptState(
                dataset=getattr(loader, "dataset", None), collator=self.data_collator
            )  # with random numbers of theirs
            sample = draw_sample(loader, accumulation=accumulation)
            data.restore()
            rows = self._upshift_collated_rows(sample, len(sample.batches))
            steps = self._upshift_total_steps(loader)
            split, forward_seconds = self._upshift_measure_split(sample, rows, steps)
        except (NoSample, InseparableRows) as error:
            return self._upshift_without_plan(plain, str(error), demanded), whole
        split = isolated(split, self.model)
        if asked.plan is not None:
            check_given(asked.plan, split)
            return Choice(asked.plan, "this plan was given"), split
        seconds = STEP_OVER_FORWARD * steps * accumulation * batch * forward_seconds
        if split.unit is None:
            return self._upshift_without_plan(plain, split.reason, demanded), split
        if seconds < SHORT_RUN_SECONDS and not demanded:
            return Choice(plain, too_short(seconds)), split
        request = Request(
            model=self.model, sample=sample, split=split, rows=rows, global_batch=batch * accumulation * self.args.world_size,
            accumulation=accumulation, total_steps=steps, fixed=self._upshift_fixed_fields(), device=device,
            allow=tuple(dict.fromkeys((*asked.allow, *allowed_by_hand(self.args)))),
            trial_seconds=asked.trial_seconds if self.args.world_size == 1 else 0.0,  # ranks that wait need the cores
            clips_gradients=self.args.max_grad_norm > 0, memory_limit_gib=asked.memory_limit_gib,
            host=self._upshift_host(probe=True), reason_not=self._upshift_reason_not,
        )  # fmt: skip
        try:
            return choose(request, on_trial=lambda tried: tell(trial_line(tried))), split
        except RequestError as error:
            if demanded:
                raise
            return Choice(plain, words_of(error)), split

    def _upshift_without_plan(self, plain: Plan, reason: str, demanded: bool) -> Choice:
        if demanded:
            raise RequestError(f"no plan can be made here ({reason}); leave out plan, fixed, allow and memory_limit_gib")
        return Choice(plain, reason)

    def _upshift_collated_rows(self, sample: Sample, num_batches: int) -> RowBatch:
        decoder, shifts = self._upshift_is_encoder_decoder, self._upshift_shifts_labels
        return sample.rows(num_batches, encoder_decoder=decoder, shifts_labels=shifts)

    def _upshift_measure_split(self, sample: Sample, rows: RowBatch, total_steps: int) -> tuple[Split, float]:
        """Return how the loss splits, and the seconds of one row's forward pass. ``rows`` are those of the whole sample."""
        first = self._upshift_collated_rows(sample, self.args.gradient_accumulation_steps)
        counts = "labels" in sample.batches[0] and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)
        times: list[float] = []

        def compute(inputs: dict[str, Tensor], items: int | None, step: int = 0) -> Tensor:
            start = time.perf_counter()
            told = None if items is None else torch.tensor(items, device=self.args.device)
            with self.compute_loss_context_manager(), self._upshift_at_step(step, total_steps):
                loss = self.compute_loss(self.model, self._prepare_inputs(inputs), num_items_in_batch=told)
            times.append((time.perf_counter() - start) / len(next(iter(inputs.values()))))
            return cast("Tensor", loss)  # with outputs it is for return_outputs=True alone

        is_known = self._upshift_loss_is_of_library
        elsewhere = {
            f"at step {step}": evaluating_loss(self.model, partial(compute, step=step))
            for step in sorted({total_steps // 2, max(total_steps - 1, 0)} - {0})
        }
        probes = LossProbes(
            loss=evaluating_loss(self.model, compute),
            gradient=gradient_of(self.model, compute),
            larger_gradient=None if is_known else gradient_of(self.model, compute, scale=LARGER),
            elsewhere={**elsewhere, "in training mode": training_loss(self.model, compute)},
            counts_items=counts,
            is_known=is_known,
        )
        with self._upshift_without_logging() as logged, exact_products():
            state = KeptState(
                without=NOT_OF_THE_LOSS, Trainer=self, model=self.model, compute_loss=self.compute_loss,
                function=self.compute_loss_func,
            )  # fmt: skip
            split = measure_split(rows, probes, model=self.model, num_first=len(first))
            changed = state.changed()
            state.restore()
        if changed is not None and split.unit is not None and not probes.is_known:
            split = Split(None, reason=f"the loss keeps a state of its own ({changed}), which moves on with each call")
        if logged and split.unit is not None:
            split = Split(None, reason=f"the loss logs {', '.join(logged)} of each batch, and a plan calls it for other rows")
        # The two rows measured are short ones: time goes with tokens.
        widths = [anatomy.width for anatomy in first.schemas]
        shortest = sorted(first.lengths)[:2]
        scale = sum(widths) / len(widths) / (sum(shortest) / len(shortest))
        return split, (min(times) if times else math.inf) * scale

    @contextmanager
    def _upshift_at_step(self, step: int, total_steps: int) -> Iterator[None]:
        """Set ``self.state`` to a step while open: a loss may read there how far the training is."""
        before, self.state = self.state, copy.copy(self.state)
        self.state.global_step, self.state.max_steps = step, total_steps
        self.state.epoch = self.args.num_train_epochs * step / max(total_steps, 1)
        try:
            yield
        finally:
            self.state = before

    @contextmanager
    def _upshift_without_logging(self) -> Iterator[dict[str, None]]:
        """Disable ``log`` while open: a loss that is only measured reaches neither the log nor callbacks.

        Yield the names that it was asked to log, in their order.
        """
        own, names = vars(self).get("log"), dict[str, None]()
        self.log = lambda logs, *arguments, **named: names.update(dict.fromkeys(logs))  # type: ignore[method-assign]
        try:
            yield names
        finally:
            del self.log
            if own is not None:
                self.log = own  # type: ignore[method-assign]

    def _upshift_total_steps(self, loader: Any) -> int:
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        per_epoch = -(-len(loader) // self.args.gradient_accumulation_steps)
        steps: int = math.ceil(per_epoch * self.args.num_train_epochs)
        return max(steps, 1)

    def _upshift_fixed_fields(self) -> tuple[str, ...]:
        layers = sum(len(stack) for _, stack in find_stacks(self.model))
        given = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        by_arguments = (
            *fixed_fields(self.args, num_layers=layers, optimizer_given=given),
            *layout_fields(self._upshift_requested_layout),
        )
        named = {assignment.partition("=")[0] for assignment in self._upshift_planned.fixed}  # these win over the arguments
        fixed = [
            *(assignment for assignment in by_arguments if assignment.partition("=")[0] not in named),
            *self._upshift_planned.fixed,
        ]
        if self._upshift_loss_is_of_script:
            fixed.append("loss_chunk_tokens=0")
        own = getattr(getattr(base_of(self.model), "config", None), ATTENTION.attribute, None)
        if own in PACKED_KERNELS and "attention" not in named:
            fixed.append(f"attention={own}")
        return tuple(fixed)

    def _upshift_host(self, *, probe: bool) -> Host:
        """Return the host of all ranks.

        Other hosts are assumed to have as many ranks and the same devices (transformers' own ranks say no more).
        """
        host, world, here = find_host(None, probe=probe), self.args.world_size, local_ranks()
        if world == 1:
            return host.one_device()
        if 0 < here < host.gpus_per_node:
            host = host.one_device() if here == 1 else host.changed(gpus_per_node=here)
        return host.changed(num_nodes=world // here) if world > here else host

    def _upshift_reason_not(self, plan: Plan) -> str | None:
        """Return why this model, or the Trainer, cannot run a plan, or None."""
        if plan.num_processes != self.args.world_size:
            return f"the plan is for num_processes={plan.num_processes}, and {self.args.world_size} are here; plan again for them"
        averages = bool(self.args.average_tokens_across_devices)
        problem = not_in_trainer(plan, optimizer_given=self._upshift_optimizer_is_given, averages=averages)
        return problem if problem is not None or self._upshift_is_divided else why_cannot_run(plan, self.model)

    @property
    def _upshift_optimizer_is_given(self) -> bool:
        """Return whether the script gave the optimizer, which an earlier training did not make."""
        return self._upshift_planned.last_choice is None and (
            self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        )

    @property
    def _upshift_updates_in_backward(self) -> bool:
        return optimizer_name(self.args) in OWN_LOOP_OPTIMIZERS

    @property
    def _upshift_is_encoder_decoder(self) -> bool:
        return bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    @property
    def _upshift_shifts_labels(self) -> bool:
        return bool(self._loss_shifts_labels)

    @property
    def _upshift_loss_is_of_library(self) -> bool:
        """Return whether code of transformers computes the loss: means over labels."""
        base = base_of(self.model)
        function = LOSS_FUNCTION.read(base)  # one that the user set
        codes = (type(base), function) if function is not None else (type(base),)
        return not self._upshift_loss_is_of_script and all(
            getattr(code, "__module__", "").startswith("transformers.") for code in codes
        )

    @property
    def _upshift_loss_is_of_script(self) -> bool:
        """Return whether the user's code computes the loss, which may look at the logits."""
        return type(self).compute_loss is not self._upshift_library_class.compute_loss or self.compute_loss_func is not None
