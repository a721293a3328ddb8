"""A worker of a fork server that forks once more and then computes for longer than any test."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from upshift.parent_process import end_with
from upshift.value import Value


class Asleep(Value):
    pid: int


def nap(seconds: float = 120.0) -> int:
    """Without a look at any parent, as a kernel or a library would."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.1)
    return 0


def main(path: Path, answer: Callable[[Value], None]) -> None:
    parent = os.getpid()
    if os.fork() == 0:
        end_with(parent)
        nap()
    answer(Asleep(pid=os.getpid()))
    nap()


if __name__ == "__main__":
    nap()
