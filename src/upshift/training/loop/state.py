"""Track how far a run came: the contents of its checkpoints and of its file, beside weights and optimizer states.

Keep upshift_run.json, beside the checkpoints: the run's request and how far it came. Decide what may resume.
"""

from __future__ import annotations

import json
import secrets
import zlib
from pathlib import Path

import numpy as np

from upshift.benchmarking.environment import library_versions
from upshift.debugging.run_report import FOLDER as REPORT_FOLDER
from upshift.errors import RequestError
from upshift.training.arguments import Arguments
from upshift.training.batches.sampler import GlobalBatch, Position
from upshift.training.checkpoint.checkpoint import TrainState, save_checkpoint
from upshift.training.checkpoint.directory import newest_checkpoint, replace_text, writing
from upshift.training.checkpoint.state import SavedState, seal, unseal
from upshift.training.data.tokens import Sequences
from upshift.training.distributed.mesh import Mesh
from upshift.training.job.request import Job
from upshift.training.loop.metrics import StepMeter
from upshift.training.loop.save import load_training_state
from upshift.training.out_of_memory import AUTOPSIES_NAME
from upshift.training.step import StepResult, TrainStep
from upshift.value import Value

RUN_NAME = "upshift_run.json"
SHARED_NAME = "upshift_shared"  # folder of the data that the ranks of a launcher read, until the run is finished
OWN_FILES = (RUN_NAME, f"{RUN_NAME}.tmp", AUTOPSIES_NAME, SHARED_NAME, REPORT_FOLDER)
_REPAIR_ADVICE = (
    "copy it back from a backup, or train on from the weights of the newest checkpoint as a model, with another output directory"
)
CHANGEABLE_ARGUMENTS = ("max_steps", "eval_steps", "save_steps", "save_total_limit")  # arguments that a resumed run may have anew


class Run(Value):
    model: str  # the plan's hash of the model's config
    data: str  # fingerprint of the training sequences
    global_batch: int
    sequence_length: int
    arguments: Arguments
    id: str  # the same in each of its checkpoints
    finished: bool = False
    tokens: tuple[int, ...] = ()  # seen after each step
    evaluations: tuple[tuple[int, int, float], ...] = ()  # step, tokens, loss

    def write(self, directory: Path) -> None:
        with writing(directory, name=RUN_NAME, temporary=directory / f"{RUN_NAME}.tmp"):
            replace_text(directory / RUN_NAME, seal(json.dumps(self.model_dump(mode="json"), indent=1)))

    @classmethod
    def read(cls, directory: Path) -> Run:
        """Read the file. Raise RequestError, with what to do, if it is not as it was written."""
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

    def cut(self, step: int) -> Run:
        """Return the run as it was after ``step``: the file may be ahead of the checkpoint."""
        kept = tuple(entry for entry in self.evaluations if entry[0] <= step)
        return self.changed(tokens=self.tokens[:step], evaluations=kept, finished=False)


def new_run(job: Job, sequences: Sequences) -> Run:
    return Run(
        model=job.plan.model,
        data=fingerprint(sequences),
        global_batch=job.global_batch,
        sequence_length=job.plan.sequence_length,
        arguments=job.arguments,
        id=secrets.token_hex(8),
    )


def open_run(job: Job, sequences: Sequences) -> Job:
    """Write the file of a new run, or check that this job may resume the one in the output directory.

    Return the job with the checkpoint that it goes on from: all processes take the same one.
    """
    directory = Path(job.output)
    run = new_run(job, sequences)
    before = Run.read(directory) if (directory / RUN_NAME).exists() else None
    checkpoint = newest_checkpoint(directory) if job.resume else None
    if checkpoint is None:
        if before is not None and before.finished:
            raise RequestError(
                f"the run in {directory} is finished and has no checkpoint to resume from; "
                "use --overwrite to train again, or another output directory"
            )
        run.write(directory)
        return job
    if before is None:
        raise RequestError(f"{directory} has {checkpoint.name} but no {RUN_NAME}; {_REPAIR_ADVICE}")
    _check_same(before, run, directory)
    state = SavedState.read(checkpoint).train
    if state.step > job.arguments.max_steps:
        raise RequestError(
            f"max_steps={job.arguments.max_steps} is less than the {state.step} steps of {checkpoint}; use {state.step} or more"
        )
    if state.run != before.id:
        raise RequestError(f"{checkpoint} is of another run than {directory / RUN_NAME}; move it away, then --resume")
    before.cut(state.step).changed(arguments=job.arguments).write(directory)
    return job.changed(checkpoint=str(checkpoint))


