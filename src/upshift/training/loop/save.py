"""Write a run's checkpoints while it goes on, and note when one is under way, whole, or failed."""

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
    """The saves of a run, on every rank.

    If each rank has all, rank 0 writes. If ranks share, each writes its parts, and rank 0 seals them. A failure on one rank is
    raised on all.
    """

    def __init__(self, place: Mesh, stepper: TrainStep, *, keep: int, meter: StepMeter, on_saved: OnEvent) -> None:
        self.place = place
        self.plan = place.plan
        self.stepper = stepper
        self.keep = keep
        self.meter = meter
        self.on_saved = on_saved
        self._shares = has_shards(stepper.optimizer, place)
        self._writer = BackgroundWriter()
        self._under_way: Saved | None = None
        self._seal: Seal | None = None

    @property
    def has_failed(self) -> bool:
        return self._writer.has_failed

    def save(self, output: Path, state: TrainState, tokenizer: Any | None) -> None:
        """Start a save, and return when training may go on. All ranks call it together, after ``finish``."""
        stepper = self.stepper
        options: dict[str, Any] = dict(
            model=stepper.model, tokenizer=tokenizer, optimizer=stepper.optimizer, scheduler_state=stepper.schedule_state(),
            scaler_state=stepper.scaler.state_dict() if stepper.scaler.is_enabled() else None, state=state,
            rngs=all_gather_objects(capture_rng(next(stepper.model.parameters()).device), self.plan), writer=self._writer, keep=self.keep,
        )  # fmt: skip
        self.meter.saving(begins=True)
        if self._shares:
            path, self._seal = save_shards(output, mesh=self.place, **options)
            self._under_way = Saved(str(path), state.step)
            return
        with rank_0_first(self.plan):
            if self.place.rank == 0:
                self._under_way = Saved(str(save_checkpoint(output, **options)), state.step)

    def notice(self) -> None:
        """Send the event of a checkpoint when it is whole. If ranks share, all call it together."""
        if self._under_way is None:
            return
        waits = self._writer.is_working or self._writer.has_failed
        if all_reduce_max(waits, self.plan) if self._seal is not None else waits:
            return
        self._writer.wait()
        seal = self._seal
        said = self._under_way
        self._seal = self._under_way = None
        if seal is not None:
            with rank_0_first(self.plan):
                if self.place.rank == 0:
                    seal()
        self.meter.saving(begins=False)
        self.on_saved(said)

    def finish(self) -> None:
        """Wait until no save is under way. Raise JobFailed if the checkpoint could not be written."""
        with gather_errors(self.plan) if self._seal is not None else rank_0_first(self.plan):
            self._writer.wait()
        self.notice()

    def save_model(self, output: Path, source: Any, tokenizer: Any | None) -> None:
        """Save the final model. All ranks call it together."""
        model = self.stepper.model
        if self._shares:
            bare = partial(empty_whole_model, model, source, self.plan)
            export(output, model=model, tokenizer=tokenizer, skeleton=bare, mesh=self.place)
            return
        with rank_0_first(self.plan):
            if self.place.rank == 0:
                save_model(output, model, tokenizer)


def load_training_state(checkpoint: Path, stepper: TrainStep, place: Mesh) -> TrainState:
    """Load a checkpoint into the stepper. All ranks call it."""
    into: dict[str, Any] = {
        "model": stepper.model, "optimizer": stepper.optimizer, "scheduler": stepper.schedule, "scaler": stepper.scaler,
    }  # fmt: skip
    if has_shards(stepper.optimizer, place) or is_sharded(checkpoint):
        return load_sharded_checkpoint(checkpoint, mesh=place, **into)
    return load_checkpoint(checkpoint, rank=place.rank, **into)
