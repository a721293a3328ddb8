"""Define what a user requests of a training run. The Plan decides everything else.

``Arguments`` has the settings of the optimization, by the names of transformers.TrainingArguments. ``TrainRequest`` has them and
everything else. The command line or ``train()`` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator

from upshift.errors import RequestError
from upshift.models.source import AdapterKeywords, AdapterOptions, ModelSource, find_model_to_train
from upshift.planning.trials.runner import ModelChoice
from upshift.training.data.data_options import DataKeywords, DataOptions
from upshift.training.preferences.loss_names import check_smoothing, read_losses, write_losses
from upshift.value import Value

LearningRateSchedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
KtoLoss = Literal["kto", "apo_zero_unpaired"]  # TRL's loss_type of KTOConfig

LEARNING_RATE = 5e-5  # as in transformers' TrainingArguments
BETA = 0.1  # of DPO and KTO, as in TRL's DPOConfig and KTOConfig
SIMPO_GAMMA = 0.5  # as in TRL's CPOConfig
OBJECTIVE_OF = {  # the arguments that are for one objective alone
    "center_rewards_coefficient": "reward",
    "dpo_beta": "dpo",
    "dpo_loss": "dpo",
    "dpo_label_smoothing": "dpo",
    "simpo_gamma": "dpo",
    "kto_beta": "kto",
    "kto_loss": "kto",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
}
SEEDS = 2**32  # number of possible seeds: numpy's generators take no larger ones


INTERVALS = ("eval_steps", "save_steps")  # steps from one event to the next
LOSS = "loss"  # the metric that every evaluation measures


class Arguments(Value):
    """The settings of the optimization."""

    max_steps: int = Field(gt=0)
    learning_rate: float = Field(LEARNING_RATE, gt=0)
    range_test_from: float | None = Field(
        None, gt=0, description="of a test of learning rates: the first one, which grows evenly to learning_rate; None: a run"
    )
    lr_scheduler_type: LearningRateSchedule = "linear"
    warmup_steps: int = Field(0, ge=0)
    warmup_ratio: float | None = Field(None, ge=0, le=1, description="share of max_steps; None: warmup_steps counts")
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, ge=0)
    max_grad_norm: float = Field(1.0, ge=0, description="0: no clipping")
    center_rewards_coefficient: float = Field(
        0.0, ge=0, description="of reward models: the weight of the squared sum of a pair's rewards, which centers them at 0"
    )
    dpo_beta: float = Field(BETA, gt=0, description="of DPO: a larger value keeps the model closer to what it was")
    dpo_loss: str = Field("sigmoid", description="of DPO: one or several losses of pairs, such as sigmoid=0.8,sft=0.2")
    dpo_label_smoothing: float = Field(0.0, ge=0, lt=1, description="of DPO: the share of pairs that are wrong")
    simpo_gamma: float = Field(SIMPO_GAMMA, ge=0, description="of the loss simpo: by how much the better reward shall be larger")
    kto_loss: KtoLoss = Field(
        "kto", description="of KTO: kto compares rewards with the KL term, and apo_zero_unpaired compares them with 0"
    )
    kto_beta: float = Field(BETA, gt=0, description="of KTO: a larger value keeps the model closer to what it was")
    desirable_weight: float = Field(1.0, ge=0, description="of KTO: the weight of the loss of good completions")
    undesirable_weight: float = Field(1.0, ge=0, description="of KTO: the weight of the loss of bad completions")
    seed: int = Field(42, ge=0, lt=SEEDS)
    logging_steps: int = Field(0, ge=0, description="0: no step is logged")
    eval_steps: int | float = Field(0, ge=0, description="0: only at the end; below 1: a share of max_steps, as of save_steps")
    early_stopping_patience: int | None = Field(None, gt=0, description="evaluations without a lower loss; None: no early end")
    load_best: bool = Field(False, description="the final model is that of the best evaluation")
    metric_for_best_model: str = Field(LOSS, description="of the best evaluation; of losses the lowest is the best")
    save_steps: int | float = Field(0, ge=0, description="0: only at the end and when interrupted")
    save_total_limit: int = Field(2, ge=2, description="newest checkpoints that are kept: with one, none if it is damaged")
    neftune_noise_alpha: float | None = Field(None, gt=0, description="of the noise on input embeddings; None: no noise")

    @field_validator(*INTERVALS)
    @classmethod
    def _check_interval(cls, value: float, info: ValidationInfo) -> int | float:
        """Return a number of steps, or a share below 1. Raise RequestError for others."""
        if value >= 1 and not float(value).is_integer():
            option = f"--{str(info.field_name).replace('_', '-')}"
            raise RequestError(
                f"{option} {value:g} is neither a whole number of steps nor a share below 1; give such as 100 or 0.1"
            )
        return value if 0 < value < 1 else int(value)

    @field_validator("dpo_loss")
    @classmethod
    def _check_losses(cls, value: str) -> str:
        """Return the losses of pairs in one order, so that a resumed run may name them in another one."""
        return write_losses(read_losses(value))

    @field_validator("metric_for_best_model")
    @classmethod
    def _check_metric_name(cls, value: str) -> str:
        """Return the name of a metric. transformers takes it with and without the prefix of an evaluation."""
        return value.removeprefix("eval_")

    @property
    def pair_losses(self) -> frozenset[str]:
        """Return the names of the losses of pairs."""
        return frozenset(name for name, _ in read_losses(self.dpo_loss))

    @property
    def has_kl_pass(self) -> bool:
        """Return whether KTO compares rewards with the KL term."""
        return self.kto_loss == "kto"

    def check_pair_losses(self) -> None:
        """Raise RequestError if a setting of the losses of pairs is not used, or does not suit them."""
        check_smoothing(self.pair_losses, self.dpo_label_smoothing)
        if self.simpo_gamma != SIMPO_GAMMA and "simpo" not in self.pair_losses:
            raise RequestError(
                f"--simpo-gamma {self.simpo_gamma:g} is for --dpo-loss simpo, and the loss is {self.dpo_loss}; leave it out, or "
                "use simpo"
            )

    def check_metric(self, metrics: Collection[str], kind: str) -> None:
        """Raise RequestError if the evaluations of a task measure another metric than that of the best model."""
        names = (LOSS, *metrics)
        if self.metric_for_best_model not in names:
            raise RequestError(
                f"--metric-for-best-model {self.metric_for_best_model} is not measured for {kind}; use {' or '.join(names)}"
            )

    def for_steps(self, steps: int) -> Self:
        """Return the arguments for a run of so many steps, with shares as numbers, rounded up as in transformers' Trainer."""
        shares = {name: getattr(self, name) for name in INTERVALS if 0 < getattr(self, name) < 1}
        return self.changed(max_steps=steps, **{name: math.ceil(share * steps) for name, share in shares.items()})

    @property
    def num_warmup_steps(self) -> int:
        """Return the steps in which the learning rate rises, rounded up as in transformers' Trainer."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * self.max_steps)

    def option_for_evaluations(self) -> str | None:
        """Return the name of an argument that needs evaluations during the run, or None if there is none."""
        if self.early_stopping_patience is not None:
            return "early_stopping_patience"
        return "load_best" if self.load_best else None


class RunNumbers(Value):
    """The numbers of a run that are not in ``Arguments``."""

    epochs: float = Field(1.0, gt=0)
    global_batch: int = Field(8, gt=0)
    sequence_length: int | None = Field(None, ge=2, description="None: the default for the model")
    lora_rank: int | None = Field(None, gt=0)
    trial_seconds: float = Field(0.0, ge=0)


TRIAL_SECONDS = 60.0
DEFAULT_OUTPUT = Path("upshift-output")


class PlanOptions(DataKeywords, AdapterKeywords, total=False):
    """Options of ``train`` and ``tune``. The fields of ``TrainRequest`` with these names explain them."""

    eval_data: str | None
    sequence_length: int | None
    global_batch: int
    epochs: float
    plan_file: Path | None
    fixed: tuple[str, ...]
    allow: tuple[str, ...]
    from_config: bool
    tokenizer: Any
    trial_seconds: float
    mup_base: str | None


class TrainRequest(AdapterOptions, RunNumbers, DataOptions):
    """A training run as the user requests it."""

    model: str
    data: str = Field(description="a path, as the user gave it")
    eval_data: str | None = Field(None, description="a path; None: the validation split, or the last documents of the data")
    output: Path = DEFAULT_OUTPUT
    overwrite: bool = False
    resume: bool = Field(False, description="go on from the newest checkpoint of the output")
    report_to: tuple[Tracker, ...] = Field((), description="trackers that get the numbers of the run")
    heal: bool = Field(False, description="a process that is killed is started again, and the others go on")
    max_steps: int | None = Field(None, description="optimizer steps; None: as many as the epochs have")
    arguments: Arguments = Field(Arguments(max_steps=1), description="of the optimization; max_steps above counts, not theirs")
    plan_file: Path | None = Field(None, description="a plan that is written already; it skips the trials")
    fixed: tuple[str, ...] = Field((), description="fields of the plan, as in --set")
    allow: tuple[str, ...] = Field((), description="choices that may change the mathematics")
    from_config: bool = Field(False, description="random weights")
    tokenizer: Any = Field(None, description="a tokenizer, or where one is; None: the model's own")
    trial_seconds: float = Field(TRIAL_SECONDS, ge=0, description="the time to try plans in; 0: trust the prediction")
    find_learning_rate: bool = Field(False, description="try rising learning rates before the run, and take one of them")
    mup_base: str | None = Field(None, description="a narrower model whose learning rates hold, by muP")

    @field_validator("model", "data", "eval_data", mode="before")
    @classmethod
    def _as_text(cls, reference: Any) -> Any:
        """Return the text of a path, because a program may give either."""
        return str(reference) if isinstance(reference, Path) else reference

    @classmethod
    def of(cls, fields: dict[str, Any], arguments: dict[str, Any]) -> TrainRequest:
        """Return the request for a user's options. Raise RequestError that names an invalid option.

        Args:
            fields: the fields of this class without ``arguments`` and ``max_steps``.
            arguments: the fields of ``Arguments``. ``max_steps`` may be None.
        """
        max_steps = arguments.get("max_steps")
        checked = Arguments.from_fields({**arguments, "max_steps": 1 if max_steps is None else max_steps})
        request = cls.from_fields({**fields, "max_steps": max_steps, "arguments": checked.changed(max_steps=1)})
        for name, objective in OBJECTIVE_OF.items():
            value = getattr(checked, name)
            if value != Arguments.model_fields[name].default and request.objective != objective:
                shown = value if isinstance(value, str) else f"{value:g}"
                raise RequestError(
                    f"--{name.replace('_', '-')} {shown} is for --objective {objective}; add --objective {objective}, or leave "
                    "it out"
                )
        checked.check_pair_losses()
        if checked.range_test_from is not None:
            raise RequestError("range_test_from is not an argument of a run; use find_learning_rate")
        if request.find_learning_rate and "learning_rate" in arguments:
            raise RequestError(
                f"--learning-rate {checked.learning_rate:g} is given, and --find-learning-rate finds one; leave one of them out"
            )
        if checked.desirable_weight == checked.undesirable_weight == 0:
            raise RequestError("--desirable-weight and --undesirable-weight are both 0, so nothing is learned; give one above 0")
        request.check_evaluation_size(checked)
        if checked.warmup_ratio is not None and checked.warmup_steps:
            raise RequestError(
                f"--warmup-ratio {checked.warmup_ratio:g} and --warmup-steps {checked.warmup_steps} both say how long the "
                "learning rate rises; leave one of them out"
            )
        return request

    def check_evaluation_size(self, arguments: Arguments) -> None:
        """Raise RequestError if rows are held out beside evaluation data, or if none are and the run needs some."""
        if self.eval_size is None:
            return
        if self.eval_data is not None:
            raise RequestError(
                f"--eval-size {self.eval_size:g} holds rows of the training out, and --eval-data {self.eval_data} is the "
                "evaluation data; leave one of the two out"
            )
        needed = arguments.option_for_evaluations() or ("eval_steps" if arguments.eval_steps else None)
        if self.eval_size == 0 and needed is not None:
            raise RequestError(
                f"--{needed.replace('_', '-')} needs held-out data, and --eval-size 0 holds none out; leave one of the two out"
            )

    @property
    def resume_from(self) -> Path | None:
        return self.output if self.resume else None

    @property
    def clips_gradients(self) -> bool:
        return self.arguments.max_grad_norm > 0

    @property
    def model_choice(self) -> ModelChoice:
        """Return the fields of a Job or a TrialRequest that say which model is trained."""
        return {
            "model_reference": self.model,
            "from_config": self.from_config,
            "adapter": self.as_adapter_options,
        }

    def source(self) -> ModelSource:
        return find_model_to_train(self.model, self.as_adapter_options, has_reward_head=self.has_reward_head)

    def arguments_for(self, steps: int) -> Arguments:
        """Return the arguments for a run of this many optimizer steps."""
        return self.arguments.for_steps(steps)