def check_run_file(directory: Path) -> None:
    """Raise RequestError, before anything slow, if the file of a run that is to go on is damaged."""
    if (directory / RUN_NAME).exists():
        Run.read(directory)


def _check_same(before: Run, run: Run, directory: Path) -> None:
    """Raise RequestError if the run differs from the one before.

    Another plan may go on with a run. Other data, another model or other mathematics may not.
    """
    names = ("global_batch", "sequence_length", "model", "data")
    pairs = [(name, getattr(before, name), getattr(run, name)) for name in names]
    pairs += [(name, value, getattr(run.arguments, name)) for name, value in before.arguments if name not in CHANGEABLE_ARGUMENTS]
    for name, old, new in pairs:
        if old != new:
            raise RequestError(
                f"{name}={new} differs from the run in {directory}, which has {name}={old}; "
                "resume with the value of that run, or start anew in another output directory"
            )


def fingerprint(sequences: Sequences) -> str:
    checksum = 0
    arrays = (sequences.tokens, sequences.starts, sequences.lengths, sequences.labels)
    for array in (array for array in arrays if array is not None):
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return f"{len(sequences)} sequences {checksum:08x}"


class Progress:
    """The progress of a run. ``tokens`` has the tokens seen before each step, and until now."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.output = Path(job.output)
        self.run = Run.read(self.output)
        self.step = 0
        self.position = Position()
        self.tokens = [0]
        self.losses: list[float] = []
        self.evaluations = list(self.run.evaluations)

    def add(self, batch: GlobalBatch, outcome: StepResult) -> None:
        self.step += 1
        self.position = batch.next_position
        self.tokens.append(self.tokens[-1] + outcome.num_tokens)
        self.losses.append(outcome.loss)

    def go_on_from(self, checkpoint: Path, stepper: TrainStep, place: Mesh) -> None:
        state = load_training_state(checkpoint, stepper, place)
        self.step = state.step
        self.position = state.position
        self.tokens = [0, *self.run.tokens]
        self.losses = list(state.loss_curve)

    @property
    def loss_curve(self) -> list[tuple[int, float]]:
        return list(zip(self.tokens[1:], self.losses, strict=True))

    @property
    def evaluation_is_due(self) -> bool:
        every = self.job.arguments.eval_steps
        named = self.step in self.job.evaluate_at_steps
        crossed = any(self.tokens[-2] < target <= self.tokens[-1] for target in self.job.evaluate_at_tokens)
        return named or crossed or (every > 0 and self.step % every == 0)

    def seconds_left(self, meter: StepMeter) -> float:
        """Return the seconds until the first of the requested ends."""
        steps = float(self.job.arguments.max_steps - self.step)
        if self.job.stop_after_tokens:
            steps = min(steps, (self.job.stop_after_tokens - self.tokens[-1]) * self.step / self.tokens[-1])
        seconds = steps * meter.recent_step_seconds
        if self.job.stop_after_seconds:
            seconds = min(seconds, self.job.stop_after_seconds - meter.seconds)
        return max(seconds, 0.0)

    @property
    def state(self) -> TrainState:
        return TrainState(
            step=self.step, position=self.position, seed=self.job.arguments.seed, tokens_seen=self.tokens[-1],
            plan=self.job.recorded_plan.model_dump(), loss_curve=tuple(self.losses), versions=library_versions(),
            best_evaluation_loss=min((loss for _, _, loss in self.evaluations), default=None), run=self.run.id,
        )  # fmt: skip

    def write_run(self, folder: Path, *, finished: bool = False) -> None:
        """Write the run file. This happens before each checkpoint: the file may be ahead of the newest checkpoint, never
        behind."""
        changed = self.run.changed(tokens=tuple(self.tokens[1:]), evaluations=tuple(self.evaluations), finished=finished)
        changed.write(folder)

    def write_to(self, folder: Path, stepper: TrainStep) -> None:
        """Write all that another process needs to go on from here."""
        save_checkpoint(
            folder, model=stepper.model, tokenizer=None, optimizer=stepper.optimizer, scheduler_state=stepper.schedule_state(),
            scaler_state=stepper.scaler.state_dict() if stepper.scaler.is_enabled() else None, state=self.state,
        )  # fmt: skip
        self.write_run(folder)

    def read_from(self, folder: Path, stepper: TrainStep, place: Mesh) -> None:
        checkpoint = newest_checkpoint(folder)
        assert checkpoint is not None
        self.run = Run.read(folder)
        self.evaluations = list(self.run.evaluations)
        self.go_on_from(checkpoint, stepper, place)
