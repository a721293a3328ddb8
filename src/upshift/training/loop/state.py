"""Keep track of a run: its file upshift_run.json, which resumed run may go on with it, and its progress.

The file lies beside the checkpoints. It holds the run's request, and the tokens and evaluations so far.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np

from upshift.benchmarking.environment import library_versions
from upshift.debugging.run_report import FOLDER as REPORT_FOLDER
from upshift.errors import RequestError
from upshift.models.source import AdapterOptions
from upshift.training.arguments import Arguments
from upshift.training.batches.sampler import GlobalBatch, Position
from upshift.training.checkpoint.checkpoint import TrainState, save_checkpoint
from upshift.training.checkpoint.directory import (
    AUTOPSIES_NAME,
    REFERENCE_NAME,
    RUN_NAME,
    SHARED_NAME,
    TENSORBOARD_FOLDER,
    finished_run,
    newest_checkpoint,
    replace_text,
    step_of,
    writing,
)
from upshift.training.checkpoint.state import SavedState, seal, unseal
from upshift.training.data.data_options import DataOptions, describe_difference
from upshift.training.data.dataset import TrainingData
from upshift.training.data.tokens import Sequences
from upshift.training.distributed.mesh import Mesh
from upshift.training.job.request import Job
from upshift.training.loop.best_evaluation import choose_best, find_checkpoint_damage
from upshift.training.loop.events import Evaluated, StepDone
from upshift.training.loop.metrics import StepMeter
from upshift.training.loop.save import load_training_state
from upshift.training.preferences.preference_loss import Rewards
from upshift.training.step import StepResult, TrainStep
from upshift.value import Value

logger = logging.getLogger(__name__)

OWN_FILES = (
    RUN_NAME,
    f"{RUN_NAME}.tmp",
    AUTOPSIES_NAME,
    SHARED_NAME,
    REPORT_FOLDER,
    TENSORBOARD_FOLDER,
    REFERENCE_NAME,
    f"{REFERENCE_NAME}.tmp",
)
_REPAIR_ADVICE = (
    "copy it back from a backup, or train on from the weights of the newest checkpoint as a model, with another output directory"
)
# They are no option of the command line, or the option takes another value than the run has.
WITHOUT_WORDS = ("model", "data", "eval_data", "mup_base", "range_test_from", "adam_beta1", "adam_beta2", "adam_epsilon")
CHANGEABLE_ARGUMENTS = (  # a resumed run may change these
    "max_steps", "eval_steps", "save_steps", "save_total_limit", "logging_steps", "early_stopping_patience",
)  # fmt: skip


RewardRow = tuple[int, float, float | None]  # step; reward accuracy and margin, as in Rewards
KlRow = tuple[int, float]  # step; KTO's KL term. Losses without it have no rows


class LoggedStep(Value):
    """Hold what a run logs every ``logging_steps`` steps."""

    step: int
    tokens: int  # seen until the end of the step
    loss: float  # mean since the previous logged step
    learning_rate: float
    gradient_norm: float | None  # None: not computed, or infinite in fp16
    tokens_per_second: float
    reward_accuracy: float | None = None  # of pairs: means since the previous logged step
    reward_margin: float | None = None
    kl: float | None = None  # of rated completions, as the rewards


class Run(Value):
    """The contents of the run file."""

    model: str  # the plan's hash of the model's config
    data: str  # fingerprint of the training sequences
    eval_data: str | None = None  # fingerprint of the held-out sequences; None: there are none, or an earlier version wrote this
    global_batch: int
    sequence_length: int
    objective: str | None = None  # dpo, kto or reward; None: the model's own, whether or not the user named it
    arguments: Arguments
    adapter: AdapterOptions | None = None  # None: the file is older than this field, as for the next
    data_options: DataOptions | None = None
    id: str  # the same in each of its checkpoints
    finished: bool = False
    tokens: tuple[int, ...] = ()  # seen until the end of each step
    evaluations: tuple[tuple[int, int, float], ...] = ()  # step, tokens, loss
    rewards: tuple[RewardRow, ...] = ()  # of the pairs of each step
    evaluation_rewards: tuple[RewardRow, ...] = ()
    kl_terms: tuple[KlRow, ...] = ()  # of the rated completions of each step
    logged_steps: tuple[LoggedStep, ...] = ()
    lost_steps: tuple[int, ...] = ()  # of evaluations lower than the best one that can be loaded: their checkpoints are gone

    def write(self, directory: Path) -> None:
        with writing(directory, name=RUN_NAME, temporary=directory / f"{RUN_NAME}.tmp"):
            replace_text(directory / RUN_NAME, seal(json.dumps(self.model_dump(mode="json"), indent=1)))

    @classmethod
    def read(cls, directory: Path) -> Run:
        """Read the file. Raise RequestError, with what to do next, if the file is missing or damaged."""
        path = directory / RUN_NAME
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RequestError(f"{path} cannot be read ({error.strerror}); {_REPAIR_ADVICE}") from None
        document = unseal(content)
        if document is None:
            raise RequestError(
                f"{path} is {'damaged' if content else 'empty'} and says no more what was trained; {_REPAIR_ADVICE}"
            )
        return cls.from_json(document, origin=str(path))

    def as_of_step(self, step: int) -> Run:
        """Return the run as it was after ``step``. The file may be ahead of the checkpoint."""
        return self.changed(
            tokens=self.tokens[:step],
            evaluations=tuple(evaluation for evaluation in self.evaluations if evaluation[0] <= step),
            rewards=tuple(row for row in self.rewards if row[0] <= step),
            evaluation_rewards=tuple(row for row in self.evaluation_rewards if row[0] <= step),
            kl_terms=tuple(row for row in self.kl_terms if row[0] <= step),
            logged_steps=tuple(logged for logged in self.logged_steps if logged.step <= step),
            finished=False,
        )


def new_run(job: Job, data: TrainingData) -> Run:
    return Run(
        model=job.plan.model,
        **_fingerprints(data),
        global_batch=job.global_batch // job.data_options.rows_together,
        objective=job.data_options.objective if job.data_options.has_pairs else None,
        sequence_length=job.plan.sequence_length,
        arguments=job.arguments,
        adapter=job.adapter,
        data_options=job.data_options,
        id=secrets.token_hex(8),
    )


def open_run(job: Job, data: TrainingData) -> Job:
    """Write the file of a new run, or check that this job may resume the one in the output directory.

    A run that is resumed before its first checkpoint begins again, and keeps its id if it is the same.
    Return the job with the checkpoint from which it resumes, so that all processes take the same one.
    """
    directory = Path(job.output)
    run = new_run(job, data)
    previous_run = Run.read(directory) if (directory / RUN_NAME).exists() else None
    checkpoint = newest_checkpoint(directory) if job.resume else None
    if checkpoint is None:
        if previous_run is not None and previous_run.finished:
            raise finished_run(directory)
        if job.resume and previous_run is not None and _first_difference(previous_run, run) is None:
            run = run.changed(id=previous_run.id)
        run.write(directory)
        return job
    if previous_run is None:
        raise RequestError(f"{directory} has {checkpoint.name} but no {RUN_NAME}; {_REPAIR_ADVICE}")
    _check_same_run(previous_run, run, directory)
    state = SavedState.read(checkpoint).train
    _check_steps(job.arguments.max_steps, state.step, checkpoint)
    if state.run != previous_run.id:
        raise RequestError(f"{checkpoint} is of another run than {directory / RUN_NAME}; move it away, then --resume")
    previous_run = previous_run.as_of_step(state.step)
    lost_steps = _find_lost_steps(previous_run, directory, state.step) if job.arguments.load_best else ()
    previous_run.changed(arguments=job.arguments, eval_data=run.eval_data, lost_steps=lost_steps).write(directory)
    return job.changed(checkpoint=str(checkpoint))


def _find_lost_steps(run: Run, directory: Path, step: int) -> tuple[int, ...]:
    """Return the steps of the lowest evaluations whose checkpoints cannot be loaded. Log a warning about them.

    ``step`` is the step of the checkpoint from which the run resumes.
    """
    best = choose_best(
        list(run.evaluations), step=step, find_damage=lambda earlier_step: find_checkpoint_damage(directory, earlier_step)
    )
    if best.lost:
        logger.warning("%s; the final model will be the best one that can be loaded", best.loss_message)
    return tuple(lost.evaluation[0] for lost in best.lost)


def check_run_file(directory: Path, *, resume: bool, adapter: AdapterOptions) -> None:
    """Raise RequestError if the run file is damaged, or if a run that resumes is finished or had another adapter.

    Call it before anything slow."""
    if not (directory / RUN_NAME).exists():
        return
    previous_run = Run.read(directory)
    if not resume:
        return
    has_checkpoint = newest_checkpoint(directory) is not None
    if previous_run.finished and not has_checkpoint:
        raise finished_run(directory)
    if previous_run.adapter is not None and has_checkpoint:
        adapter.check_same(previous_run.adapter, directory)


def length_of(directory: Path) -> int | None:
    """Return the sequence length of the run in a folder, or None if it has no checkpoint to resume from."""
    if not (directory / RUN_NAME).exists() or newest_checkpoint(directory) is None:
        return None
    return Run.read(directory).sequence_length


def learning_rate_of(directory: Path) -> float | None:
    """Return the learning rate of the run in a folder, or None if it has no checkpoint to resume from."""
    if not (directory / RUN_NAME).exists() or newest_checkpoint(directory) is None:
        return None
    return Run.read(directory).arguments.learning_rate


def check_resumed_options(
    directory: Path, arguments: Arguments, options: DataOptions, *, max_steps: int | None, values: Mapping[str, object]
) -> None:
    """Raise RequestError that names the first option in which a run that resumes differs from what it was before.

    Call it before the data is read. The data itself is compared later, by ``check_resumed_data``.

    Args:
        directory: the output folder.
        arguments: the arguments of the run now. Its numbers of steps do not count.
        options: the options of the training data now.
        max_steps: the requested number of steps. None: it follows from the data.
        values: other fields of ``Run`` that follow from one option each, as they are now.
    """
    checkpoint = newest_checkpoint(directory) if (directory / RUN_NAME).exists() else None
    if checkpoint is None:
        return
    previous_run = Run.read(directory)
    difference = _first_difference(previous_run, previous_run.changed(arguments=arguments, **values))
    if difference is not None:
        raise another_run(directory, *difference)
    _check_same_data_options(previous_run.data_options, options, directory)
    if max_steps is not None:
        _check_steps(max_steps, step_of(checkpoint) or 0, checkpoint)


def _check_steps(max_steps: int, done: int, checkpoint: Path) -> None:
    """Raise RequestError if a run that resumes has done more steps than are requested."""
    if done > max_steps:
        raise RequestError(f"max_steps={max_steps} is less than the {done} steps of {checkpoint}; use {done} or more")


def _check_same_data_options(before: DataOptions | None, now: DataOptions, directory: Path) -> None:
    """Raise RequestError that names the first option of the data that differs. ``before``: None in files of older versions.

    To name the model's own objective is the same as to name none."""
    if before is None:
        return
    before, now = (options.changed(objective=options.pair_objective) for options in (before, now))
    if before != now:
        raise RequestError(
            f"{describe_difference(before, now, str(directory))}; resume with the options of that run, or start anew in another "
            "output directory"
        )


