"""What a run that hung, slowed or died leaves, and what doctor makes of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from upshift.debugging.finding import Finding, ok
from upshift.debugging.run_report import (
    FOLDER,
    RankReport,
    Stack,
    current_stacks,
    delete_reports,
    examine_run,
    leave_findings,
    report_of,
)
from upshift.errors import RequestError


def report(
    rank: int, kind: str, words: str = "", *, waiting: str | None = None, at: str = "upshift/training/step.py:7 (step)"
) -> RankReport:
    stacks = (Stack(thread="MainThread", frames=("upshift/cli/train.py:1 (command)", at)),)
    return RankReport.model_validate(
        {"rank": rank, "ranks": 3, "kind": kind, "step": 5, "words": words, "waiting": waiting, "stacks": stacks}
    )


def look(folder: Path, *reports: RankReport) -> list[Finding]:
    for one in reports:
        one.write(folder)
    return examine_run(folder)


def test_a_rank_that_died_is_named_and_not_those_that_lost_it(tmp_path: Path) -> None:
    lost = "RuntimeError: gloo: Connection closed by peer"
    others = [report(rank, "died", lost) for rank in (0, 2)]
    (found,) = look(tmp_path, *others, report(1, "died", "JobFailed: the loss became NaN"))
    assert (found.severity, found.subject) == ("error", "rank 1")
    assert "died in step 5: JobFailed: the loss became NaN" in found.what
    assert "upshift/training/step.py:7" in found.evidence
    assert "--learning-rate" in (found.fix or "")


def test_a_killed_rank_leaves_nothing_and_is_named(tmp_path: Path) -> None:
    lost = "RuntimeError: gloo: Connection closed by peer"
    found = look(tmp_path, report(0, "died", lost), report(2, "died", lost))
    killed = next(finding for finding in found if "no report" in finding.what)
    assert killed.subject == "rank 1" and "dmesg" in (killed.fix or "")


def test_a_killed_rank_is_named_though_it_had_reported_a_slow_one(tmp_path: Path) -> None:
    lost = [report(rank, "died", "RuntimeError: gloo: Connection closed by peer") for rank in (1, 2)]
    findings = look(tmp_path, report(0, "slow", "rank 1 holds up the others"), *lost)
    (missing,) = [finding for finding in findings if "left no report" in finding.what]
    assert (missing.subject, missing.evidence) == ("rank 0", "2 of 3 ranks left one")


def test_who_holds_up_a_hang(tmp_path: Path) -> None:
    waits = [report(rank, "stalled", "since 70 s", waiting="all_reduce 40 of group 0") for rank in (0, 2)]
    (found,) = look(tmp_path, *waits, report(1, "stalled", "since 70 s", at="upshift/training/batches/sampler.py:12 (read)"))
    assert found.subject == "rank 1" and "in no collective" in found.what
    assert found.evidence.startswith("upshift/training/batches/sampler.py:12 (read)")


def test_all_wait_and_one_is_slow(tmp_path: Path) -> None:
    waits = [report(rank, "stalled", waiting=f"all_reduce {40 + rank} of group 0") for rank in (0, 1, 2)]
    (found,) = look(tmp_path / "hang", *waits)
    assert "rank 1 in all_reduce 41" in found.evidence and "--network" in (found.fix or "")
    (slow,) = look(tmp_path / "slow", report(0, "slow", "rank 2 holds up the others"))
    assert (slow.severity, slow.what) == ("warning", "rank 2 holds up the others")


def test_memory_and_how_the_run_ended(tmp_path: Path) -> None:
    parts = [{"part": "weights", "predicted_gib": 1.0, "measured_gib": 1.5}]
    autopsy = {"step": 3, "verdict": "weights took 512 MiB more than predicted", "parts": parts, "smaller": [2, 128]}
    (tmp_path / "upshift_out_of_memory.jsonl").write_text(json.dumps(autopsy) + "\n")
    run = {"tokens": [1, 2], "arguments": {"max_steps": 9}, "finished": False}
    (tmp_path / "upshift_run.json").write_text(json.dumps(run))
    (tmp_path / "checkpoint-2").mkdir()
    memory, ending = examine_run(tmp_path)
    assert "weights took 512 MiB" in memory.what and "weights 1.50 GiB" in memory.evidence and "2 x 128" in memory.evidence
    assert ending.severity == "unknown" and "newest checkpoint: 2" in ending.evidence
    (tmp_path / "upshift_run.json").write_text(json.dumps(run | {"finished": True}))
    assert examine_run(tmp_path)[-1].severity == "ok"
    with pytest.raises(RequestError, match="is not a folder"):
        examine_run(tmp_path / "nothing")
    with pytest.raises(RequestError, match="has neither"):
        examine_run(tmp_path / "checkpoint-2")


def test_what_was_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "upshift_out_of_memory.jsonl").write_bytes('{"step": 3, "verdict": "weights tür'.encode()[:-1])
    (tmp_path / "upshift_run.json").write_text("[1]")
    (found,) = examine_run(tmp_path)
    assert (found.severity, found.subject) == ("unknown", "memory")
    assert "line 1 of upshift_out_of_memory.jsonl, which says how, was cut off" in found.what


def test_a_report_of_this_process(tmp_path: Path) -> None:
    waits = threading.Event()
    thread = threading.Thread(target=waits.wait, name="sleeper", daemon=True)
    thread.start()
    stacks = current_stacks()
    assert any(stack.thread == "sleeper" and any("(wait)" in line for line in stack.frames) for stack in stacks)
    waits.set()
    try:
        raise ValueError("planted")
    except ValueError as error:
        report_of(error, rank=0, ranks=1, kind="died", step=1, words=str(error)).write(tmp_path)
    (found,) = examine_run(tmp_path)
    assert found.subject == "run" and "planted" in found.what and "test_a_report_of_this_process" in found.evidence
    delete_reports(tmp_path, rank=0, ranks=1)
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_run_that_goes_on_with_fewer_ranks_has_no_report_of_the_others(tmp_path: Path) -> None:
    """Four ranks die; two go on and finish. Each of the two deletes, in any order, and neither the other's new report."""
    for rank in range(4):
        report(rank, "died", "JobFailed: the loss became NaN").write(tmp_path)
        leave_findings(tmp_path, rank, [ok(f"rank {rank}", what="computed")])
    (tmp_path / FOLDER / "rank-notes.json").write_text("a user's own")
    delete_reports(tmp_path, rank=1, ranks=2)
    report(1, "slow", "rank 0 holds up the others").write(tmp_path)
    delete_reports(tmp_path, rank=0, ranks=2)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["rank-1.json", "rank-notes.json"]
    (tmp_path / "upshift_run.json").write_text(json.dumps({"tokens": [1], "arguments": {"max_steps": 1}, "finished": True}))
    assert [finding.severity for finding in examine_run(tmp_path)] == ["warning", "ok"]
