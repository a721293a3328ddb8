"""Resume a Trainer from the newest complete checkpoint, to the bit, and from checkpoints of transformers.Trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upshift.training.checkpoint.directory import writing
from upshift.training.checkpoint.rng import seed_rng
from upshift.training.checkpoint.sharded import is_sharded, load_weights
from upshift.training.hf_trainer.checkpoint_files import (
    SHARDED_OPTIMIZER_NAME,
    check_adapters,
    check_resumable,
    finish_checkpoint,
    is_upshift_checkpoint,
    newest_resumable,
    read_into_shards,
    read_model,
    read_published_format,
    read_shards,
)
from upshift.training.hf_trainer.save import CheckpointSaving
from upshift.training.hf_trainer.transformers_checkpoint import (
    OPTIMIZER_FILE,
    SCALER_FILE,
    SCHEDULER_FILE,
    SavedRng,
    read_optimizer,
    read_rng,
    read_state,
)

logger = logging.getLogger(__name__)


class CheckpointResuming(CheckpointSaving):
    """A mix-in of transformers' Trainer classes that saves and resumes checkpoints.

    Upshift and transformers can each resume from the checkpoints of the other. Resuming restores weights, optimizer state,
    schedule, scaler and random numbers bit for bit, and also the random numbers of the batch that was made ahead. Workers of
    the data loader draw new numbers. `resume_from_checkpoint=True` takes the newest complete checkpoint. Resuming raises
    RequestError for a checkpoint that is not complete, and for files that need code to be unpickled.
    """

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as transformers.Trainer.train does.

        Whatever ends the training, a checkpoint that is being written is complete before the script goes on.
        """
        self._upshift_writer.wait()
        self.accelerator.wait_for_everyone()  # only one process writes it
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_resumable(Path(self.args.output_dir)))
        try:
            return super().train(resume_from_checkpoint, *args, **options)
        except BaseException:
            self._upshift_writer.finish()
            raise

    def _tune_save_checkpoint(self: Any, checkpoint_dir: str) -> None:
        """Write the checkpoint of a trial of Ray. This trial or another one can resume from it."""
        run_dir = Path(checkpoint_dir)
        final = run_dir / f"checkpoint-{self.state.global_step}"
        temporary = final.with_name(f"{final.name}.tmp")
        finish = partial(finish_checkpoint, run_dir, final=final, temporary=temporary, best=None, limit=None)
        with writing(run_dir, name=final.name, temporary=temporary):
            temporary.mkdir()
            self._upshift_save_now(temporary, finish)

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        directory = Path(resume_from_checkpoint)
        check_resumable(directory)
        if self._upshift_uses_shards(directory):
            load_weights(directory, self._upshift_plain_model())
        elif not self._upshift_saves_full_model():
            check_adapters(directory)
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif is_upshift_checkpoint(directory):
            read_model(directory, self._upshift_plain_model())
        elif not read_published_format(directory, self._upshift_plain_model()):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        directory = Path(checkpoint)
        model = self._upshift_plain_model()
        optimizer = self._upshift_plain_optimizer()
        checkpoint_is_sharded = is_sharded(directory)
        if not (directory / (SHARDED_OPTIMIZER_NAME if checkpoint_is_sharded else OPTIMIZER_FILE)).is_file():
            logger.warning("%s is of a model only: optimizer, schedule and random numbers start anew", directory)
            return
        if checkpoint_is_sharded:
            read_shards(directory, model=model, optimizer=optimizer)
        elif self._upshift_has_shards():
            read_into_shards(directory, model=model, optimizer=optimizer)
        else:
            read_optimizer(directory, optimizer, model)
        read_state(directory / SCHEDULER_FILE, self.lr_scheduler)
        rng = self._upshift_saved_rng(directory)
        if rng is not None:
            self._upshift_batch_rng.resume(rng, self.args.device)

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None:
            read_state(Path(checkpoint) / SCALER_FILE, scaler)

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or self._upshift_batch_rng.resumed() or not any(Path(checkpoint).glob("rng_state*.pth")):
            return
        rng = self._upshift_saved_rng(Path(checkpoint))
        if rng is not None:
            rng.restore(self.args.device)
        else:  # the checkpoint was saved by fewer processes
            seed_rng(self.args.seed, self.state.global_step, self._upshift_rng_rank())

    def _upshift_saved_rng(self: Any, directory: Path) -> SavedRng | None:
        return read_rng(directory, rank=self._upshift_rng_rank(), world_size=self.args.world_size)

    def _upshift_rng_rank(self: Any) -> int:
        """Return the rank whose random numbers this rank draws.

        Ranks of tensor parallelism must drop out the same elements, so they share the numbers of their first rank.
        """
        mesh = getattr(self, "_upshift_mesh", None)
        degree = mesh.plan.layout.tensor_parallel if mesh is not None else 1
        return int(self.args.process_index) // degree * degree

    def _upshift_uses_shards(self: Any, directory: Path) -> bool:
        """Return whether the checkpoint is sharded, or this rank has shards of the model."""
        return is_sharded(directory) or self._upshift_has_shards()

    def _load_best_model(self: Any) -> None:
        self._upshift_writer.wait()
        self.accelerator.wait_for_everyone()  # only one process writes it
        best = Path(self.state.best_model_checkpoint)
        if best.is_dir() and self._upshift_uses_shards(best):
            check_resumable(best)
            load_weights(best, self._upshift_plain_model())
            return
        if best.is_dir() and self._upshift_saves_full_model() and is_upshift_checkpoint(best):
            check_resumable(best)
            read_model(best, self._upshift_plain_model())
            return
        if best.is_dir() and not self._upshift_saves_full_model():
            check_adapters(best)
        super()._load_best_model()

    def get_train_dataloader(self: Any) -> Any:
        loader = super().get_train_dataloader()
        self._upshift_batch_rng.watch(loader)
        return loader

    def get_batch_samples(
        self: Any, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Return batches and their number of items as transformers.Trainer.get_batch_samples does."""
        self._upshift_batch_rng.next_batches(epoch_iterator)
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._upshift_batch_rng.handed_out(len(batches))
        return batches, num_items
