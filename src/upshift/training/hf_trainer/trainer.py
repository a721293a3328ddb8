"""Provide ``upshift.Trainer`` and ``upshift.Seq2SeqTrainer``: change one import, and every step runs by a plan.

Callbacks, logs, schedules, samplers and metrics run in the code of transformers. Upshift replaces the way in which a global
batch is cut and computed, the memory use of evaluation, and the files of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import transformers

from upshift.errors import MissingExtra
from upshift.training.hf_trainer.choose_plan import PlannedState, as_tuple
from upshift.training.hf_trainer.evaluation import StreamedEvaluation
from upshift.training.hf_trainer.planned_training import PlannedTraining
from upshift.training.hf_trainer.resume import CheckpointResuming

if TYPE_CHECKING:
    import datasets
    import torch
    from torch import nn
    from torch.utils.data import Dataset, IterableDataset

    from upshift.planning.plan import Plan

if find_spec("accelerate") is None:
    raise MissingExtra(library="accelerate", extra="trainer", purpose="upshift.Trainer")


class Trainer(PlannedTraining, StreamedEvaluation, CheckpointResuming, transformers.Trainer):
    """transformers.Trainer with five more arguments: ``plan``, ``fixed``, ``allow``, ``trial_seconds`` and ``memory_limit_gib``.

    PlannedTraining describes them.
    """

    _upshift_library_class = transformers.Trainer

    if TYPE_CHECKING:  # the mix-ins pass on the arguments that they do not read; a test holds this to transformers' own signature

        def __init__(
            self,
            model: transformers.PreTrainedModel | nn.Module | None = None,
            args: transformers.TrainingArguments | None = None,
            data_collator: transformers.DataCollator | None = None,
            train_dataset: Dataset[Any] | IterableDataset[Any] | datasets.Dataset | None = None,
            eval_dataset: Dataset[Any] | dict[str, Dataset[Any]] | datasets.Dataset | None = None,
            processing_class: (
                transformers.PreTrainedTokenizerBase
                | transformers.BaseImageProcessor
                | transformers.FeatureExtractionMixin
                | transformers.ProcessorMixin
                | None
            ) = None,
            model_init: Callable[..., transformers.PreTrainedModel] | None = None,
            compute_loss_func: Callable[..., torch.Tensor] | None = None,
            compute_metrics: Callable[[transformers.EvalPrediction], dict[str, Any]] | None = None,
            callbacks: list[transformers.TrainerCallback] | None = None,
            optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
            optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
            preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
            *,
            plan: Plan | None = None,
            fixed: str | Sequence[str] = (),
            allow: str | Sequence[str] = (),
            trial_seconds: float | None = None,
            memory_limit_gib: float | None = None,
        ) -> None: ...


class Seq2SeqTrainer(PlannedTraining, StreamedEvaluation, CheckpointResuming, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer, which evaluates by generation, with the same five arguments."""

    _upshift_library_class = transformers.Seq2SeqTrainer

    if TYPE_CHECKING:  # the mix-ins pass on the arguments that they do not read; a test holds this to transformers' own signature

        def __init__(
            self,
            model: transformers.PreTrainedModel | nn.Module | None = None,
            args: transformers.TrainingArguments | None = None,
            data_collator: transformers.DataCollator | None = None,
            train_dataset: Dataset[Any] | IterableDataset[Any] | datasets.Dataset | None = None,
            eval_dataset: Dataset[Any] | dict[str, Dataset[Any]] | datasets.Dataset | None = None,
            processing_class: (
                transformers.PreTrainedTokenizerBase
                | transformers.BaseImageProcessor
                | transformers.FeatureExtractionMixin
                | transformers.ProcessorMixin
                | None
            ) = None,
            model_init: Callable[..., transformers.PreTrainedModel] | None = None,
            compute_loss_func: Callable[..., torch.Tensor] | None = None,
            compute_metrics: Callable[[transformers.EvalPrediction], dict[str, Any]] | None = None,
            callbacks: list[transformers.TrainerCallback] | None = None,
            optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
            preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
            *,
            plan: Plan | None = None,
            fixed: str | Sequence[str] = (),
            allow: str | Sequence[str] = (),
            trial_seconds: float | None = None,
            memory_limit_gib: float | None = None,
        ) -> None: ...


def with_plans(
    library_class: type[transformers.Trainer], planned_class: type[Trainer], *, module: str
) -> type[transformers.Trainer]:
    """Return a class of the same name in ``module``: another library's Trainer, with ``planned_class`` behind it.

    The library's methods stay in charge, and their calls of super() reach Upshift. The class takes the five arguments of
    ``upshift.Trainer`` by name.
    """

    def __init__(
        self: Any,
        *arguments: Any,
        plan: Plan | None = None,
        fixed: str | Sequence[str] = (),
        allow: str | Sequence[str] = (),
        trial_seconds: float | None = None,
        memory_limit_gib: float | None = None,
        **named: Any,
    ) -> None:
        self._upshift_planned = PlannedState(plan, as_tuple(fixed), as_tuple(allow), trial_seconds, memory_limit_gib)
        library_class.__init__(self, *arguments, **named)

    name = library_class.__name__
    members = {"__init__": __init__, "__module__": module, "__qualname__": name, "__doc__": library_class.__doc__}
    return type(name, (library_class, planned_class), members)
