"""Write a run's checkpoints while training goes on. Report when a checkpoint is complete, and raise if it failed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from upshift.training.checkpoint.async_save import BackgroundWriter
from upshift.training.checkpoint.by_ranks import Seal, export, has_shards, load_sharded_checkpoint, save_shards
from upshift.training.checkpoint.checkpoint import TrainState, capture_rng, load_checkpoint, save_checkpoint, save_model
from upshift.training.checkpoint.sharded import is_sharded
from upshift.training.distributed.mesh import Mesh, all_gather_objects, all_reduce_max, gather_errors, rank_0_first
from upshift.training.loop.events import OnEvent, Saved
from upshift.training.loop.metrics import StepMeter
from upshift.training.prepare import empty_whole_model
from upshift.training.step import TrainStep


class CheckpointSaver:
    """Save the checkpoints and the final model of a run. Every rank has a saver.

    If each rank has the whole state, rank 0 writes it. If ranks share the state, each writes its parts, and rank 0 seals them.
    A failure on one rank is raised on all.
    """

    def __init__(self, mesh: Mesh, train_step: TrainStep, *, keep: int, meter: StepMeter, on_saved: OnEvent) -> None:
        self.mesh = mesh
        self.plan = mesh.plan
        self.train_step = train_step
        self.keep = keep
        self.meter = meter
        self.on_saved = on_saved
        self._shares = has_shards(train_step.optimizer, mesh)
        self._writer = BackgroundWriter()
        self._pending_event: Saved | None = None
        self._seal: Seal | None = None

    @property
    def has_failed(self) -> bool:
        return self._writer.has_failed

    def save(self, output: Path, state: TrainState, tokenizer: Any | None, *, best_step: int | None = None) -> None:
        """Start to save a checkpoint, and return when training may go on. All ranks call it together, after ``finish``.

        The checkpoint of ``best_step`` stays, however old it is.
        """
        train_step = self.train_step
        device = next(train_step.model.parameters()).device
        options: dict[str, Any] = dict(
            model=train_step.model,
            tokenizer=tokenizer,
            optimizer=train_step.optimizer,
            state=state,
            scheduler_state=train_step.schedule_state(),
            scaler_state=train_step.scaler.state_dict() if train_step.scaler.is_enabled() else None,
            rngs=all_gather_objects(capture_rng(device), self.plan),
            writer=self._writer,
            keep=self.keep,
            best_step=best_step,
        )
        self.meter.exclude_save(begins=True)
        if self._shares:
            path, self._seal = save_shards(output, mesh=self.mesh, **options)
            self._pending_event = Saved(str(path), state.step)
            return
        with rank_0_first(self.plan):
            if self.mesh.rank == 0:
                self._pending_event = Saved(str(save_checkpoint(output, **options)), state.step)

    def report_if_written(self) -> None:
        """Send the event of a checkpoint once it is completely written. If ranks share the state, all call this together."""
        if self._pending_event is None:
            return
        must_wait = self._writer.is_working or self._writer.has_failed
        if all_reduce_max(must_wait, self.plan) if self._seal is not None else must_wait:
            return
        self._writer.wait()
        seal = self._seal
        event = self._pending_event
        self._seal = None
        self._pending_event = None
        if seal is not None:
            with rank_0_first(self.plan):
                if self.mesh.rank == 0:
                    seal()
        self.meter.exclude_save(begins=False)
        self.on_saved(event)

    def finish(self) -> None:
        """Wait until the last checkpoint is written. Raise JobFailed if it could not be written."""
        with gather_errors(self.plan) if self._seal is not None else rank_0_first(self.plan):
            self._writer.wait()
        self.report_if_written()

    def save_model(self, output: Path, source: Any, tokenizer: Any | None) -> None:
        """Save the final model. All ranks call it together."""
        model = self.train_step.model
        if self._shares:
            make_skeleton = partial(empty_whole_model, model, source, self.plan)
            export(output, model=model, tokenizer=tokenizer, skeleton=make_skeleton, mesh=self.mesh)
            return
        with rank_0_first(self.plan):
            if self.mesh.rank == 0:
                save_model(output, model, tokenizer)


def load_training_state(checkpoint: Path, train_step: TrainStep, mesh: Mesh) -> TrainState:
    """Load a checkpoint into the model, optimizer, schedule and loss scaler of ``train_step``. All ranks call it."""
    targets: dict[str, Any] = {
        "model": train_step.model,
        "optimizer": train_step.optimizer,
        "scheduler": train_step.schedule,
        "scaler": train_step.scaler,
    }
    if has_shards(train_step.optimizer, mesh) or is_sharded(checkpoint):
        return load_sharded_checkpoint(checkpoint, mesh=mesh, **targets)
    return load_checkpoint(checkpoint, rank=mesh.rank, **targets)
