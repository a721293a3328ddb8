"""Choose the plan of ``upshift.Trainer`` from the user's arguments, the live model and a sample of the data.

With several ranks, rank 0 decides and the others receive its decision.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
import transformers
from torch import Tensor, nn

from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.hardware.spec import Host
from upshift.internals.torch_names import dispatch_mode
from upshift.internals.transformers_names import ATTENTION, LOSS_FUNCTION, PREPARE_INPUTS
from upshift.models.adapter import base_of, planned_part
from upshift.models.build import find_stacks
from upshift.planning.layout import Layout
from upshift.planning.plan import Attention, Plan
from upshift.training.batches.generated_rows import GENERATES, forward_seconds, generated_rows
from upshift.training.batches.model_calls import StepCalls
from upshift.training.batches.stand_ins import find_rows
from upshift.training.batches.user_batches import Batch, InseparableRows, RowBatch
from upshift.training.checkpoint.rng import preserved_rng
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.distributed.parallelize import why_cannot_run
from upshift.training.hf_trainer.arguments import (
    BACKWARD_UPDATE_OPTIMIZERS,
    OPTIMIZER_METHOD,
    builds_optimizer,
    changes_by_optimizer,
    fixed_fields,
    given_precision,
    layout_fields,
    optimizer_name,
    refuse_contradictions,
    why_unsupported,
)
from upshift.training.hf_trainer.choose_plan import (
    SHORT_RUN_SECONDS,
    WHOLE_LOGITS,
    Choice,
    NoSample,
    PlannedState,
    PlanRequest,
    Sample,
    check_layer_drop,
    check_plan,
    choose,
    draw_prompts,
    draw_sample,
    no_plan_reason,
    plain_plan,
    plan_fields,
    refuse_other_values,
    restrict_to_isolation,
    short_run_reason,
    what_stand_ins_cover,
    whole_batch_fields,
    why_not_for_whole_batches,
    why_not_of_model,
    without_fields,
)
from upshift.training.hf_trainer.distributed import choose_on_rank_0
from upshift.training.hf_trainer.loss_split import (
    LARGER_SCALE,
    RAN_OUT,
    LossProbes,
    Split,
    calls_in_training,
    exact_matmuls,
    free_cached_memory,
    gradient_in_evaluation,
    loss_in_evaluation,
    loss_in_training,
    measure_split,
    raise_for_inputs,
)
from upshift.training.hf_trainer.loss_state import (
    TRAINER_ATTRIBUTES,
    DataWatch,
    StateSnapshot,
    Traces,
    muted_trackers,
    refuse_exchanges,
    state_at_step,
    without_logging,
)
from upshift.training.hf_trainer.monitor import format_trial, print_line
from upshift.training.hf_trainer.patching import LibraryTrainer, is_own, watched_autocast
from upshift.training.out_of_memory import is_out_of_memory

COLD_SECONDS = 1.0  # a first call that takes longer is not repeated to be measured warm
STEP_TO_FORWARD_RATIO = 3.0  # GUIDES H20: the backward pass has twice the FLOPs of the forward pass


class PlanMixin(LibraryTrainer):
    """A mix-in of transformers' Trainer classes that chooses the plan.

    Its subclass ``PlannedTraining`` sets the options of the user.
    """

    args: Any
    data_collator: Any
    train_dataset: Any
    state: Any
    model: Any
    _prepare_inputs: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    _upshift_is_divided: bool
    _upshift_library_class: type[transformers.Trainer]
    _upshift_requested_layout: Layout
    _upshift_planned: PlannedState
    _upshift_made_optimizer: torch.optim.Optimizer | None = None  # by this Trainer
    _upshift_saw_autocast: bool = False  # a module of the model ran under autocast while the script's loss was measured

    if TYPE_CHECKING:

        def _upshift_plain_optimizer(self) -> torch.optim.Optimizer: ...
        @property
        def _upshift_has_own_step(self) -> bool: ...
        @property
        def _upshift_has_ranks(self) -> bool: ...
        def _upshift_host(self, *, probe: bool) -> Host: ...

    def _upshift_choose(self) -> tuple[Choice, Split]:
        """Return the plan, and how the loss splits over the rows of a batch.

        Once the ranks have divided the model, the first choice stays. Raise RequestError if the user's options for the plan
        cannot be met, and NothingFits if no plan fits into memory. If the prediction is of another loss than the run's, the
        user's own settings run instead.
        """
        self._upshift_keep_attention()
        choice = self._upshift_planned.last_choice
        if choice is None or not self._upshift_is_divided:
            with preserved_rng():
                loader = self.get_train_dataloader()  # of all ranks, because these may wait for each other in it
            if self._upshift_has_ranks:
                choice = choose_on_rank_0(partial(self._upshift_choose_locally, loader))
            else:
                with preserved_rng():
                    choice = self._upshift_choose_locally(loader)
            problem = self._upshift_why_not(choice[0].plan)
            if problem is not None:
                raise RequestError(problem)
            self._upshift_planned = replace(self._upshift_planned, last_choice=choice)
        return choice

    def _upshift_choose_locally(self, loader: Any) -> tuple[Choice, Split]:
        """Choose on this rank alone: the user's own settings where no plan can be made, a given plan, or the planner's."""
        options = self._upshift_planned
        device = torch.device(self.args.device).type
        plain = plain_plan(
            self._upshift_host(probe=False),
            device=device,
            batch=self._train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            num_processes=self.args.world_size,
            layout=self._upshift_requested_layout,
        )
        self._upshift_check_options(plain)
        if self._upshift_updates_in_backward:
            reason = f"optim={optimizer_name(self.args)} updates inside the backward pass"
            return self._upshift_keep_settings(plain, reason, options.is_demanded), Split(None)
        if is_own(self, PREPARE_INPUTS.attribute, self._upshift_library_class):
            return self._upshift_choose_for_generated_rows(plain, self._upshift_total_steps(loader))
        # Data sets and collators may draw random numbers of their own.
        data_state = StateSnapshot(dataset=getattr(loader, "dataset", None), collator=self.data_collator)
        try:
            watch = DataWatch() if self._upshift_has_ranks or device != "cpu" else None
            sample = draw_sample(loader, accumulation=self.args.gradient_accumulation_steps, watch=watch)
        except NoSample as error:
            return self._upshift_keep_settings(plain, str(error), options.is_demanded), Split(None)
        finally:
            data_state.restore()
        steps = self._upshift_total_steps(loader)
        rows, split, seconds_per_batch = self._upshift_examine_loss(sample, steps)
        run_seconds = STEP_TO_FORWARD_RATIO * steps * self.args.gradient_accumulation_steps * seconds_per_batch
        if options.plan is not None and not self._upshift_has_own_step:
            split = restrict_to_isolation(split, self.model)
            check_plan(options.plan, split, self.model)
        if rows is None or split.unit is None:
            return self._upshift_choose_for_whole_batches(plain, sample, split, steps, run_seconds), split
        if options.plan is not None:
            return Choice(options.plan, "this plan was given", is_given=True), split
        split = restrict_to_isolation(split, self.model)
        if run_seconds < SHORT_RUN_SECONDS and not options.is_demanded:
            return Choice(plain, short_run_reason(run_seconds)), split
        request = self._upshift_plan_request(sample, rows, split, steps)
        try:
            return choose(request, on_trial=lambda tried: print_line(format_trial(tried))), split
        except (RequestError, NothingFits, JobFailed) as error:
            predicts_other_loss = not self._upshift_uses_library_loss
            if options.is_demanded or not (predicts_other_loss or isinstance(error, RequestError)):
                raise
            return Choice(plain, no_plan_reason(error)), split

    def _upshift_check_options(self, plain: Plan) -> None:
        """Raise RequestError for an option that the model or the script's loss rules out, whether a plan is made or not."""
        given = self._upshift_planned.plan
        for plan in (plain,) if given is None else (plain, given):
            check_layer_drop(plan, self.model)
        chosen = self._upshift_planned.fixed if given is None else plan_fields(given)
        named = chosen if given is None else without_fields(chosen, *Plan.model_fields.keys() - given.model_fields_set)
        given_optimizer = self._upshift_optimizer_is_given
        refuse_contradictions(named, self.args, num_layers=self._upshift_num_layers, optimizer_given=given_optimizer)
        if self._upshift_uses_script_loss:
            refuse_other_values(chosen, WHOLE_LOGITS, "the script's own loss may read all logits")

    def _upshift_choose_for_generated_rows(self, plain: Plan, total_steps: int) -> tuple[Choice, Split]:
        """Choose a plan for the training on rows that the trainer generates, or the user's own settings with the reason."""
        split = Split(None, reason=GENERATES)
        try:
            rows = generated_rows(self, partial(draw_prompts, self.train_dataset))
        except (InseparableRows, NoSample) as error:
            return self._upshift_keep_settings(plain, str(error), self._upshift_planned.is_demanded), split
        sample = Sample([dict(rows.batch)], seconds_per_batch=0.0)
        num_batches = total_steps * self.args.gradient_accumulation_steps
        run_seconds = STEP_TO_FORWARD_RATIO * num_batches * forward_seconds(self.model, rows.batch)
        choice = self._upshift_choose_for_whole_batches(plain, sample, split, total_steps, run_seconds)
        return (choice if choice.planning is None else replace(choice, covers=rows.covers)), split

    def _upshift_choose_for_whole_batches(
        self, plain: Plan, sample: Sample, split: Split, total_steps: int, run_seconds: float
    ) -> Choice:
        """Choose a plan under which the script's code computes the batches of the data loader as they are.

        The plan then chooses everything but the division of the batch. If no such plan can be made, return the choice of the
        user's own settings, or raise RequestError if the user demanded a plan.
        """
        options = self._upshift_planned
        plan_can_run = options.plan is not None and not self._upshift_has_own_step
        if self._upshift_has_ranks and not plan_can_run:
            return self._upshift_keep_settings(plain, split.reason, is_demanded=options.is_demanded)
        if not options.is_demanded and not SHORT_RUN_SECONDS <= run_seconds < math.inf:
            why_short = short_run_reason(run_seconds) if run_seconds < math.inf else "its time is not known"
            return Choice(plain, f"{split.reason}; {why_short}")
        try:
            whole = find_rows(sample.batches, self.model, partial(self._upshift_record_calls, total_steps=total_steps))
            stand_ins = replace(sample, batches=whole.batches)
            rows = self._upshift_sample_rows(stand_ins, len(stand_ins.batches))
        except InseparableRows as error:
            if options.plan is not None:
                return self._upshift_given_for_whole_batches(options.plan, self._train_batch_size, split.reason)
            return self._upshift_keep_settings(plain, f"{split.reason}; {error}", options.is_demanded)
        if options.plan is not None:
            return self._upshift_given_for_whole_batches(options.plan, whole.num_at_once, split.reason, whole.num_parts)
        accumulation = self.args.gradient_accumulation_steps * whole.num_parts
        fixed = whole_batch_fields(
            self._upshift_fixed_fields(),
            num_rows=whole.num_at_once,
            accumulation=accumulation,
            own_step=self._upshift_has_own_step,
            reason=split.reason,
        )
        stand_in_split = Split("labels", why_not_flat=split.reason)
        request = self._upshift_plan_request(stand_ins, rows, stand_in_split, total_steps)
        num_layers = self._upshift_num_layers
        request = replace(
            request,
            global_batch=whole.num_at_once * accumulation,
            fixed=fixed if whole.frees_attention else self._upshift_fix_attention(fixed),
            keeps_batches=True,
            why_not=lambda plan: why_not_for_whole_batches(plan, num_layers, split.reason) or self._upshift_why_not(plan),
        )
        try:
            choice = choose(request, on_trial=lambda tried: print_line(format_trial(tried)))
        except (RequestError, NothingFits, JobFailed) as error:  # predicted and tried with the model's own loss, not the run's
            if options.is_demanded:
                raise
            return Choice(plain, f"{split.reason}; {no_plan_reason(error)}")
        covers = what_stand_ins_cover(self.model, whole)
        return replace(choice, reason=f"the batches stay whole: {split.reason}", covers=covers)

    def _upshift_given_for_whole_batches(self, plan: Plan, num_rows: int, reason: str, num_parts: int = 1) -> Choice:
        """Return the choice of the user's plan for batches of ``num_rows`` rows that stay whole.

        Raise RequestError if the plan needs other batches, or if the script's loss would undo a part of it.
        """
        whole_batch_fields(
            plan_fields(plan),
            num_rows=num_rows,
            accumulation=self.args.gradient_accumulation_steps * num_parts * plan.layout.ranks_per_replica,
            own_step=self._upshift_has_own_step,
            reason=reason,
        )
        problem = why_not_of_model(plan, base_of(self._upshift_part))
        problem = problem or why_not_for_whole_batches(plan, self._upshift_num_layers, reason)
        if problem is not None:
            raise RequestError(f"the given plan is not possible: {problem}")
        return Choice(plan, f"this plan was given, and the batches stay whole: {reason}", is_given=True)

    def _upshift_fix_attention(self, fixed: tuple[str, ...]) -> tuple[str, ...]:
        """Return the fixed fields, with the model's own attention if the user fixed none.

        The script's code may pass the model what one kind of attention reads, such as the borders of texts end to end.
        """
        attention = self._upshift_model_attention
        if attention is None or any(assignment.startswith("attention=") for assignment in fixed):
            return fixed
        return (*fixed, f"attention={attention}")

    @property
    def _upshift_model_attention(self) -> str | None:
        """Return the model's present attention, or None if it is none that plans know."""
        attention = getattr(getattr(base_of(self._upshift_part), "config", None), ATTENTION.attribute, None)
        return attention if attention in get_args(Attention) else None

    def _upshift_keep_attention(self) -> None:
        """Put the model's own attention into a given plan that names none.

        transformers gives a model sdpa where it has it, so another attention is the script's choice.
        """
        plan = self._upshift_planned.plan
        attention = self._upshift_model_attention
        if plan is not None and "attention" not in plan.model_fields_set and attention not in (None, "sdpa"):
            self._upshift_planned = replace(self._upshift_planned, plan=plan.changed(attention=attention))

    def _upshift_plan_request(self, sample: Sample, rows: RowBatch, split: Split, total_steps: int) -> PlanRequest:
        accumulation = self.args.gradient_accumulation_steps
        allow = (*self._upshift_planned.allow, *changes_by_optimizer(self.args))
        return PlanRequest(
            model=self._upshift_part,
            sample=sample,
            split=split,
            rows=rows,
            global_batch=self._train_batch_size * accumulation * self.args.world_size,
            accumulation=accumulation,
            total_steps=total_steps,
            fixed=self._upshift_fixed_fields(),
            device=torch.device(self.args.device).type,
            allow=tuple(dict.fromkeys(allow)),
            # The other ranks wait during a trial and would need the cores.
            trial_seconds=self._upshift_planned.trial_seconds if self.args.world_size == 1 else 0.0,
            clips_gradients=self.args.max_grad_norm > 0,
            memory_limit_gib=self._upshift_planned.memory_limit_gib,
            host=self._upshift_host(probe=True),
            why_not=self._upshift_why_not,
        )

    def _upshift_keep_settings(self, plain: Plan, reason: str, is_demanded: bool) -> Choice:
        """Return the choice to run the user's own settings. Raise RequestError if the user demanded a plan."""
        if is_demanded:
            raise RequestError(f"no plan can be made here ({reason}); leave out plan, fixed, allow and memory_limit_gib")
        return Choice(plain, reason)

    def _upshift_sample_rows(self, sample: Sample, num_batches: int) -> RowBatch:
        return sample.rows(
            num_batches,
            encoder_decoder=self._upshift_is_encoder_decoder,
            shifts_labels=self._upshift_shifts_labels,
        )

    def _upshift_examine_loss(self, sample: Sample, total_steps: int) -> tuple[RowBatch | None, Split, float]:
        """Return the rows of the sample, how the loss splits over them, and the seconds of one batch's forward pass.

        The rows are None if the batches are not made of rows. The seconds are infinite if the loss cannot be computed apart
        from the training.
        """
        rows = reason = None
        try:
            if self._upshift_part is not self.model:
                raise InseparableRows(f"the loss of {type(self.model).__name__} may compare any rows of a batch")
            rows = self._upshift_sample_rows(sample, len(sample.batches))
        except InseparableRows as error:
            reason = str(error)
        if self._upshift_has_own_step:
            which = "of each rank" if self.args.world_size > 1 else "that is accumulated"
            reason = f"the script's own training_step runs for each batch {which}, and a plan's for all of them"
        seconds = math.inf
        if reason is not None or not self._upshift_uses_library_loss:
            seconds, observed = self._upshift_time_first_batch(sample, total_steps)
            reason = reason or observed
        if rows is None or reason is not None:
            return rows, Split(None, reason=reason or ""), seconds
        try:
            split, row_seconds = self._upshift_measure_split(sample, rows, total_steps)
        except InseparableRows as error:
            return None, Split(None, reason=str(error)), seconds
        if split.reason == RAN_OUT:
            return rows, split, math.inf
        if split.unit is None and seconds < math.inf:
            return rows, split, seconds
        return rows, split, row_seconds * self._train_batch_size

    def _upshift_time_first_batch(self, sample: Sample, total_steps: int) -> tuple[float, str | None]:
        """Return the seconds of the loss of the first batch, and what a plan that cuts batches must leave alone, or None.

        The seconds are infinite if the loss cannot be computed here: some losses need gradients, or training mode.
        """
        times: list[float] = []
        labels = sample.batches[0].get("labels") if self._upshift_counts_items(sample) else None
        num_items = int((labels != IGNORED).sum()) if isinstance(labels, Tensor) else None
        loss_of = loss_in_evaluation(self.model, partial(self._upshift_loss_of, total_steps=total_steps, times=times))
        has_run_out = False
        with self._upshift_leaving_no_trace() as traces:
            try:
                for _ in range(2):  # the first one is cold
                    loss_of(dict(sample.batches[0]), num_items)
                    if times[-1] > COLD_SECONDS:
                        break
            except Exception as error:  # the script's loss may not work in evaluation mode
                has_run_out = is_out_of_memory(error)
                if not has_run_out:
                    raise_for_inputs(error)
                times.clear()
        if has_run_out:
            free_cached_memory()
        return min(times, default=math.inf), RAN_OUT if has_run_out else traces.reason

    def _upshift_loss_of(
        self, inputs: dict[str, Any], items: int | None, *, total_steps: int, times: list[float], step: int = 0
    ) -> Tensor:
        """Return the loss of some inputs at a step of the training. Append its seconds to ``times``."""
        start = time.perf_counter()
        num_items = None if items is None else torch.tensor(items, device=self.args.device)
        with self.compute_loss_context_manager(), state_at_step(self, step, total_steps):
            loss: Any = self.compute_loss(self.model, self._prepare_inputs(inputs), num_items_in_batch=num_items)
        if loss.is_cuda:
            torch.cuda.synchronize()  # else the time is that of starting the kernels
        times.append(time.perf_counter() - start)
        return cast("Tensor", loss)  # compute_loss returns outputs too only with return_outputs=True

    def _upshift_record_calls(self, batch: Batch, *, total_steps: int) -> StepCalls:
        """Return the calls of the transformers model in the loss of a batch, and in its backward pass."""

        def compute() -> Tensor:
            return self._upshift_loss_of(dict(batch), None, total_steps=total_steps, times=[])

        with self._upshift_leaving_no_trace():
            return calls_in_training(self.model, base_of(self._upshift_part), compute)

    def _upshift_counts_items(self, sample: Sample) -> bool:
        """Return whether the loss takes num_items_in_batch."""
        return "labels" in sample.batches[0] and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def _upshift_measure_split(self, sample: Sample, rows: RowBatch, total_steps: int) -> tuple[Split, float]:
        """Return how the loss splits, and the seconds of one row's forward pass.

        ``rows`` are the rows of the whole sample.
        """
        first_batch = self._upshift_sample_rows(sample, self.args.gradient_accumulation_steps)
        times: list[float] = []

        def compute(inputs: dict[str, Tensor], items: int | None, step: int = 0) -> Tensor:
            loss = self._upshift_loss_of(inputs, items, total_steps=total_steps, times=times, step=step)
            times[-1] /= len(next(iter(inputs.values())))
            return loss

        is_library_loss = self._upshift_uses_library_loss
        other_states = {
            f"at step {step}": loss_in_evaluation(self.model, partial(compute, step=step))
            for step in sorted({total_steps // 2, max(total_steps - 1, 0)} - {0})
        }
        probes = LossProbes(
            loss=loss_in_evaluation(self.model, compute),
            gradient=gradient_in_evaluation(self.model, compute),
            larger_gradient=None if is_library_loss else gradient_in_evaluation(self.model, compute, scale=LARGER_SCALE),
            other_states={**other_states, "in training mode": loss_in_training(self.model, compute)},
            counts_items=self._upshift_counts_items(sample),
            is_library_loss=is_library_loss,
        )
        with self._upshift_leaving_no_trace() as traces:
            split = measure_split(rows, probes, model=self.model, num_first=len(first_batch))
        if traces.reason is not None and split.unit is not None:
            split = Split(None, reason=traces.reason)
        # The measured rows are short, and the time is proportional to the tokens.
        widths = [schema.width for schema in first_batch.schemas]
        shortest = sorted(first_batch.lengths)[:2]
        tokens_ratio = sum(widths) / len(widths) / (sum(shortest) / len(shortest))
        return split, (min(times) if times else math.inf) * tokens_ratio

    @contextmanager
    def _upshift_leaving_no_trace(self) -> Iterator[Traces]:
        """Undo what a loss that is only measured leaves behind while open: its own state, and lines of the log.

        Yield the traces, which are complete on leaving.
        """
        traces = Traces()
        alone = dispatch_mode(refuse_exchanges) if self._upshift_has_ranks else nullcontext()  # only rank 0 measures
        autocast_use = watched_autocast(torch.device(self.args.device).type)
        with (
            without_logging(self) as logged,
            muted_trackers() as tracked,
            exact_matmuls(),
            alone,
            autocast_use as use,
        ):
            state = StateSnapshot(
                without=TRAINER_ATTRIBUTES,
                Trainer=self,
                model=self.model,
                compute_loss=self.compute_loss,
                function=self.compute_loss_func,
            )
            yield traces
            changed_name = state.changed()
            state.restore()
        self._upshift_saw_autocast = self._upshift_saw_autocast or use.is_seen
        if changed_name is not None and not self._upshift_uses_library_loss:
            traces.reason = f"the loss changes {changed_name} at each call"
        if tracked:
            traces.reason = f"the loss calls {', '.join(tracked)} for each batch, and a plan calls it for other rows"
        if logged:
            traces.reason = f"the loss logs {', '.join(logged)} of each batch, and a plan calls it for other rows"

    def _upshift_total_steps(self, loader: Any) -> int:
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        per_epoch = -(-len(loader) // self.args.gradient_accumulation_steps)
        return max(int(math.ceil(per_epoch * self.args.num_train_epochs)), 1)

    def _upshift_fixed_fields(self) -> tuple[str, ...]:
        """Return the fixed fields of the plan. ``fixed`` takes precedence over TrainingArguments."""
        optimizer_given = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        from_arguments = (
            *fixed_fields(self.args, num_layers=self._upshift_num_layers, optimizer_given=optimizer_given),
            *layout_fields(self._upshift_requested_layout),
        )
        user_names = {assignment.partition("=")[0] for assignment in self._upshift_planned.fixed}
        fixed = [assignment for assignment in from_arguments if assignment.partition("=")[0] not in user_names]
        fixed += self._upshift_planned.fixed
        if self._upshift_uses_script_loss:
            fixed.append("loss_chunk_tokens=0")
        is_precision_fixed = any(assignment.startswith("precision=") for assignment in fixed)
        if not is_precision_fixed and self._upshift_opens_autocast:
            fixed.append("precision=fp32")  # the script's own autocast chooses; the plan adds none
        return tuple(fixed) if self._upshift_model_attention == "sdpa" else self._upshift_fix_attention(tuple(fixed))

    def _upshift_why_not(self, plan: Plan) -> str | None:
        """Return why this model, or the Trainer, cannot run a plan, or None."""
        if plan.num_processes != self.args.world_size:
            return f"the plan is for num_processes={plan.num_processes}, and {self.args.world_size} are here; plan again for them"
        own_optimizer = is_own(self, OPTIMIZER_METHOD, self._upshift_library_class)
        problem = why_unsupported(
            plan,
            optimizer_given=self._upshift_optimizer_is_given,
            averages=bool(self.args.average_tokens_across_devices),
            scales_losses=given_precision(self.args) == "fp16",
            leaves_out_weights=own_optimizer and builds_optimizer(plan, self.args),
        )
        if problem is not None or self._upshift_is_divided:
            return problem
        return why_cannot_run(plan, self.model)

    @property
    def _upshift_part(self) -> nn.Module:
        """Return the part of the model that plans are made for: one of transformers, or a peft model around it."""
        return planned_part(self.model)

    @property
    def _upshift_num_layers(self) -> int:
        return sum(len(stack) for _, stack in find_stacks(self._upshift_part))

    @property
    def _upshift_optimizer_is_given(self) -> bool:
        """Return whether the script made the optimizer, and not this Trainer, perhaps for an earlier training."""
        is_made_here = self.optimizer is None or self._upshift_plain_optimizer() is self._upshift_made_optimizer
        return self.optimizer_cls_and_kwargs is not None or not is_made_here

    @property
    def _upshift_opens_autocast(self) -> bool:
        """Return whether the script's own code opens autocast, as far as the loss was measured."""
        return self._upshift_saw_autocast or is_own(self, "autocast_smart_context_manager", self._upshift_library_class)

    @property
    def _upshift_updates_in_backward(self) -> bool:
        return optimizer_name(self.args) in BACKWARD_UPDATE_OPTIMIZERS

    @property
    def _upshift_is_encoder_decoder(self) -> bool:
        return bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    @property
    def _upshift_shifts_labels(self) -> bool:
        return bool(self._loss_shifts_labels)

    @property
    def _upshift_uses_library_loss(self) -> bool:
        """Return whether code of transformers computes the loss. Such losses are means over labels."""
        base = base_of(self.model)
        user_function = LOSS_FUNCTION.read(base)
        sources = (type(base), user_function) if user_function is not None else (type(base),)
        is_all_library = all(getattr(source, "__module__", "").startswith("transformers.") for source in sources)
        return not self._upshift_uses_script_loss and is_all_library

    @property
    def _upshift_uses_script_loss(self) -> bool:
        """Return whether the script's own code computes the loss. Such code may look at the logits."""
        has_own = is_own(self, "compute_loss", self._upshift_library_class) or self.compute_loss_func is not None
        return has_own or self._upshift_part is not self.model
