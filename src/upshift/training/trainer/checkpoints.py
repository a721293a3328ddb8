"""Checkpoints of a transformers.Trainer without pickle: resuming from the newest whole one, to the bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upshift.training.checkpoint.divided import is_divided, load_weights
from upshift.training.checkpoint.files import writing
from upshift.training.checkpoint.model import read_weights
from upshift.training.checkpoint.optimizer import read_optimizer
from upshift.training.checkpoint.rng import RNG_NAME, read_rng, restore_rng, seed_rng
from upshift.training.trainer.saving import PlainSaving
from upshift.training.trainer.shared_files import read_shared
from upshift.training.trainer.trainer_files import (
    SCALER_NAME,
    SCHEDULER_NAME,
    check_adapters,
    check_resumable,
    finish_checkpoint,
    newest_resumable,
    read_saved_optimizer,
    read_state,
)

logger = logging.getLogger(__name__)


class PlainCheckpoints(PlainSaving):
    """For a subclass of transformers.Trainer: checkpoints are safetensors and JSON, and PlainSaving says how they are saved.

    Resuming restores weights, optimizer, schedule, scaler and random numbers bit for bit, and also what a data collator
    drew for the batch that was made ahead; data loader workers draw anew. `resume_from_checkpoint=True` takes the newest
    whole checkpoint. Raises RequestError for a checkpoint that is not whole or that holds pickles.
    """

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """As transformers.Trainer.train."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_resumable(Path(self.args.output_dir)))
        return super().train(resume_from_checkpoint, *args, **options)

    def _tune_save_checkpoint(self: Any, checkpoint_dir: str) -> None:
        """What Ray keeps of a trial, for it or another one to go on from."""
        run_dir = Path(checkpoint_dir)
        final = run_dir / f"checkpoint-{self.state.global_step}"
        temporary = final.with_name(f"{final.name}.tmp")
        finish = partial(finish_checkpoint, run_dir, final=final, temporary=temporary, best=None, limit=None)
        with writing(run_dir, name=final.name, temporary=temporary):
            temporary.mkdir()
            self._upshift_save_now(temporary, finish)

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        directory = Path(resume_from_checkpoint)
        if self._upshift_is_divided_checkpoint(directory):
            check_resumable(directory)
            load_weights(directory, self._upshift_plain_model())
        elif self._upshift_is_saved_whole():
            check_resumable(directory)
            read_weights(directory, self._upshift_plain_model())
        else:
            check_adapters(directory)
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        directory = Path(checkpoint)
        saved = read_saved_optimizer(directory)
        if saved is None:
            logger.warning("%s is of a model only: optimizer, schedule and random numbers start anew", directory)
            return
        read = read_shared if self._upshift_is_divided_checkpoint(directory) else read_optimizer
        read(directory, saved, model=self._upshift_plain_model(), optimizer=self._upshift_plain_optimizer())
        read_state(directory / SCHEDULER_NAME, self.lr_scheduler)
        rng = read_rng(directory, rank=self._upshift_rng_rank())
        if rng is not None:
            self._upshift_batch_rng.resume(rng, self.args.device)

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None:
            read_state(Path(checkpoint) / SCALER_NAME, scaler)

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or self._upshift_batch_rng.resumed() or not (Path(checkpoint) / RNG_NAME).is_file():
            return
        rng = read_rng(Path(checkpoint), rank=self._upshift_rng_rank())
        if rng is not None:
            restore_rng(rng, self.args.device)
        else:  # of fewer processes
            seed_rng(self.args.seed, self.state.global_step, self._upshift_rng_rank())

    def _upshift_rng_rank(self: Any) -> int:
        """Whose random numbers this rank draws: ranks that share every layer's matrices drop out the same."""
        place = getattr(self, "_upshift_place", None)
        degree = place.plan.layout.tensor_parallel if place is not None else 1
        return int(self.args.process_index) // degree * degree

    def _upshift_is_divided_checkpoint(self: Any, directory: Path) -> bool:
        """Whether a checkpoint, or this rank, has the model in parts."""
        return is_divided(directory) or self._upshift_has_parts()

    def _load_best_model(self: Any) -> None:
        self._upshift_writer.wait()
        self.accelerator.wait_for_everyone()  # one process has written
        best = Path(self.state.best_model_checkpoint)
        if best.is_dir() and self._upshift_is_divided_checkpoint(best):
            check_resumable(best)
            load_weights(best, self._upshift_plain_model())
            return
        if best.is_dir() and self._upshift_is_saved_whole():
            check_resumable(best)
            read_weights(best, self._upshift_plain_model())
            return
        if best.is_dir():
            check_adapters(best)
        super()._load_best_model()

    def get_train_dataloader(self: Any) -> Any:
        loader = super().get_train_dataloader()
        self._upshift_batch_rng.watch(loader)
        return loader

    def get_batch_samples(
        self: Any, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """As transformers.Trainer.get_batch_samples."""
        self._upshift_batch_rng.next_batches(epoch_iterator)
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._upshift_batch_rng.handed_out(len(batches))
        return batches, num_items
