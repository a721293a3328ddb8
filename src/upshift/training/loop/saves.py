"""A run's checkpoints, written while it goes on: when one is under way, when it is whole, and when it failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from upshift.planning.plan import Plan
from upshift.training.checkpoint.background import BackgroundWriter
from upshift.training.loop.events import Saved
from upshift.training.loop.meter import StepMeter
from upshift.training.loop.ranks import on_rank_0


class Saves:
    """On every rank; rank 0 writes, and what fails there is raised on all of them."""

    def __init__(self, plan: Plan, *, meter: StepMeter, on_saved: Callable[[Saved], None]) -> None:
        self.plan, self.meter, self.on_saved = plan, meter, on_saved
        self._writer = BackgroundWriter()
        self._under_way: Saved | None = None

    @property
    def has_failed(self) -> bool:
        return self._writer.has_failed

    def begin(self, step: int, write: Callable[[BackgroundWriter], Path]) -> None:
        """``write`` returns the checkpoint's directory when training may go on."""
        self.meter.saving(begins=True)
        self._under_way = Saved(str(write(self._writer)), step)

    def notice(self) -> None:
        """The event of a checkpoint is sent when it is whole."""
        if self._under_way is not None and not self.has_failed and self._writer.check():
            self.meter.saving(begins=False)
            self.on_saved(self._under_way)
            self._under_way = None

    def finish(self) -> None:
        """Until nothing is under way. Raises JobFailed where it could not be written."""
        with on_rank_0(self.plan):
            self._writer.wait()
        self.notice()
