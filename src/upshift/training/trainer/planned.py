"""The training half of ``upshift.Trainer``: a plan before the first step, and every step by it.

Mixed into transformers' Trainer classes, before them. What a user's subclass overrides stays in charge: its own
``training_step`` is called, and its ``compute_loss`` is measured like any other loss before a batch is cut.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from upshift.errors import JobFailed, RequestError
from upshift.hardware.detect import detect
from upshift.models.adapter import base_of
from upshift.models.block_attention import set_attention
from upshift.models.build import find_stacks
from upshift.models.recompute import recompute_layers
from upshift.planning.plan import Plan
from upshift.settings import read_settings
from upshift.training.autopsy import Scene, as_lines, examine, read_scene
from upshift.training.batches.collated import CollatedRows, NotRows
from upshift.training.host_memory import limited_memory
from upshift.training.out_of_memory import Halving
from upshift.training.prepare import autocast, compile_layers, computing, set_process
from upshift.training.trainer.asked import (
    OWN_LOOP_OPTIMIZERS,
    allowed_by_hand,
    check_devices,
    fixed_fields,
    optimizer_name,
    recomputes,
)
from upshift.training.trainer.choose import SHORT_RUN_SECONDS, Choice, Request, choose, correct, plain_plan, too_short, words_of
from upshift.training.trainer.fields import refuse_unsupported, was_set
from upshift.training.trainer.report import report, tell, trial_line
from upshift.training.trainer.sample import NoSample, Sample, draw_sample, undisturbed_random_numbers
from upshift.training.trainer.separable import Split, evaluating_loss, measure_split
from upshift.training.trainer.step import BatchStep, Shape, halve_part

TRIAL_SECONDS = 60.0
STEP_OVER_FORWARD = 3.0  # GUIDES H20: the backward pass has twice the FLOPs of the forward pass


class PlannedTraining:
    """``plan``: run this one. ``fixed``: fields of the plan, as "field=value". ``allow``: changes of the mathematics that the
    plan may make. ``trial_seconds``: at most so long, and 5 % of the run, goes into trying plans; 0: none are tried."""

    def __init__(
        self,
        *arguments: Any,
        plan: Plan | None = None,
        fixed: Sequence[str] = (),
        allow: Sequence[str] = (),
        trial_seconds: float = TRIAL_SECONDS,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        refuse_unsupported(self.args)
        check_devices(self.args)
        self._given_plan, self._fixed, self._allow, self._trial_seconds = plan, tuple(fixed), tuple(allow), trial_seconds
        self.choice: Choice | None = None
        self._batch_step: BatchStep | None = None
        self._waiting: list[Any] = []
        self._scene: Scene | None = None  # as memory was when a step ran out

    # The run

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        self.choice, split = self._choose()
        if self.args.should_log:
            for line in report(self.choice):
                tell(line)
        with self._as_planned(self.choice.plan), limited_memory():
            self._batch_step = self._make_step(self.choice, split)
            try:
                return super()._inner_training_loop(*arguments, **named)
            except JobFailed as error:
                raise JobFailed(f"step {self.state.global_step + 1}: {error}; no weight has moved in it") from None
            finally:
                self._batch_step, self._waiting = None, []

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collects the batches of one optimizer step and computes them with the last."""
        if self._batch_step is None:
            return super().training_step(model, inputs, num_items_in_batch)
        self._waiting.append(inputs)
        if len(self._waiting) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            torch.cuda.empty_cache()
        return self._batch_step.run(batches, num_items_in_batch, scaled=self._is_scaled(num_items_in_batch))

    def _is_scaled(self, num_items: Any) -> bool:
        """transformers' own rule (Trainer.training_step)."""
        said = getattr(self, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        return bool((self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        stack: contextlib.ExitStack = super().compute_loss_context_manager()
        if self.choice is not None:
            stack.enter_context(autocast(self.choice.plan))
        return stack

    # Choosing

    def _choose(self) -> tuple[Choice, Split]:
        """The plan, and how the loss splits. Raises RequestError for what the user asked of the plan, NothingFits."""
        demanded = bool(self._fixed or self._allow)
        host = detect(visible_devices=read_settings().cuda_visible_devices)
        device, batch = torch.device(self.args.device).type, self._train_batch_size
        accumulation = self.args.gradient_accumulation_steps
        plain = plain_plan(host, device=device, batch=batch, accumulation=accumulation)
        whole = Split(None)
        if optimizer_name(self.args) in OWN_LOOP_OPTIMIZERS:
            return Choice(plain, f"optim={optimizer_name(self.args)} updates inside the backward pass"), whole
        loader = self.get_train_dataloader()
        try:
            sample = draw_sample(loader, accumulation=accumulation)
            rows = self._rows(sample, len(sample.batches))
            split, forward_seconds = self._measure_split(sample)
        except (NoSample, NotRows) as error:
            return self._without_plan(plain, str(error), demanded), whole
        if self._given_plan is not None:
            return Choice(self._given_plan, "this plan was given"), split
        steps = self._total_steps(loader)
        seconds = STEP_OVER_FORWARD * steps * accumulation * batch * forward_seconds
        if split.unit is None:
            return self._without_plan(plain, split.reason, demanded), split
        if seconds < SHORT_RUN_SECONDS and not demanded:
            return Choice(plain, too_short(seconds)), split
        request = Request(
            model=self.model, sample=sample, split=split, rows=rows, global_batch=batch * accumulation,
            accumulation=accumulation, total_steps=steps, fixed=self._fixed_fields(), device=device,
            allow=tuple(dict.fromkeys((*self._allow, *allowed_by_hand(self.args)))), trial_seconds=self._trial_seconds,
        )  # fmt: skip
        try:
            return choose(request, on_trial=lambda tried: tell(trial_line(tried))), split
        except RequestError as error:
            if demanded:
                raise
            return Choice(plain, words_of(error)), split

    def _without_plan(self, plain: Plan, reason: str, demanded: bool) -> Choice:
        if demanded:
            raise RequestError(f"no plan can be made here ({reason}); leave out fixed={self._fixed} and allow={self._allow}")
        return Choice(plain, reason)

    def _rows(self, sample: Sample, num_batches: int) -> CollatedRows:
        decoder, shifts = self._is_encoder_decoder, self._shifts_labels
        return sample.rows(num_batches, encoder_decoder=decoder, shifts_labels=shifts)

    def _measure_split(self, sample: Sample) -> tuple[Split, float]:
        """(how the loss splits, seconds of one row's forward pass)"""
        rows = self._rows(sample, self.args.gradient_accumulation_steps)
        counts = "labels" in sample.batches[0] and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)
        times: list[float] = []

        def compute(inputs: dict[str, Tensor], items: int | None) -> Tensor:
            start = time.perf_counter()
            loss = self.compute_loss(self.model, self._prepare_inputs(inputs), num_items_in_batch=items)
            times.append((time.perf_counter() - start) / len(next(iter(inputs.values()))))
            return loss

        with undisturbed_random_numbers():
            split = measure_split(rows, evaluating_loss(self.model, compute), model=self.model, counts_items=counts)
        # The two rows measured are short ones: time goes with tokens.
        widths = [anatomy.width for anatomy in rows.anatomies]
        shortest = sorted(rows.lengths)[:2]
        scale = sum(widths) / len(widths) / (sum(shortest) / len(shortest))
        return split, (min(times) if times else math.inf) * scale

    def _total_steps(self, loader: Any) -> int:
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        per_epoch = -(-len(loader) // self.args.gradient_accumulation_steps)
        return max(math.ceil(per_epoch * self.args.num_train_epochs), 1)

    def _fixed_fields(self) -> tuple[str, ...]:
        layers = sum(len(stack) for _, stack in find_stacks(self.model))
        given = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        fixed = [*fixed_fields(self.args, num_layers=layers, optimizer_given=given), *self._fixed]
        if self._loss_is_own:
            fixed.append("loss_chunk_tokens=0")
        return tuple(fixed)

    # Doing

    @contextlib.contextmanager
    def _as_planned(self, plan: Plan) -> Iterator[None]:
        """The model, the process and the optimizer as the plan says; the process's settings come back afterwards."""
        if self.choice is None or self.choice.planning is None and self._given_plan is None:
            yield
            return
        threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
        optim = self.args.optim
        set_process(plan)
        self._prepare_model(plan)
        if not was_set(self.args, "optim") and self.optimizer is None:
            self.args.optim = type(optim)(plan.optim)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(products)
            self.args.optim = optim

    def _prepare_model(self, plan: Plan) -> None:
        base = base_of(self.model)
        if plan.attention != base.config._attn_implementation:
            set_attention(base, plan.attention)
        if not recomputes(self.args):
            recompute_layers(self.model, plan.activation_checkpointing)
        compile_layers(self.model, plan)

    def _make_step(self, choice: Choice, split: Split) -> BatchStep | None:
        if optimizer_name(self.args) in OWN_LOOP_OPTIMIZERS:
            return None
        planned = choice.planning is not None or self._given_plan is not None
        head = partial(computing, self.model, choice.plan) if planned and not self._loss_is_own else contextlib.nullcontext
        return BatchStep(
            plan=choice.plan,
            split=split,
            cuts=planned,
            encoder_decoder=self._is_encoder_decoder,
            shifts_labels=self._shifts_labels,
            loss=self._loss_of,
            backward=self.accelerator.backward,
            computing=head,
            halvings=Halving(
                halve=partial(halve_part, plan=choice.plan),
                size=lambda pair: pair[0].group.num_padded_tokens,
                restart=self._drop_gradients,
                on_failure=self._look,
                on_halved=lambda old, new, why: self._ran_out(old[0].shape, new[0].shape, why),
            ),
        )

    def _loss_of(self, inputs: dict[str, Any], num_items: Any) -> Tensor:
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(self.model_wrapped, inputs, num_items_in_batch=num_items)
        return loss

    def _look(self) -> None:
        self._scene = read_scene(torch.device(self.args.device).type)

    def _drop_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _ran_out(self, largest: Shape, smaller: Shape, words: str) -> None:
        assert self.choice is not None and self._scene is not None
        autopsy = examine(
            self._scene, step=self.state.global_step + 1, plan=self.choice.plan, model=self.model, optimizer=self.optimizer,
            predicted=self.choice.predicted, free_when_planned=self.choice.free_bytes,
            shape=largest, smaller=smaller, words=words,
        )  # fmt: skip
        path = autopsy.write(Path(self.args.output_dir))
        old, new = (f"{rows} x {width} tokens" for rows, width in (largest, smaller))
        tell(f"step {autopsy.step} ran out of memory with {old} at once ({autopsy.words[:160]})")
        tell(f"it is done again, and so are all after it, with at most {new} at once, to the same gradients; see {path}")
        for line in as_lines(autopsy):
            tell(line)
        self.choice = correct(self.choice, rows=max(smaller[0], 1))

    @property
    def _is_encoder_decoder(self) -> bool:
        return bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    @property
    def _shifts_labels(self) -> bool:
        return bool(self._loss_shifts_labels)

    @property
    def _loss_is_own(self) -> bool:
        """Whether the user's code computes the loss, which may look at the logits."""
        return type(self).compute_loss is not self._library_class.compute_loss or self.compute_loss_func is not None
