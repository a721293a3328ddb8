"""Train by ``upshift.Trainer``, and let its evaluations measure the metrics of a task beside the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import EvalPrediction

from upshift.training.arguments import LOSS
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.hf_trainer.choose_plan import Choice, plain_plan
from upshift.training.hf_trainer.loss_split import Split
from upshift.training.hf_trainer.trainer import Trainer
from upshift.training.tasks.metrics.held_out_loss import HeldOutLoss
from upshift.training.tasks.metrics.task_metrics import BatchLoss, TaskMetrics
from upshift.training.tasks.progress import EarlyStopping
from upshift.training.tasks.ranks import objects_of_own_rows

MICRO_BATCH_FIELD = "per_device_train_batch_size"
NO_PLAN = (
    "this run has no plan, so packing and compiled layers are off; "
    f"--set {MICRO_BATCH_FIELD}=N and --set precision=bf16 change the settings"
)


class TaskTrainer(Trainer):
    """``upshift.Trainer`` whose evaluations measure ``metrics``. None: the loss alone.

    They keep what the metrics need of a batch, and not the model's outputs. Each row counts once, on several ranks, too.
    ``batch_loss``: what the loss of a batch is, so that the losses of batches become that of one batch of all rows."""

    def __init__(
        self,
        *,
        metrics: TaskMetrics | None,
        early_stopping: EarlyStopping | None,
        batch_loss: BatchLoss = "mean over labels",
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments, compute_metrics=None if metrics is None else self._compute_metrics)
        self._metrics = metrics
        self._batch_loss = batch_loss
        self._held_out_loss = self._empty_held_out_loss()
        self._early_stopping = early_stopping
        if early_stopping is not None:
            self.add_callback(early_stopping)
        inputs: Any = getattr(self.model, "main_input_name", "")
        if isinstance(inputs, list):  # OneFormer has two, and an evaluation takes one name
            self.model.main_input_name = inputs[0]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Return the batches of a step. Return none if the run had ended before it resumed: transformers would do a step more."""
        was_over = self._early_stopping is not None and self._early_stopping.was_over
        if was_over or self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss as a number [], which some models return as [1]."""
        result: Any = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        return (result[0].mean(), result[1]) if return_outputs else result.mean()

    def _empty_held_out_loss(self) -> HeldOutLoss:
        return HeldOutLoss(self.label_names[0], self._batch_loss, self.accelerator)

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        """Evaluate as transformers does, but for the mean of the losses."""
        self._held_out_loss = self._empty_held_out_loss()
        with objects_of_own_rows():
            output: Any = super().evaluation_loop(*arguments, **named)
        output.metrics[f"{named.get('metric_key_prefix', 'eval')}_{LOSS}"] = self._held_out_loss.mean()
        return output

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return the loss of a batch, what the metrics need of its rows, and a number a row in place of labels."""
        inputs = self._prepare_inputs(inputs)
        of_metrics = () if self._metrics is None else self._metrics.own_inputs
        of_model = {name: value for name, value in inputs.items() if name not in of_metrics}
        own = self._held_out_loss.own_rows(of_model)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, of_model, return_outputs=True)
            if own is not None:
                self._held_out_loss.add(loss if own is of_model else self.compute_loss(model, own), own)
            if self._metrics is None:
                return loss.detach(), None, None
            predictions = self._metrics.predict(self.model, inputs, outputs)
        first = predictions[0] if isinstance(predictions, tuple) else predictions
        return loss.detach(), predictions, torch.zeros(len(first), device=first.device)

    def _compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        assert self._metrics is not None
        dataset: Any = self.eval_dataset
        examples = [dataset[number] for number in range(len(dataset))]
        assert len(prediction.label_ids) == len(examples), "a row is missing, or counted twice"
        return self._metrics.compute(prediction.predictions, examples)


class UnplannedTrainer(TaskTrainer):
    """The trainer for batches that are not rows of equal entries. They, and the settings, stay as they are.

    The images of a chat take a number of entries of their own in the model's inputs, as do the boxes of an image. A plan cuts
    batches by rows. ``reason``: what the user is told of it, or nothing."""

    def __init__(self, *, reason: str = NO_PLAN, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._reason = reason

    def _upshift_choose_locally(self, loader: Any) -> tuple[Choice, Split]:
        plan = plain_plan(
            self._upshift_host(probe=False),
            device=torch.device(self.args.device).type,
            batch=self._train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            num_processes=self.args.world_size,
        )
        return Choice(plan, self._reason), Split(None)


class LabelTrainer(TaskTrainer):
    """The trainer for a loss that is a mean over labels.

    A model may take the number of labels of a global batch, and not divide by it. The loss would then be as many times too large
    as there are micro-batches. ``ignored_label``: the number that its loss leaves out, which a batch has as IGNORED."""

    def __init__(self, *, ignored_label: int = IGNORED, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.model_accepts_loss_kwargs = True  # compute_loss takes the number
        self._ignored_label = ignored_label

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of the labels of ``inputs``, as a share of the mean over ``num_items_in_batch`` labels."""
        is_ignored = inputs["labels"] == IGNORED
        of_model = {**inputs, "labels": inputs["labels"].masked_fill(is_ignored, self._ignored_label)}
        if bool(is_ignored.all()):  # the mean of no labels would be NaN, and so would each later weight
            _, outputs = super().compute_loss(model, of_model, return_outputs=True)
            nothing = outputs["logits"].sum() * 0
            return (nothing, outputs) if return_outputs else nothing
        result: Any = super().compute_loss(model, of_model, return_outputs=return_outputs)
        if num_items_in_batch is None:
            return result
        share = (~is_ignored).sum() / num_items_in_batch
        if self.args.average_tokens_across_devices:
            share = share * self.accelerator.num_processes  # the ranks' gradients are averaged
        return (result[0] * share, result[1]) if return_outputs else result * share


class UnplannedLabelTrainer(UnplannedTrainer, LabelTrainer):
    """The trainer of several ranks for a loss that is a mean over labels."""