def check_resumed_data(directory: Path, data: TrainingData, options: DataOptions, arguments: Arguments) -> None:
    """Raise RequestError if a run that resumes had other data or another optimization. Call it before planning."""
    if not (directory / RUN_NAME).exists() or newest_checkpoint(directory) is None:
        return
    previous_run = Run.read(directory)
    fingerprints = _fingerprints(data)
    _check_same_run(previous_run, previous_run.changed(arguments=arguments, data_options=options, **fingerprints), directory)


def _fingerprints(data: TrainingData) -> dict[str, str | None]:
    """Return the fields of Run that say what the data is."""
    evaluation = None if data.evaluation is None else fingerprint(data.evaluation)
    return {"data": fingerprint(data.training), "eval_data": evaluation}


def _check_same_run(previous_run: Run, run: Run, directory: Path) -> None:
    """Raise RequestError if the run differs from the previous one in data, model or mathematics. The plan may differ."""
    difference = _first_difference(previous_run, run)
    if difference is not None:
        name, old, new = difference
        if name in ("data", "eval_data") and run.data_options is not None:
            _check_same_data_options(previous_run.data_options, run.data_options, directory)
        raise another_run(directory, name, old, new)


def another_run(directory: Path, name: str, old: object, new: object) -> RequestError:
    """Return the error about a run that resumes with another value than it had."""
    now, before = (f"no {name}" if value is None else f"{name}={value}" for value in (new, old))
    return RequestError(
        f"{now} differs from the run in {directory}, which has {before}; "
        f"resume with {_words_of(name, old)}, or start anew in another output directory"
    )


