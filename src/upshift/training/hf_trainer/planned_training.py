"""Make a plan before the first step of ``upshift.Trainer``, and compute every step by it.

These classes are mixed into transformers' Trainer classes, before them. Methods that a user's subclass overrides stay in
charge: its own ``training_step`` is called, and its ``compute_loss`` is measured like any other loss before a batch is cut.

Print the Trainer's plan on standard error, because standard output belongs to the script.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
import transformers
from torch import Tensor, nn

from upshift.errors import JobFailed
from upshift.internals.torch_names import COMPILED_CALL
from upshift.internals.transformers_names import ATTENTION, TRAINER_METHODS
from upshift.models.adapter import base_of
from upshift.models.ops.activation_checkpointing import recompute_layers
from upshift.models.ops.block_attention import set_attention
from upshift.models.quantized import keep_trainable
from upshift.planning.cost.optimizer import rounds_stochastically
from upshift.planning.plan import Attention, Plan
from upshift.training.arguments import Arguments
from upshift.training.data.corpus import IGNORED
from upshift.training.distributed.mesh import Mesh
from upshift.training.held_memory import limited_memory
from upshift.training.hf_trainer.arguments import (
    check_devices,
    check_fixed,
    check_limits,
    fields_of,
    local_ranks,
    recomputes,
    refuse_unsupported,
    was_set,
)
from upshift.training.hf_trainer.choose_plan import Choice, correct
from upshift.training.hf_trainer.distributed import SharedTraining
from upshift.training.hf_trainer.loss_split import Split
from upshift.training.hf_trainer.monitor import NotedSteps, numbers_watched, report, tell, without_their_own
from upshift.training.hf_trainer.plan_mixin import Choosing
from upshift.training.hf_trainer.planned_state import PlannedState
from upshift.training.hf_trainer.step import BatchStep, Shape, StepOfRanks, fewest_rows, halve_part, zero_gradients
from upshift.training.optimizers.build import build_optimizer, update_in_backward
from upshift.training.optimizers.sharded import ShardedOptimizer
from upshift.training.out_of_memory import BatchHalving, MemoryReadings, format_autopsy, make_autopsy, read_memory
from upshift.training.prepare import (
    autocast,
    chunked_loss,
    compile_layers,
    configure_process,
    convert_to_fp8,
    losses_in_fp32,
    offload_activations,
)

SHARED_ARGUMENTS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "seed")


class PlannedTraining(NotedSteps, Choosing, SharedTraining):
    """The training half of ``upshift.Trainer``.

    Args:
        plan: the plan to run.
        fixed: fields of the plan, as "field=value".
        allow: changes of the mathematics that the plan may make.
        trial_seconds: the most seconds that trials of plans take (0: no trials), and never more than 5 % of the run. None: a
            minute, or 2 % of the run if that is more, five minutes at most.
        memory_limit_gib: the memory that the process (on a GPU: the device) may hold. None: all that is free.
    """

    def __init__(
        self,
        *arguments: Any,
        plan: Plan | None = None,
        fixed: str | Sequence[str] = (),
        allow: str | Sequence[str] = (),
        trial_seconds: float | None = None,
        memory_limit_gib: float | None = None,
        **named: Any,
    ) -> None:
        for method in TRAINER_METHODS:
            method.of(transformers.Trainer)
        super().__init__(*arguments, **named)
        refuse_unsupported(self.args)
        check_devices(self.args)
        given = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        fixed, allow = ((given,) if isinstance(given, str) else tuple(given) for given in (fixed, allow))
        check_limits(memory_limit_gib=memory_limit_gib, trial_seconds=trial_seconds)
        asked = (*fixed, *(fields_of(plan) if plan is not None else ()))
        check_fixed(asked, self.args, device=torch.device(self.args.device).type, optimizer_given=given)
        keep_trainable(self.model)
        self._upshift_planned = PlannedState(plan, fixed, allow, trial_seconds, memory_limit_gib)
        self.upshift_choice: Choice | None = None
        self._upshift_batch_step: BatchStep | None = None
        self._upshift_waiting_batches: list[Any] = []
        self._upshift_waiting_items: Any = None  # num_items_in_batch of the step that they are of
        self._upshift_memory_scene: MemoryReadings | None = None  # as memory was when a step ran out
        self._upshift_backward_hooks: list[Any] = []  # the hooks that update weights in the backward pass

    # The run

    def train(self, *arguments: Any, **named: Any) -> Any:
        with without_their_own(self.args):
            return super().train(*arguments, **named)

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        self.upshift_choice = None  # an earlier training's says nothing of how the loss is measured for this one
        start = time.perf_counter()
        self.upshift_choice, split = self._upshift_choose()
        planning_seconds = time.perf_counter() - start
        if self.args.should_log:
            for line in report(self.upshift_choice):
                tell(line)
        # A CUDA context maps far more than it uses.
        limit = limited_memory(local_ranks()) if torch.device(self.args.device).type == "cpu" else contextlib.nullcontext()
        watched = numbers_watched(self.args, self.model, self.upshift_choice.plan)
        with self._upshift_as_planned(self.upshift_choice.plan), limit, watched, self._upshift_watch_steps():
            self._upshift_batch_step = self._upshift_make_step(self.upshift_choice, split)
            try:
                output = super()._inner_training_loop(*arguments, **named)
            except JobFailed as error:
                raise JobFailed(f"step {self.state.global_step + 1}: {error}; no weight has moved in it") from None
            finally:
                self._upshift_batch_step, self._upshift_waiting_batches = None, []
        output.metrics["planning_runtime"] = round(planning_seconds, 4)  # train_runtime begins after it
        return output

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collect the batches of one optimizer step, and compute all of them when the last one comes."""
        if self._upshift_batch_step is None:
            return super().training_step(model, inputs, num_items_in_batch)
        self._upshift_waiting_batches.append(inputs)
        self._upshift_waiting_items = num_items_in_batch
        if len(self._upshift_waiting_batches) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        batches, self._upshift_waiting_batches = self._upshift_waiting_batches, []
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            torch.cuda.empty_cache()
        self._upshift_forget_gradients()
        self._upshift_broadcast_statistics()
        loss = self._upshift_batch_step.run(batches, num_items_in_batch, scaled=self._upshift_is_scaled(num_items_in_batch))
        self._upshift_sum_gradients(summed=self._upshift_batch_step.ranks.summed)
        return loss

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        self._upshift_finish_broken_step()
        super()._maybe_log_save_evaluate(*arguments, **named)

    def _upshift_finish_broken_step(self) -> None:
        """Compute the batches that still wait for others after a callback ended the epoch.

        transformers has computed each batch when it came, so their gradients count in the next step.
        """
        batches, self._upshift_waiting_batches = self._upshift_waiting_batches, []
        for batch in batches:
            loss = super().training_step(self.model_wrapped, batch, self._upshift_waiting_items)
            self._tr_loss += loss

    @property
    def _upshift_steps_by_batch(self) -> bool:
        """Return whether the user's training_step must find gradients batch by batch, as in transformers.

        This holds if it is called for each of several batches. It also holds among several ranks, where it may go backward
        itself, or twice.
        """
        is_own = getattr(self.training_step, "__func__", None) is not PlannedTraining.training_step
        return is_own and (self.args.gradient_accumulation_steps > 1 or self._upshift_has_ranks)

    def _upshift_is_scaled(self, num_items: Any) -> bool:
        """Return whether the loss is normalized over the whole step, by transformers' own rule (Trainer.training_step)."""
        said = getattr(self, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        return bool((self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        stack: contextlib.ExitStack = super().compute_loss_context_manager()
        if self.upshift_choice is not None:
            stack.enter_context(autocast(self.upshift_choice.plan))
            stack.enter_context(losses_in_fp32(self.upshift_choice.plan))
        return stack

    # Doing

    @contextlib.contextmanager
    def _upshift_as_planned(self, plan: Plan) -> Iterator[None]:
        """Set up the model, the process and the optimizer by the plan. Restore the process's settings afterwards."""
        if self.upshift_choice is None or self.upshift_choice.planning is None and self._upshift_planned.plan is None:
            self._upshift_divide_model(plan)
            self._upshift_shard_model()
            yield
            return
        threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
        optim, workers = self.args.optim, self.args.dataloader_num_workers
        attention = ATTENTION.of(base_of(self.model).config)
        plain = [module for module in self.model.modules() if COMPILED_CALL.of(module) is None]
        configure_process(plan)
        self._upshift_prepare_model(plan)
        library_optimizers: Any = type(optim)  # an enum
        if not was_set(self.args, "optim") and plan.optim in {*library_optimizers}:
            self.args.optim = library_optimizers(plan.optim)
        if not was_set(self.args, "dataloader_num_workers"):
            self.args.dataloader_num_workers = self.upshift_choice.num_workers
        try:
            yield
        finally:
            while self._upshift_backward_hooks:
                self._upshift_backward_hooks.pop().remove()
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(products)
            self.args.optim, self.args.dataloader_num_workers = optim, workers
            for module in plain if plan.torch_compile != "off" else ():
                COMPILED_CALL.put(module, None)
            if attention in get_args(Attention) and plan.attention != attention:
                set_attention(base_of(self.model), attention)
            if not recomputes(self.args):
                recompute_layers(self.model, 0)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer as transformers.Trainer.create_optimizer does. Build it here if transformers lacks the plan's
        optimizer."""
        plan = self.upshift_choice.plan if self.upshift_choice is not None else None
        library_optimizers: Any = type(self.args.optim)  # an enum
        own = plan is not None and (plan.optim not in {*library_optimizers} or rounds_stochastically(plan) or plan.optim_offload)
        if self.optimizer is None and plan is not None and own:
            kept = {name: getattr(self.args, name) for name in SHARED_ARGUMENTS}
            self.optimizer = build_optimizer(self.model, plan, Arguments(max_steps=1, **kept), sharding=self._upshift_division())
        if self.optimizer is None:
            super().create_optimizer(model)
        self.optimizer = self._upshift_optimizer_of_parts(self.optimizer)
        if plan is not None and plan.optimizer_in_backward and not self._upshift_backward_hooks:
            self._upshift_backward_hooks = list(update_in_backward(self.optimizer))
        return self.optimizer  # type: ignore[no-any-return]

    def _upshift_prepare_model(self, plan: Plan) -> None:
        base = base_of(self.model)
        if plan.precision == "bf16-weights":
            self.model.to(torch.bfloat16)  # what allow=("bf16-weights",) allows
        if plan.precision == "fp8":
            convert_to_fp8(self.model, emulate=plan.device != "cuda")
        self._upshift_divide_model(plan)
        own = ATTENTION.of(base.config)  # one that plans do not know was asked for by the user
        if own in get_args(Attention) and plan.attention != own:
            set_attention(base, plan.attention)
        if not recomputes(self.args):
            recompute_layers(self.model, plan.activation_checkpointing, plan.recompute_granularity)
        compile_layers(self.model, plan)
        self._upshift_shard_model()

    def _upshift_make_step(self, choice: Choice, split: Split) -> BatchStep | None:
        if self._upshift_updates_in_backward or self._upshift_steps_by_batch:
            return None
        planned = choice.planning is not None or self._upshift_planned.plan is not None
        smoothing = self.args.label_smoothing_factor
        chunked = planned and not self._upshift_loss_is_of_script
        head = partial(chunked_loss, self.model, choice.plan, label_smoothing=smoothing) if chunked else contextlib.nullcontext
        halve = partial(halve_part, plan=choice.plan)
        place = self._upshift_place or Mesh(choice.plan)
        ranks = StepOfRanks(self.model, place, on_failure=self._upshift_look_at_memory, halve=halve, fewest=fewest_rows)
        # With the optimizer in the backward pass some weights may have moved: there is no going back.
        halves = ranks.can_halve and not choice.plan.optimizer_in_backward
        return BatchStep(
            plan=choice.plan,
            split=split,
            cuts=planned,
            encoder_decoder=self._upshift_is_encoder_decoder,
            shifts_labels=self._upshift_shifts_labels,
            loss=self._upshift_loss_of,
            backward=self.accelerator.backward,
            computing=head,
            ranks=ranks,
            zero_gradients=partial(zero_gradients, self.model),
            halvings=BatchHalving(
                halve=halve if halves else lambda pair: None,
                size=lambda pair: pair[0].group.num_padded_tokens,
                restart=self._upshift_drop_gradients,
                on_failure=self._upshift_look_at_memory,
                on_halved=lambda old, new, why: self._upshift_ran_out(old[0].shape, new[0].shape, why),
            ),
        )

    def _upshift_loss_of(self, inputs: Any, num_items: Any) -> Tensor:
        """Return the loss of ``compute_loss``.

        transformers smooths labels over logits, which a chunked head never has. Such a head smooths labels itself.
        """
        inputs, model = self._prepare_inputs(inputs), self.model_wrapped
        assert self.upshift_choice is not None
        offloading = offload_activations(model) if self.upshift_choice.plan.activation_offload else contextlib.nullcontext()
        with self.compute_loss_context_manager(), offloading:
            if (
                self.label_smoother is not None
                and self.upshift_choice.plan.loss_chunk_tokens
                and not self._upshift_loss_is_of_script
            ):
                loss: Tensor = model(**inputs)["loss"]  # a mean over labels; LabelSmoother divides by num_items where given
                if num_items is not None:
                    labels = inputs["labels"][:, 1:] if self._upshift_shifts_labels else inputs["labels"]
                    loss = loss * ((labels != IGNORED).sum() / num_items)
            else:
                computed = self.compute_loss(model, inputs, num_items_in_batch=num_items)
                loss = cast("Tensor", computed)  # with outputs it is for return_outputs=True alone
        return loss

    def _upshift_look_at_memory(self) -> None:
        self._upshift_memory_scene = read_memory(torch.device(self.args.device).type)

    def _upshift_forget_gradients(self) -> None:
        """Drop the gradients of this rank's parts, which the model does not know of."""
        if isinstance(self._upshift_plain_optimizer(), ShardedOptimizer):
            self._upshift_plain_optimizer().zero_grad()
        if self._upshift_batch_step is not None:
            self._upshift_batch_step.ranks.forget()

    def _upshift_drop_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self._upshift_forget_gradients()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _upshift_ran_out(self, largest: Shape, smaller: Shape, words: str) -> None:
        assert self.upshift_choice is not None and self._upshift_memory_scene is not None
        autopsy = make_autopsy(
            self._upshift_memory_scene, step=self.state.global_step + 1, plan=self.upshift_choice.plan, model=self.model,
            optimizer=self.optimizer, predicted=self.upshift_choice.predicted, free_when_planned=self.upshift_choice.free_bytes,
            shape=largest, smaller=smaller, message=words,
        )  # fmt: skip
        self.upshift_choice = correct(self.upshift_choice, rows=max(smaller[0], 1))
        if not self.args.should_log:
            return
        path = autopsy.write(Path(self.args.output_dir))
        old, new = (f"{rows} x {width} tokens" for rows, width in (largest, smaller))
        tell(f"step {autopsy.step} ran out of memory with {old} at once ({autopsy.words[:160]})")
        tell(f"it is done again, and so are all after it, with at most {new} at once, to the same gradients; see {path}")
        for line in format_autopsy(autopsy):
            tell(line)
