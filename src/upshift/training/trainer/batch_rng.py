"""Restore the random numbers of batches that are made before they are trained on.

accelerate's data loader is one batch ahead. At a checkpoint one batch is therefore made already, with random numbers drawn
before the last step. A resumed run collates this batch again with the same numbers, and then goes on with the numbers of the
checkpoint. transformers restores the generators only after that batch and the next one. Random numbers that a dataset itself
draws when it returns a sample are not drawn again the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from upshift.training.checkpoint.rng import HostRng, host_rng, restore_host_rng
from upshift.training.trainer.library_files import SavedRng


class BatchRng:
    """A watcher of one data loader that makes its batches in this process."""

    def __init__(self) -> None:
        self._iterator: Any = None
        self._ahead = 0  # batches made and not handed out
        self._before: HostRng | None = None  # where collating the newest one started from
        self._again: tuple[SavedRng, torch.device] | None = None
        self._restored = False

    def watch(self, loader: Any) -> None:
        if loader.num_workers or isinstance(loader.dataset, IterableDataset):
            return
        collate = self._recorded(loader.collate_fn)
        # accelerate's loader iterates over one inside, and gives its own collate_fn to the one that skips batches.
        for one in (loader, getattr(loader, "base_dataloader", loader)):
            one.collate_fn = collate

    def next_batches(self, iterator: Iterator[Any]) -> None:
        """Note the iterator over the loader before batches are taken from it."""
        if iterator is not self._iterator:
            self._iterator, self._ahead = iterator, 0

    def handed_out(self, num_batches: int) -> None:
        self._ahead -= num_batches

    @property
    def ahead(self) -> HostRng | None:
        """Return the state before collating the batch that is made and not handed out.

        Return None if there is no such batch, or if other processes make the batches.
        """
        return self._before if self._ahead == 1 else None

    def resume(self, state: SavedRng, device: torch.device) -> None:
        """Make the next batch with the random numbers of `state.before_batch`; then let the generators go on from `state`."""
        self._again = (state, device) if state.before_batch is not None else None

    def resumed(self) -> bool:
        """Return whether the batch of `resume` was made and the generators restored. From now on no batch is made again."""
        restored, self._again, self._restored = self._restored, None, False
        return restored

    def _recorded(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def make(samples: Any) -> Any:
            self._ahead += 1
            if self._again is None:
                self._before = host_rng()
                return collate(samples)
            state, device = self._again
            assert state.before_batch is not None
            self._again = None
            restore_host_rng(state.before_batch)
            self._before = host_rng()
            batch = collate(samples)
            state.restore(device)
            self._restored = True
            return batch

        return make
