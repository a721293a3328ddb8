"""Track how far a run came: the contents of its checkpoints and of its file, beside weights and optimizer states."""

from __future__ import annotations

from pathlib import Path

from upshift.benchmarking.environment import library_versions
from upshift.training.batches.source import GlobalBatch, Position
from upshift.training.checkpoint.checkpoint import TrainState, newest_checkpoint, save_checkpoint
from upshift.training.job.request import Job
from upshift.training.loop.meter import StepMeter
from upshift.training.loop.run import Run
from upshift.training.loop.saves import load
from upshift.training.parallel.place import Place
from upshift.training.step import StepOutcome, Stepper


class Progress:
    """The progress of a run. ``tokens`` has the tokens seen before each step, and until now."""

    def __init__(self, job: Job) -> None:
        self.job, self.output = job, Path(job.output)
        self.run = Run.read(self.output)
        self.step, self.position, self.tokens = 0, Position(), [0]
        self.losses: list[float] = []
        self.evaluations = list(self.run.evaluations)

    def add(self, batch: GlobalBatch, outcome: StepOutcome) -> None:
        self.step += 1
        self.position = batch.next_position
        self.tokens.append(self.tokens[-1] + outcome.num_tokens)
        self.losses.append(outcome.loss)

    def go_on_from(self, checkpoint: Path, stepper: Stepper, place: Place) -> None:
        state = load(checkpoint, stepper, place)
        self.step, self.position = state.step, state.position
        self.tokens = [0, *self.run.tokens]
        self.losses = list(state.loss_curve)

    @property
    def loss_curve(self) -> list[tuple[int, float]]:
        return list(zip(self.tokens[1:], self.losses, strict=True))

    @property
    def evaluation_is_due(self) -> bool:
        every, named = self.job.arguments.eval_steps, self.step in self.job.evaluate_at_steps
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

    def write_to(self, folder: Path, stepper: Stepper) -> None:
        """Write all that another process needs to go on from here."""
        save_checkpoint(
            folder, model=stepper.model, tokenizer=None, optimizer=stepper.optimizer, scheduler_state=stepper.schedule_state(),
            scaler_state=stepper.scaler.state_dict() if stepper.scaler.is_enabled() else None, state=self.state,
        )  # fmt: skip
        self.write_run(folder)

    def read_from(self, folder: Path, stepper: Stepper, place: Place) -> None:
        checkpoint = newest_checkpoint(folder)
        assert checkpoint is not None
        self.run = Run.read(folder)
        self.evaluations = list(self.run.evaluations)
        self.go_on_from(checkpoint, stepper, place)
