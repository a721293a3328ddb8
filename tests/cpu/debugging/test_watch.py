"""A hang names itself: which rank waits in which collective, since when, and for whom; a straggler is named with its time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from warm_processes import WarmProcesses
from watched_ranks import GONE, STOPPED

from upshift.debugging.run_report import FOLDER, examine_run
from upshift.errors import JobFailed
from upshift.training.distributed import watchdog
from upshift.training.distributed.stragglers import Heartbeat, PendingCollective, describe_stall, find_straggler
from upshift.training.distributed.watchdog import Watchdog
from upshift.training.loop.monitor import reporting_death

HELPERS = Path(__file__).parents[1] / "helpers"

WORLD = HELPERS / "watched_ranks.py"


def said_in(case: str, folder: Path, warm_processes: WarmProcesses, *, world: int = 2) -> list[tuple[int, int, str]]:
    said = folder / "said"
    ended = warm_processes.run(WORLD, case, str(world), str(said), timeout=120)
    assert ended.returncode == 0, ended.stderr
    return [tuple(json.loads(line)) for line in said.read_text().splitlines()] if said.exists() else []


def stalls_in(case: str, folder: Path, warm_processes: WarmProcesses, *, world: int = 2) -> list[tuple[int, int, str]]:
    """A machine with other work makes stragglers too."""
    return [one for one in said_in(case, folder, warm_processes, world=world) if "holds up" not in one[2]]


def test_who_waits_and_who_does_not_come(tmp_path: Path, warm_processes: WarmProcesses) -> None:
    (teller, step, words), *_ = stalls_in("stalled", tmp_path, warm_processes, world=3)
    assert (teller, step) == (0, 5)
    waits = r"ranks 0, 2 wait since [\d.]+ s in all_reduce \d+ of group 0 default_pg \(4\.00 KiB\), step 5; "
    assert re.match(waits, words), words
    assert re.search(r"rank 1 is in no collective: step 5 since [\d.]+ s", words), words
    findings = examine_run(tmp_path)  # what `upshift doctor` says of the reports that the ranks left
    in_no_collective = [finding for finding in findings if "in no collective" in finding.what]
    assert [finding.subject for finding in in_no_collective] == ["rank 1"], findings  # a busy machine makes others late, too
    (found,) = in_no_collective
    assert "watched_ranks.py" in found.evidence and "(wait_until_said)" in found.evidence


@pytest.mark.parametrize("case", STOPPED)
def test_a_stopped_process_is_named(case: str, tmp_path: Path, warm_processes: WarmProcesses) -> None:
    (teller, step, words), *_ = stalls_in(case, tmp_path, warm_processes)
    assert (teller, step) == (0, STOPPED[case]) and "rank 0 waits" in words
    assert re.search(r"rank 1 says nothing since [\d.]+ s: its process is stopped", words), words


@pytest.mark.parametrize("case", GONE)
def test_who_waits_for_a_rank_that_is_gone_ends(case: str, tmp_path: Path) -> None:
    """The one that is left ends in bounded time, and says why; rank 0 has the job's store in its process."""
    report = tmp_path / "upshift_report" / f"rank-{1 - GONE[case]}.json"
    command = [sys.executable, str(WORLD), case, "2", str(tmp_path / "said")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while not (report.exists() and "this one ends" in report.read_text()):
            assert time.monotonic() < deadline
            if case != "gone":  # there the launcher may have ended already
                assert process.poll() is None
            time.sleep(0.1)
        if case == "gone":
            assert process.wait(timeout=30) == os.EX_UNAVAILABLE
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    (words,) = (finding.what for finding in examine_run(tmp_path) if finding.subject == f"rank {1 - GONE[case]}")
    expected = {"gone": "rank 1 says nothing since", "first gone": "rank 0, or the launcher beside it, does not answer since"}
    assert expected[case] in words, words


def test_a_full_disk_and_a_closed_pipe_do_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 never speaks. Neither the reports nor the warning can be written, and rank 0 is ended all the same."""
    (tmp_path / FOLDER).write_text("no folder can be made here")
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(watchdog, "_clone_store", HashStore)
    monkeypatch.setattr(watchdog, "rank_environment", lambda: (0, 2))
    for name, value in {"PERIOD": 0.01, "PATIENCE": 0.02, "STEPS_OF_PATIENCE": 0, "SILENCE": 1, "ENDS_AFTER": 0.3}.items():
        monkeypatch.setattr(watchdog, name, value)
    warnings: list[str] = []

    def warn(step: int, message: str) -> None:
        warnings.append(message)
        raise BrokenPipeError

    plan: Any = SimpleNamespace(device="cpu", num_processes=2)
    watch = Watchdog(plan, warn, tmp_path)
    with watch, watch.step(1):
        assert ended.wait(20)
        assert all(thread.is_alive() for thread in watch._threads)
    assert "rank 1 says nothing" in warnings[0]
    assert "rank 1 says nothing" in caplog.messages[0] and "this one ends" in caplog.messages[0]


def test_a_straggler_is_named_with_its_time(tmp_path: Path, warm_processes: WarmProcesses) -> None:
    words = "; ".join(words for _, _, words in said_in("slow", tmp_path, warm_processes))
    holds_up = r"rank 1 holds up the others: its own work takes [\d.]+ m?s of a step of [\d.]+ m?s, theirs [\d.]+ m?s"
    assert re.search(holds_up, words), words


def pulse(rank: int, **fields: object) -> Heartbeat:
    return Heartbeat.model_validate({"rank": rank, "beat": 1, "step": 7, "seconds": 100.0, "in_step": True, **fields})


def waiting(name: str, number: int, seconds: float = 95.0) -> PendingCollective:
    return PendingCollective(name=name, number=number, group="0 default_pg", bytes=4096, seconds=seconds)


def test_words() -> None:
    late = pulse(0, waiting=waiting("all_reduce", 40))
    assert describe_stall([pulse(0, waiting=waiting("all_reduce", 40, 5.0)), pulse(1)], {}, patience=60) is None
    words = describe_stall([late, pulse(1, at="training/batches/sampler.py:12 (read)")], {}, patience=60)
    assert words == (
        "rank 0 waits since 1 min 35 s in all_reduce 40 of group 0 default_pg (4.00 KiB), step 7; "
        "rank 1 is in no collective: step 7 since 1 min 40 s, at training/batches/sampler.py:12 (read)"
    )
    words = describe_stall([late, pulse(1, waiting=waiting("all_gather", 39))], {}, patience=60)
    assert words is not None and words.endswith("ranks in one group must begin the same ones in the same order")
    words = describe_stall([late, pulse(1, waiting=waiting("all_reduce", 40))], {1: 80.0}, patience=60)
    assert words is not None and "rank 1 says nothing since 1 min 20 s" in words and "ranks 0, 1 wait" not in words


@pytest.mark.parametrize(
    ("own", "named"), [((1.0, 1.0, 1.1), None), ((1.0, 1.5, 1.0), 1), ((0.1, 0.2, 0.1), None), ((1.0, None, None), None)]
)
def test_who_is_slower(own: tuple[float | None, ...], named: int | None) -> None:
    found = find_straggler([pulse(rank, own_seconds=seconds, step_seconds=1.6) for rank, seconds in enumerate(own)])
    assert (found and found[0]) == named


def test_a_run_that_dies_leaves_where_and_why(tmp_path: Path) -> None:
    with pytest.raises(JobFailed), reporting_death(tmp_path, lambda: 7, rank=0, ranks=1):
        raise JobFailed("the loss became NaN")
    (found,) = examine_run(tmp_path)
    assert "died in step 7: JobFailed: the loss became NaN" in found.what
    assert "debug='underflow_overflow'" in (found.fix or "")
    with reporting_death(tmp_path, lambda: 8, rank=0, ranks=1):
        pass
    assert not list(tmp_path.glob("*/rank-*.json"))  # a run that goes well takes away what the one before left