def _words_of(name: str, value: object) -> str:
    """Return the words of the command line that give a run the value it had. An option that is left out has its default."""
    option = f"--{name.replace('_', '-')}"
    if name in WITHOUT_WORDS or not isinstance(value, bool | int | float | str | None):
        return "the value of that run"
    if value is None or value is False:
        return f"that run's options, without {option}"
    return option if value is True else f"{option} {value}"


def _first_difference(previous_run: Run, run: Run) -> tuple[str, object, object] | None:
    """Return the first name whose value differs, with the previous value and the new one, or None for the same run."""
    names = ("global_batch", "sequence_length", "model", "objective", "data")
    compared = [(name, getattr(previous_run, name), getattr(run, name)) for name in names]
    if previous_run.eval_data is not None:
        compared.append(("eval_data", previous_run.eval_data, run.eval_data))
    for name, value in previous_run.arguments:
        if name not in CHANGEABLE_ARGUMENTS:
            compared.append((name, value, getattr(run.arguments, name)))
    return next(((name, old, new) for name, old, new in compared if old != new), None)


def fingerprint(sequences: Sequences) -> str:
    """Return the number of sequences and a checksum of their contents.

    The log-probabilities of the reference do not count: they follow from the rest and from the model.
    """
    checksum = 0
    for field in fields(sequences):
        array = getattr(sequences, field.name)
        if isinstance(array, np.ndarray) and field.name != "reference":
            checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return f"{len(sequences)} sequences {checksum:08x}"


