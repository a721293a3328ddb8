"""Run one job in a child of the fork server, as it is written in a folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from upshift.training.job.job import run_rank
from upshift.training.job.processes import run_in
from upshift.training.loop.events import Event, told
from upshift.value import Value

STOP = "stop"  # a file in the job's folder: its result is not wanted any more


class Request(Value):
    folder: str


def main(path: Path, answer: Callable[[Value], None]) -> None:
    folder = Path(Request.from_file(path).folder)

    def tell(event: Event) -> None:
        answer(told(event))
        if (folder / STOP).exists():
            os.killpg(0, signal.SIGKILL)  # this process and the ranks that it has forked

    run_in(folder, run_rank, tell)
