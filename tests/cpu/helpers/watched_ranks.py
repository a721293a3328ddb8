"""A world of ranks that is watched while one of them stalls, is stopped or is slow; writes what was said. Run as a program."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PATIENCE, PERIOD = 1.0, 0.2
STEPS = 20
ENDS_AFTER = 3.0
GONE = {"gone": 1, "first gone": 0}  # the rank that is stopped for good
STOPPED = {"stopped": 15, "stopped at once": 1}  # in which step: after its first pulses, and before them


def work(given: dict[str, Any]) -> list[tuple[int, str]]:
    import torch
    import torch.distributed as dist

    from upshift.training.distributed import watchdog
    from upshift.training.rank_processes import rank_environment

    watchdog.PATIENCE, watchdog.PERIOD, watchdog.STRAGGLER_PERIODS, watchdog.STEPS_OF_PATIENCE = PATIENCE, PERIOD, 2, 0
    watchdog.ENDS_AFTER = ENDS_AFTER if given["case"] in GONE else watchdog.ENDS_AFTER
    watchdog.STORE_SECONDS = timedelta(seconds=2)
    torch.set_num_threads(1)
    rank, said = rank_environment()[0], Path(given["said"])

    def tell(step: int, words: str) -> None:
        with said.open("a") as file:
            file.write(json.dumps([rank, step, words]) + "\n")

    with watchdog.watching(given["plan"], tell, said.parent) as step:
        for number in range(1, STEPS + 1):
            with step(number):
                one_step(given["case"], rank, number, said)
                dist.all_reduce(torch.ones(1024))
    return []


def one_step(case: str, rank: int, number: int, said: Path) -> None:
    if case == "slow" and rank == 1:
        compute(0.15)
    compute(0.02)
    if number == 15 and rank == GONE.get(case):
        os.kill(os.getpid(), signal.SIGSTOP)
    if number != STOPPED.get(case, 5) or rank != 1 or case == "slow" or case in GONE:
        return
    if case in STOPPED:
        if os.fork() == 0:  # who lets it go on
            wait_until_said(said)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        wait_until_said(said)


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def wait_until_said(said: Path) -> None:
    until = time.monotonic() + 60
    while "since" not in (said.read_text() if said.exists() else "") and time.monotonic() < until:
        time.sleep(0.05)


def main(case: str, world: int, said: str) -> None:
    from upshift.training.rank_processes import join_processes

    plan: Any = SimpleNamespace(num_processes=world, device="cpu")
    join_processes(plan, work, {"case": case, "plan": plan, "said": said})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