class Progress:
    """The progress of a run. ``tokens`` starts with 0 and has the tokens seen until the end of each step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.output = Path(job.output)
        self.run = Run.read(self.output)
        self.step = 0
        self.position = Position()
        self.tokens = [0]
        self.losses: list[float] = []
        self._read_lists()

    def _read_lists(self) -> None:
        """Go on with the lists of the run file."""
        self.evaluations = list(self.run.evaluations)
        self.rewards = list(self.run.rewards)
        self.evaluation_rewards = list(self.run.evaluation_rewards)
        self.kl_terms = list(self.run.kl_terms)
        self.logged_steps = list(self.run.logged_steps)

    def add(self, batch: GlobalBatch) -> None:
        """Count a step that is queued. The next one follows from here."""
        self.step += 1
        self.position = batch.next_position
        self.tokens.append(self.tokens[-1] + batch.num_tokens)

    def add_result(self, result: StepResult) -> None:
        """Add the result of the oldest step that has none yet."""
        self.losses.append(result.loss)
        if result.rewards is not None:
            self.rewards.append((self.read_step, result.rewards.accuracy, result.rewards.margin))
            if result.rewards.kl is not None:
                self.kl_terms.append((self.read_step, result.rewards.kl))

    def add_evaluation(self, loss: float, rewards: Rewards | None) -> Evaluated:
        """Add the evaluation after the last step, and return its event."""
        self.evaluations.append((self.step, self.tokens[-1], loss))
        if rewards is None:
            return Evaluated(self.step, self.tokens[-1], loss)
        self.evaluation_rewards.append((self.step, rewards.accuracy, rewards.margin))
        return Evaluated(
            self.step,
            self.tokens[-1],
            loss,
            reward_accuracy=rewards.accuracy,
            reward_margin=rewards.margin,
            kl=rewards.kl,
        )

    @property
    def read_step(self) -> int:
        """Return the last step whose result is known. A GPU may be a step ahead of it."""
        return len(self.losses)

    def log(self, result: StepResult, tokens_per_second: float) -> LoggedStep | None:
        """Log the step of the last result if it is due. Return what is logged, or None if it is not due."""
        every = self.job.arguments.logging_steps
        step = self.read_step
        if not every or step % every:
            return None
        previous_step = self.logged_steps[-1].step if self.logged_steps else max(step - every, 0)
        losses = self.losses[previous_step:step]
        rewards = [row for row in self.rewards[previous_step - step :] if row[0] > previous_step]
        margins = [margin for _, _, margin in rewards if margin is not None]
        kl_terms = [kl for kl_step, kl in self.kl_terms[previous_step - step :] if kl_step > previous_step]
        norm = result.gradient_norm
        logged = LoggedStep(
            step=step,
            tokens=self.tokens[step],
            loss=sum(losses) / len(losses),
            learning_rate=result.learning_rate,
            gradient_norm=norm if norm is not None and math.isfinite(norm) else None,
            tokens_per_second=tokens_per_second,
            reward_accuracy=sum(accuracy for _, accuracy, _ in rewards) / len(rewards) if rewards else None,
            reward_margin=sum(margins) / len(margins) if margins else None,
            kl=sum(kl_terms) / len(kl_terms) if kl_terms else None,
        )
        self.logged_steps.append(logged)
        return logged

    def step_done(self, result: StepResult, logged: LoggedStep | None, meter: StepMeter, resident_bytes: int) -> StepDone:
        """Return the event of the step of the last result. ``logged`` is what ``log`` returned."""
        rewards = result.rewards
        return StepDone(
            step=self.read_step,
            max_steps=self.job.arguments.max_steps,
            tokens=self.tokens[self.read_step],
            loss=result.loss,
            learning_rate=result.learning_rate,
            gradient_norm=result.gradient_norm,
            tokens_per_second=meter.recent_tokens_per_second,
            seconds_left=self.seconds_left(meter),
            resident_bytes=resident_bytes,
            reward_accuracy=None if rewards is None else rewards.accuracy,
            reward_margin=None if rewards is None else rewards.margin,
            kl=None if rewards is None else rewards.kl,
            logged_loss=None if logged is None else logged.loss,
            logged_reward_accuracy=None if logged is None else logged.reward_accuracy,
            logged_reward_margin=None if logged is None else logged.reward_margin,
            logged_kl=None if logged is None else logged.kl,
        )

    def resume_from(self, checkpoint: Path, train_step: TrainStep, mesh: Mesh) -> None:
        state = load_training_state(checkpoint, train_step, mesh)
        self.step = state.step
        self.position = state.position
        self.tokens = [0, *self.run.tokens]
        self.losses = list(state.loss_curve)

    @property
    def loss_curve(self) -> list[tuple[int, float]]:
        return list(zip(self.tokens[1:], self.losses, strict=True))

    @property
    def evaluation_is_due(self) -> bool:
        eval_steps = self.job.arguments.eval_steps
        is_requested_step = self.step in self.job.evaluate_at_steps
        has_crossed_target = any(self.tokens[-2] < target <= self.tokens[-1] for target in self.job.evaluate_at_tokens)
        return is_requested_step or has_crossed_target or (eval_steps > 0 and self.step % eval_steps == 0)

    @property
    def best_evaluation(self) -> tuple[int, int, float] | None:
        """Return the first evaluation with the lowest loss (step, tokens, loss), or None before the first one."""
        return min(self.evaluations, key=lambda evaluation: evaluation[2], default=None)

    @property
    def best_step(self) -> int | None:
        """Return the step whose checkpoint has to stay until the end of the run, or None.

        It is the step with the lowest held-out loss, without the steps whose checkpoints were gone when the run resumed.
        """
        if not self.job.arguments.load_best:
            return None
        loadable = [evaluation for evaluation in self.evaluations if evaluation[0] not in self.run.lost_steps]
        return min(loadable, key=lambda evaluation: evaluation[2])[0] if loadable else None

    @property
    def patience_is_over(self) -> bool:
        """Return whether as many evaluations as the run has patience for had no lower loss than the best one before them."""
        patience = self.job.arguments.early_stopping_patience
        if patience is None or self.best_evaluation is None:
            return False
        return len(self.evaluations) - 1 - self.evaluations.index(self.best_evaluation) >= patience

    def seconds_left(self, meter: StepMeter) -> float:
        """Return the estimated seconds from the last result until the first of the requested ends."""
        step = self.read_step
        tokens = self.tokens[step]
        steps = float(self.job.arguments.max_steps - step)
        if self.job.stop_after_tokens:
            steps = min(steps, (self.job.stop_after_tokens - tokens) * step / tokens)
        seconds = steps * meter.recent_step_seconds
        if self.job.stop_after_seconds:
            seconds = min(seconds, self.job.stop_after_seconds - meter.seconds)
        return max(seconds, 0.0)

    @property
    def state(self) -> TrainState:
        return TrainState(
            step=self.step,
            position=self.position,
            seed=self.job.arguments.seed,
            tokens_seen=self.tokens[-1],
            plan=self.job.recorded_plan.model_dump(),
            loss_curve=tuple(self.losses),
            versions=library_versions(),
            best_evaluation_loss=min((loss for _, _, loss in self.evaluations), default=None),
            run=self.run.id,
        )

    def write_run(self, folder: Path, *, finished: bool = False) -> None:
        """Write the run file.

        It is written before each checkpoint, so it may be ahead of the newest checkpoint but never behind it.
        """
        run = self.run.changed(
            tokens=tuple(self.tokens[1:]),
            evaluations=tuple(self.evaluations),
            rewards=tuple(self.rewards),
            evaluation_rewards=tuple(self.evaluation_rewards),
            kl_terms=tuple(self.kl_terms),
            logged_steps=tuple(self.logged_steps),
            finished=finished,
        )
        run.write(folder)

    def write_to(self, folder: Path, train_step: TrainStep) -> None:
        """Write everything that another process needs to go on from here."""
        save_checkpoint(
            folder,
            model=train_step.model,
            tokenizer=None,
            optimizer=train_step.optimizer,
            state=self.state,
            scheduler_state=train_step.schedule_state(),
            scaler_state=train_step.scaler.state_dict() if train_step.scaler.is_enabled() else None,
        )
        self.write_run(folder)

    def read_from(self, folder: Path, train_step: TrainStep, mesh: Mesh) -> None:
        """Go on from the state in a folder that ``write_to`` wrote."""
        checkpoint = newest_checkpoint(folder)
        assert checkpoint is not None
        self.run = Run.read(folder)
        self._read_lists()
        self.resume_from(checkpoint, train_step, mesh)
