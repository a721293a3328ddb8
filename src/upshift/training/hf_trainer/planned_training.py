"""Choose a plan before the first step of ``upshift.Trainer``, and run every step by it.

PlannedTraining comes before transformers' Trainer classes in the bases of ``upshift.Trainer``. Methods that a subclass of the
user overrides stay in charge: its own ``training_step`` is called, and its ``compute_loss`` is measured like any other loss
before a batch is cut.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
import transformers
from torch import Tensor, nn

from upshift.errors import JobFailed, RequestError
from upshift.internals.torch_names import COMPILED_CALL
from upshift.internals.transformers_names import ATTENTION, TRAINER_METHODS
from upshift.models.adapter import base_of
from upshift.models.ops.activation_checkpointing import recompute_layers, restored_checkpointing
from upshift.models.ops.block_attention import set_attention
from upshift.models.ops.chunked_loss import labels_counted
from upshift.models.quantized import keep_trainable
from upshift.planning.plan import Attention, Plan
from upshift.training.arguments import Arguments
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.distributed.mesh import Mesh
from upshift.training.held_memory import limited_memory
from upshift.training.hf_trainer.arguments import (
    builds_optimizer,
    check_devices,
    check_fixed,
    check_limits,
    chose_recomputation,
    given_precision,
    local_ranks,
    opt_in_fields,
    refuse_other_engines,
    refuse_unsupported,
    was_set,
)
from upshift.training.hf_trainer.choose_plan import Choice, PlannedState, as_tuple, shrink_micro_batch
from upshift.training.hf_trainer.distributed import DistributedTraining
from upshift.training.hf_trainer.loss_split import Split
from upshift.training.hf_trainer.monitor import StepMonitor, hidden_debug_option, plan_lines, print_line, watched_numerics
from upshift.training.hf_trainer.patching import forward_in_precision
from upshift.training.hf_trainer.plan_mixin import PlanMixin
from upshift.training.hf_trainer.step import BatchStep, StepExchange, halve_item, smallest_item, zero_gradients
from upshift.training.optimizers.build import build_optimizer, update_in_backward
from upshift.training.optimizers.sharded import ShardedOptimizer
from upshift.training.out_of_memory import BatchHalving, Halved, MemoryReadings, format_autopsy, make_autopsy, read_memory
from upshift.training.prepare import (
    chunked_loss,
    compile_layers,
    configure_process,
    convert_to_fp8,
    losses_in_fp32,
    offload_activations,
    without_search_for_packed_rows,
)

SHARED_ARGUMENTS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "seed")


def check_order_of_bases(trainer_class: type) -> None:
    """Raise RequestError if a method of Upshift would hide one of another Trainer, such as its training_step.

    This is so if ``upshift.Trainer`` comes before that Trainer in the bases of a class, and both define the method. A Trainer
    that Upshift's own classes are made of is no other one.
    """
    order = trainer_class.__mro__
    planned_class = next(ancestor for ancestor in order if "_upshift_library_class" in vars(ancestor))
    for base in order[order.index(PlannedTraining) : order.index(transformers.Trainer)]:
        if base in planned_class.__mro__ or not issubclass(base, transformers.Trainer) or base is transformers.Seq2SeqTrainer:
            continue
        name = _hidden_name(base, order)
        if name is not None:
            mixing = [ancestor for ancestor in order if issubclass(ancestor, planned_class) and issubclass(ancestor, base)][-1]
            other = next(ancestor for ancestor in mixing.__bases__ if issubclass(ancestor, base))
            raise RequestError(
                f"class {mixing.__name__}: {other.__name__} comes after upshift.Trainer, which would hide its {name}; "
                f"write class {mixing.__name__}({other.__name__}, upshift.Trainer)"
            )


def _hidden_name(base: type, order: Sequence[type]) -> str | None:
    """Return a method or attribute of ``base`` that a class of Upshift before it in ``order`` defines, too, or None."""
    before = [ancestor for ancestor in order[: order.index(base)] if not issubclass(ancestor, base)]
    hiding = [ancestor for ancestor in before if ancestor.__module__.partition(".")[0] == "upshift"]
    # Upshift's __init__ calls the one behind it.
    names = [name for name in vars(base) if not name.startswith("__")]
    return next((name for name in names if any(name in vars(ancestor) for ancestor in hiding)), None)


class PlannedTraining(StepMonitor, PlanMixin, DistributedTraining):
    """The training half of ``upshift.Trainer``.

    Args:
        plan: the plan to run.
        fixed: fields of the plan, as "field=value".
        allow: changes of the mathematics that the plan may make.
        trial_seconds: the time limit of the trials of plans, which never take more than 5 % of the run. 0: no trials. None: one
            minute, or 2 % of the run if that is more, and at most five minutes.
        memory_limit_gib: the memory that the process (on a GPU: the device) may hold. None: all free memory.
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
        check_order_of_bases(type(self))
        options = vars(self).get("_upshift_planned") or PlannedState(
            plan, as_tuple(fixed), as_tuple(allow), trial_seconds, memory_limit_gib
        )
        options.check()
        super().__init__(*arguments, **named)
        refuse_unsupported(self.args)
        refuse_other_engines(self)
        check_devices(self.args)
        optimizer_given = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        check_limits(memory_limit_gib=options.memory_limit_gib, trial_seconds=options.trial_seconds)
        requested = (*options.fixed, *(opt_in_fields(options.plan) if options.plan is not None else ()))
        check_fixed(requested, self.args, device=torch.device(self.args.device).type, optimizer_given=optimizer_given)
        keep_trainable(self.model)
        self._upshift_planned = options
        self.upshift_choice: Choice | None = None
        self._upshift_batch_step: BatchStep | None = None
        self._upshift_waiting_batches: list[Any] = []
        self._upshift_waiting_items: Any = None  # num_items_in_batch of the step of these batches
        self._upshift_memory_readings: MemoryReadings | None = None  # read when a step ran out of memory
        self._upshift_num_workers: int | None = None  # processes that draw batches while the plan runs; None: by the arguments
        self._upshift_backward_hooks: list[Any] = []  # the hooks that update weights in the backward pass

    # The run

    def train(self, *arguments: Any, **named: Any) -> Any:
        with hidden_debug_option(self.args):
            return super().train(*arguments, **named)

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        self.upshift_choice = None  # the loss is measured without the plan of an earlier training
        start = time.perf_counter()
        self.upshift_choice, split = self._upshift_choose()
        planning_seconds = time.perf_counter() - start
        if self.args.should_log:
            for line in plan_lines(self.upshift_choice):
                print_line(line)
        # On a GPU there is no limit of mapped memory: a CUDA context maps far more than it uses.
        is_on_cpu = torch.device(self.args.device).type == "cpu"
        limit = limited_memory(local_ranks()) if is_on_cpu else contextlib.nullcontext()
        watched = watched_numerics(self.args, self.model, self.upshift_choice.plan)
        plan = self.upshift_choice.plan
        applied = self._upshift_plan_applied(plan)
        in_precision = self._upshift_in_precision(plan)
        with restored_checkpointing(self._upshift_part), applied, in_precision, limit, watched, self._upshift_watch_steps():
            self._upshift_batch_step = self._upshift_make_step(self.upshift_choice, split)
            try:
                output = super()._inner_training_loop(*arguments, **named)
            finally:
                self._upshift_batch_step = None
                self._upshift_waiting_batches = []
        output.metrics["planning_runtime"] = round(planning_seconds, 4)  # train_runtime does not include it
        return output

    def get_train_dataloader(self) -> Any:
        """Return the loader as transformers.Trainer does, with the plan's number of workers while a plan runs.

        The number is for the training data alone: nothing was measured of the evaluation.
        """
        num_workers = self.args.dataloader_num_workers
        if self._upshift_num_workers is not None:
            self.args.dataloader_num_workers = self._upshift_num_workers
        try:
            return super().get_train_dataloader()
        finally:
            self.args.dataloader_num_workers = num_workers

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collect the batches of one optimizer step. Compute all of them when the last one arrives.

        Return the loss of the step then, and zero before.
        """
        if self._upshift_batch_step is None:
            return super().training_step(model, inputs, num_items_in_batch)
        self._upshift_waiting_batches.append(inputs)
        self._upshift_waiting_items = num_items_in_batch
        if len(self._upshift_waiting_batches) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        batches = self._upshift_waiting_batches
        self._upshift_waiting_batches = []
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers
        empty_cache_steps = self.args.torch_empty_cache_steps
        if empty_cache_steps is not None and self.state.global_step % empty_cache_steps == 0:
            torch.cuda.empty_cache()
        self._upshift_discard_shard_gradients()
        self._upshift_broadcast_statistics()
        try:
            loss = self._upshift_batch_step.run(batches, num_items_in_batch, scaled=self._upshift_is_scaled(num_items_in_batch))
        except JobFailed as error:
            raise JobFailed(f"step {self.state.global_step + 1}: {error}; no weight has moved in it") from None
        self._upshift_sum_gradients(self._upshift_batch_step.exchange)
        return loss

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        self._upshift_compute_waiting_batches()
        super()._maybe_log_save_evaluate(*arguments, **named)

    def _upshift_compute_waiting_batches(self) -> None:
        """Compute the batches that still wait for others when a callback has ended the epoch in the middle of a step.

        transformers computes each batch when it arrives, so the gradients of these batches count in the next step.
        """
        batches = self._upshift_waiting_batches
        self._upshift_waiting_batches = []
        for batch in batches:
            loss = super().training_step(self.model_wrapped, batch, self._upshift_waiting_items)
            self._tr_loss += loss

    @property
    def _upshift_has_own_step(self) -> bool:
        """Return whether the script's own training_step must find gradients batch by batch, as in transformers.

        This is so if it is called for each of several batches, and with several ranks, because it may run the backward pass
        itself, or twice.
        """
        is_own = getattr(self.training_step, "__func__", None) is not PlannedTraining.training_step
        return is_own and (self.args.gradient_accumulation_steps > 1 or self._upshift_has_ranks)

    def _upshift_is_scaled(self, num_items: Any) -> bool:
        """Return whether the loss is normalized over the whole step, by the rule of transformers.Trainer.training_step."""
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is not None:
            return bool(is_scaled)
        return bool((self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        stack: contextlib.ExitStack = super().compute_loss_context_manager()
        if self.upshift_choice is not None:
            stack.enter_context(losses_in_fp32(self.upshift_choice.plan))
        return stack

    def _upshift_in_precision(self, plan: Plan) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model runs in the plan's precision, if accelerate does not see to it."""
        if given_precision(self.args) is not None:
            return contextlib.nullcontext()
        has_own_step = getattr(self.training_step, "__func__", None) is not PlannedTraining.training_step
        reads_outputs = self._upshift_uses_script_loss or has_own_step or self.label_smoother is not None
        return forward_in_precision(self.model, plan, reads_outputs=reads_outputs)

    # The setup by the plan

    @contextlib.contextmanager
    def _upshift_plan_applied(self, plan: Plan) -> Iterator[None]:
        """Set up the model, the process and the optimizer by the plan while open. Restore the process settings on leaving."""
        if self.upshift_choice is None or self.upshift_choice.planning is None and self._upshift_planned.plan is None:
            self._upshift_divide_model(plan)
            self._upshift_shard_model()
            yield
            return
        num_threads = torch.get_num_threads()
        matmul_precision = torch.get_float32_matmul_precision()
        optim = self.args.optim
        attention = ATTENTION.of(base_of(self._upshift_part).config)
        uncompiled = [module for module in self.model.modules() if COMPILED_CALL.of(module) is None]
        configure_process(plan)
        self._upshift_prepare_model(plan)
        library_optimizers: Any = type(optim)  # an enum
        if not was_set(self.args, "optim") and plan.optim in {*library_optimizers}:
            self.args.optim = library_optimizers(plan.optim)
        if not was_set(self.args, "dataloader_num_workers"):
            self._upshift_num_workers = self.upshift_choice.num_workers
        try:
            yield
        finally:
            while self._upshift_backward_hooks:
                self._upshift_backward_hooks.pop().remove()
            torch.set_num_threads(num_threads)
            torch.set_float32_matmul_precision(matmul_precision)
            self.args.optim = optim
            self._upshift_num_workers = None
            if plan.torch_compile != "off":
                for module in uncompiled:
                    COMPILED_CALL.put(module, None)
            if attention in get_args(Attention) and plan.attention != attention:
                set_attention(base_of(self._upshift_part), attention)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer as transformers.Trainer.create_optimizer does, or build one that transformers lacks."""
        plan = self.upshift_choice.plan if self.upshift_choice is not None else None
        is_missing = self.optimizer is None
        if self.optimizer is None and plan is not None and builds_optimizer(plan, self.args):
            arguments = Arguments(max_steps=1, **{name: getattr(self.args, name) for name in SHARED_ARGUMENTS})
            decayed = self.get_decay_parameter_names(self.model)
            sharding = self._upshift_update_sharding()
            self.optimizer = build_optimizer(self.model, plan, arguments, sharding=sharding, decayed=decayed)
        if self.optimizer is None:
            super().create_optimizer(model)
        self.optimizer = self._upshift_shard_optimizer(self.optimizer)
        if is_missing:
            self._upshift_made_optimizer = self.optimizer
        if plan is not None and plan.optimizer_in_backward and not self._upshift_backward_hooks:
            self._upshift_backward_hooks = list(update_in_backward(self.optimizer))
        return self.optimizer  # type: ignore[no-any-return]

    def _upshift_prepare_model(self, plan: Plan) -> None:
        base = base_of(self._upshift_part)
        if plan.precision == "bf16-weights":
            self.model.to(torch.bfloat16)  # what allow=("bf16-weights",) allows
        if plan.precision == "fp8":
            convert_to_fp8(self._upshift_part, emulate=plan.device != "cuda")
        self._upshift_divide_model(plan)
        attention = ATTENTION.of(base.config)
        # An attention that plans do not know was chosen by the user, and stays.
        if attention in get_args(Attention) and plan.attention != attention:
            set_attention(base, plan.attention)
        if not chose_recomputation(self.args):
            recompute_layers(self._upshift_part, plan.activation_checkpointing, plan.recompute_granularity)
        compile_layers(self._upshift_part, plan)
        self._upshift_shard_model()

    def _upshift_make_step(self, choice: Choice, split: Split) -> BatchStep | None:
        if self._upshift_updates_in_backward or self._upshift_has_own_step:
            return None
        is_planned = choice.planning is not None or self._upshift_planned.plan is not None
        smoothing = self.args.label_smoothing_factor
        uses_chunked_head = is_planned and not self._upshift_uses_script_loss
        loss_context: Any = contextlib.nullcontext
        label_limit: Any = lambda num_labels, positions: contextlib.nullcontext()  # noqa: E731
        if uses_chunked_head:
            label_limit = partial(labels_counted, base_of(self.model))
            loss_context = partial(chunked_loss, self.model, choice.plan, label_smoothing=smoothing)
        halve = partial(halve_item, plan=choice.plan)
        mesh = self._upshift_mesh or Mesh(choice.plan)
        exchange = StepExchange(self.model, mesh, on_failure=self._upshift_read_memory, halve=halve, shrink=smallest_item)
        # If the optimizer runs in the backward pass, some weights have moved, and the step cannot be repeated.
        can_halve = exchange.can_halve and not choice.plan.optimizer_in_backward
        return BatchStep(
            plan=choice.plan,
            split=split,
            cuts_batches=is_planned,
            encoder_decoder=self._upshift_is_encoder_decoder,
            shifts_labels=self._upshift_shifts_labels,
            compute_loss=self._upshift_compute_loss,
            backward=self.accelerator.backward,
            loss_context=loss_context,
            label_limit=label_limit,
            exchange=exchange,
            zero_gradients=partial(zero_gradients, self.model),
            halving=BatchHalving(
                halve=halve if can_halve else lambda item: None,
                size=lambda item: item[0].group.num_padded_tokens,
                restart=self._upshift_discard_gradients,
                on_failure=self._upshift_read_memory,
                on_halved=lambda item, half, why: self._upshift_on_out_of_memory(Halved(item[0].shape, half[0].shape, why)),
            ),
        )

    def _upshift_compute_loss(self, inputs: Any, num_items: Any) -> Tensor:
        """Return the loss of ``compute_loss``.

        transformers smooths labels over the logits. A chunked head has no logits of the whole batch, so it smooths labels itself.
        """
        inputs = self._prepare_inputs(inputs)
        model = self.model_wrapped
        assert self.upshift_choice is not None
        plan = self.upshift_choice.plan
        offloading = offload_activations(model) if plan.activation_offload else contextlib.nullcontext()
        head_smooths = self.label_smoother is not None and plan.loss_chunk_tokens and not self._upshift_uses_script_loss
        searching: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._upshift_uses_library_loss and isinstance(inputs, Mapping):
            searching = without_search_for_packed_rows(inputs, plan)
        with self.compute_loss_context_manager(), offloading, searching:
            if not head_smooths:
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items)
                return cast("Tensor", loss)  # compute_loss returns outputs too only with return_outputs=True
            mean: Tensor = model(**inputs)["loss"]  # over labels
            if num_items is None:
                return mean
            # LabelSmoother divides by num_items if it is given.
            labels = inputs["labels"][:, 1:] if self._upshift_shifts_labels else inputs["labels"]
            # compute_loss multiplies a loss over the labels of all ranks by their number, and loss_share divides by it.
            counts_all_ranks = self.args.average_tokens_across_devices and self._upshift_is_scaled(num_items)
            num_ranks = self.accelerator.num_processes if counts_all_ranks else 1
            return cast("Tensor", mean * ((labels != IGNORED).sum() / num_items) * num_ranks)

    def _upshift_read_memory(self) -> None:
        self._upshift_memory_readings = read_memory(torch.device(self.args.device).type)

    def _upshift_discard_shard_gradients(self) -> None:
        """Discard the gradients of this rank's shards, which are not gradients of the model's parameters."""
        if isinstance(self._upshift_plain_optimizer(), ShardedOptimizer):
            self._upshift_plain_optimizer().zero_grad()
        if self._upshift_batch_step is not None:
            self._upshift_batch_step.exchange.discard_gradients()

    def _upshift_discard_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self._upshift_discard_shard_gradients()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _upshift_on_out_of_memory(self, halved: Halved) -> None:
        assert self.upshift_choice is not None and self._upshift_memory_readings is not None
        autopsy = make_autopsy(
            self._upshift_memory_readings,
            step=self.state.global_step + 1,
            plan=self.upshift_choice.plan,
            model=self.model,
            optimizer=self.optimizer,
            predicted=self.upshift_choice.predicted,
            free_before=self.upshift_choice.free_bytes,
            halved=halved,
        )
        self.upshift_choice = shrink_micro_batch(self.upshift_choice, rows=max(halved.smaller[0], 1))
        if not self.args.should_log:
            return
        path = autopsy.write(Path(self.args.output_dir))
        largest_text, smaller_text = (f"{num_rows} x {width} tokens" for num_rows, width in (halved.largest, halved.smaller))
        print_line(f"step {autopsy.step} ran out of memory with {largest_text} at once ({autopsy.words[:160]})")
        print_line(
            f"it is done again, and so are all after it, with at most {smaller_text} at once, to the same gradients; see {path}"
        )
        for line in format_autopsy(autopsy):
            print_line(line)
