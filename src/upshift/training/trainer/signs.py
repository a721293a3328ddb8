"""What ``upshift.Trainer`` notes of its steps: the wait for batches, graphs compiled again, memory that callbacks keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from upshift.debugging.finding import Finding
from upshift.debugging.run_report import forget
from upshift.debugging.signs import TRAINER_DATA_FIX
from upshift.training.signs import RunSigns
from upshift.training.trainer.report import tell


class Fetched:
    """The Trainer's iterator over batches; the wait for each is noted."""

    def __init__(self, batches: Iterator[Any], signs: RunSigns) -> None:
        self.batches, self._signs = batches, signs

    def __iter__(self) -> Fetched:
        return self

    def __next__(self) -> Any:
        with self._signs.fetching():
            return next(self.batches)


class NotedSteps:
    """Mixed into transformers' Trainer classes."""

    args: Any
    callback_handler: Any
    _signs: RunSigns | None = None
    _fetched: Fetched | None = None  # one for each of the loader's iterators, which BatchRng tells apart
    _wrapped: tuple[Any, ...] = ()  # callbacks whose methods are timed, while it is looked for who keeps memory

    @contextmanager
    def _steps_noted(self) -> Iterator[None]:
        output, rank = Path(self.args.output_dir), self.args.process_index
        forget(output, rank)
        device = torch.device(self.args.device).type
        self._signs = RunSigns(output, rank=rank, device=device, data_fix=TRAINER_DATA_FIX, tell=self._tell_finding)
        try:
            yield
        finally:
            self._unwrap()
            self._signs = self._fetched = None

    def _tell_finding(self, finding: Finding) -> None:
        if self.args.should_log:
            tell(f"{finding.subject}: {finding.what} ({finding.evidence}); {finding.fix}")

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        if self._signs is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        self._signs.begin()
        if self._signs.attributes and not self._wrapped:
            self._wrap(self._signs)
        elif self._wrapped and not self._signs.attributes:
            self._unwrap()
        if self._fetched is None or self._fetched.batches is not epoch_iterator:
            self._fetched = Fetched(epoch_iterator, self._signs)
        return super().get_batch_samples(self._fetched, num_batches, device)  # type: ignore[misc]

    def _wrap(self, signs: RunSigns) -> None:
        self._wrapped = tuple(self.callback_handler.callbacks)
        for callback in self._wrapped:
            for event in (name for name in dir(type(callback)) if name.startswith("on_") and name not in vars(callback)):
                setattr(callback, event, _noted(getattr(callback, event), signs, type(callback).__name__))

    def _unwrap(self) -> None:
        """What stands in the instance goes; the class's own is there again."""
        for callback in self._wrapped:
            for event in [name for name, value in vars(callback).items() if getattr(value, "notes_memory", False)]:
                delattr(callback, event)
        self._wrapped = ()


def _noted(method: Callable[..., Any], signs: RunSigns, name: str) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        with signs.by(name):
            return method(*arguments, **named)

    noted.notes_memory = True  # type: ignore[attr-defined]
    return noted
