"""Write the report of a rank that hangs, slows down or dies, and examine all reports of a run for `upshift doctor RUN_DIR`."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from upshift.atomic_file import write_whole
from upshift.debugging.finding import Finding, error, ok, unknown, warning
from upshift.errors import RequestError
from upshift.settings import read_library_variables
from upshift.value import Value

FOLDER = "upshift_report"  # in the output folder of the run
MAX_FRAMES = 30  # innermost frames of a thread's stack
AUTOPSIES = "upshift_out_of_memory.jsonl"
RUN = "upshift_run.json"
REPORT_PREFIX = "rank-"
FINDINGS_PREFIX = "findings-rank-"


class Stack(Value):
    thread: str
    frames: tuple[str, ...]  # innermost last: file:line (function)


class RankReport(Value):
    """Hold what a rank reports about itself."""

    rank: int
    ranks: int
    kind: Literal["stalled", "slow", "died"]
    step: int
    words: str  # the exception, or the message of the watchdog
    waiting: str | None = None  # the collective that the rank started and that has not ended
    stacks: tuple[Stack, ...] = ()
    versions: dict[str, str] = {}
    variables: dict[str, str] = {}  # environment variables of the libraries that Upshift uses

    def write(self, output: Path) -> None:
        folder = output / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{REPORT_PREFIX}{self.rank}.json", self.to_json(indent=1))


def report_of(
    error: BaseException | None,
    *,
    rank: int,
    ranks: int,
    kind: str,
    step: int,
    words: str,
    waiting: str | None = None,
    versions: dict[str, str] | None = None,
) -> RankReport:
    """Return a report of this process, with the stack of the error, or without an error with the stacks of all threads."""
    variables = {name: value for name, value in read_library_variables().items() if name != "PATH"}
    if error is None:
        stacks = current_stacks()
    else:
        stacks = (Stack(thread="MainThread", frames=_lines(traceback.extract_tb(error.__traceback__))),)
    return RankReport.model_validate(
        {
            "rank": rank,
            "ranks": ranks,
            "kind": kind,
            "step": step,
            "words": words,
            "waiting": waiting,
            "stacks": stacks,
            "versions": versions or {},
            "variables": variables,
        }
    )


def current_stacks() -> tuple[Stack, ...]:
    """Return the stacks of all threads except this one, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own_thread = threading.get_ident()
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != own_thread}
    stacks = [
        Stack(thread=names.get(ident, str(ident)), frames=_lines(traceback.extract_stack(frame)))
        for ident, frame in frames.items()
    ]
    return tuple(sorted(stacks, key=lambda stack: stack.thread != "MainThread"))


def _lines(frames: traceback.StackSummary) -> tuple[str, ...]:
    return tuple(f"{_short_path(frame.filename)}:{frame.lineno} ({frame.name})" for frame in frames[-MAX_FRAMES:])


def _short_path(path: str) -> str:
    """Return the part of a path from the package on, so that a report contains no folders of the machine."""
    folders = Path(path).parts
    if "site-packages" in folders:
        return "/".join(folders[folders.index("site-packages") + 1 :])
    if "upshift" in folders:
        return "/".join(folders[folders.index("upshift") :])
    return "/".join(folders[-2:])


def delete_reports(output: Path, *, rank: int, ranks: int) -> None:
    """Delete the files that this rank wrote in an earlier run. Rank 0 also deletes those of ranks that the run has no more."""
    for path in (*_rank_files(output, REPORT_PREFIX), *_rank_files(output, FINDINGS_PREFIX)):
        number = _rank_of(path)
        if number == rank or (rank == 0 and number >= ranks):
            path.unlink(missing_ok=True)


def leave_findings(output: Path, rank: int, findings: list[Finding]) -> None:
    """Write the findings of a run about itself while it continues."""
    folder = output / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{FINDINGS_PREFIX}{rank}.json", json.dumps([finding.model_dump() for finding in findings], indent=1))


def _read_findings(output: Path) -> list[Finding]:
    """Return the findings of all ranks. For each subject only the finding of the first rank counts."""
    findings: dict[str, Finding] = {}
    for path in _rank_files(output, FINDINGS_PREFIX):
        for fields in json.loads(path.read_text(encoding="utf-8")):
            finding = Finding.from_fields(fields)
            findings.setdefault(finding.subject, finding)
    return list(findings.values())


def examine_run(output: Path) -> list[Finding]:
    """Return findings about the run in a folder. Raise RequestError if the folder has no run."""
    if not output.is_dir():
        raise RequestError(f"{output} is not a folder; give the output folder of a run, which has {RUN}")
    run = _parse_object(_read_text(output / RUN))
    reports = [RankReport.from_file(path) for path in _rank_files(output, REPORT_PREFIX)]
    autopsies = _read_text(output / AUTOPSIES).splitlines()
    stored = _read_findings(output)
    if run is None and not reports and not autopsies and not stored:
        raise RequestError(f"{output} has neither {RUN} nor {FOLDER}; give the output folder of a run")
    findings = [*_deaths(reports, output), *_stalls(reports, output), *_silent(reports), *_out_of_memory(autopsies), *stored]
    return findings + list(_ending(run, reports, output))


def _rank_files(output: Path, prefix: str) -> list[Path]:
    """Return the files of this prefix by rank."""
    paths = (output / FOLDER).glob(f"{prefix}*.json")
    return sorted((path for path in paths if path.stem.removeprefix(prefix).isdecimal()), key=_rank_of)


def _rank_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text, or None if the text is empty, incomplete or no object."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


FIXES = (  # a phrase of the error, and what to type
    ("out of memory", "upshift plan again: it plans for the memory that is free; or --set per_device_train_batch_size=1"),
    ("NaN", "upshift train ... --resume --learning-rate HALF; upshift.Trainer with debug='underflow_overflow' names the module"),
    (
        "infinite",
        "upshift train ... --resume --learning-rate HALF; upshift.Trainer with debug='underflow_overflow' names the module",
    ),
    ("No space left", "df -h OUTPUT; free some of it, then: upshift train ... --resume"),
    ("Connection", "another rank ended first: read its report; then: upshift train ... --resume"),
    ("closed by peer", "another rank ended first: read its report; then: upshift train ... --resume"),
)


def _deaths(reports: list[RankReport], output: Path) -> Iterator[Finding]:
    died = [report for report in reports if report.kind == "died"]
    first = [report for report in died if not any(word in report.words for word in ("Connection", "closed by peer"))] or died
    for report in first:
        fix = next((fix for word, fix in FIXES if word in report.words), "upshift train ... --resume, when its cause is gone")
        yield error(
            _rank_name(report),
            what=f"died in step {report.step}: {report.words[:300]}",
            evidence=_innermost_line(report),
            fix=fix.replace("OUTPUT", str(output)),
        )


def _stalls(reports: list[RankReport], output: Path) -> Iterator[Finding]:
    stalled = [report for report in reports if report.kind == "stalled"]
    message = next((report.words for report in stalled if report.words), "")
    for report in stalled:
        if report.waiting is None:
            yield error(
                _rank_name(report),
                what=f"holds up the others in step {report.step}: it is in no collective",
                evidence=f"{_innermost_line(report)}{'; ' + message if message else ''}",
                fix="look at that line: data, a lock, a full disk; end the run, then: upshift train ... --resume",
            )
    if stalled and all(report.waiting is not None for report in stalled):
        waits = "; ".join(f"{_rank_name(report)} in {report.waiting}" for report in stalled)
        yield error(
            "hang",
            what=f"every rank that left a report waits, in step {stalled[0].step}",
            evidence=waits,
            cause=message or None,
            fix="upshift doctor --network --hosts A,B on each of the same hosts; export NCCL_DEBUG=INFO; then --resume",
        )
    for report in reports:
        if report.kind == "slow":
            yield warning(
                "straggler",
                what=report.words,
                evidence=f"step {report.step}",
                fix="on its host: upshift doctor, and ps -eo pid,pcpu,args --sort=-pcpu | head",
            )


def _silent(reports: list[RankReport]) -> Iterator[Finding]:
    serious = [report for report in reports if report.kind != "slow"]
    if not serious:
        return
    missing = sorted(set(range(serious[0].ranks)) - {report.rank for report in serious})
    if missing:
        names = ", ".join(map(str, missing))
        yield error(
            f"rank {names}",
            what="left no report: its process was killed, or its host is gone",
            evidence=f"{len(serious)} of {serious[0].ranks} ranks left one",
            fix="on its host: dmesg -T | grep -i -E 'killed process|xid' names the cause; then --resume",
        )


def _out_of_memory(lines: list[str]) -> Iterator[Finding]:
    for number, line in enumerate(lines, start=1):
        autopsy = _parse_object(line)
        if autopsy is None:
            yield unknown("memory", what=f"ran out, and line {number} of {AUTOPSIES}, which says how, was cut off: left out")
            continue
        parts = ", ".join(f"{entry['part']} {entry['measured_gib']:.2f} GiB" for entry in autopsy["parts"])
        yield warning(
            "memory",
            what=f"ran out in step {autopsy['step']}: {autopsy['verdict']}",
            evidence=f"{parts}; it went on with {' x '.join(map(str, autopsy['smaller']))} tokens at once",
            fix="upshift plan again: what was measured corrects it; or --set per_device_train_batch_size=N",
        )


def _ending(run: dict[str, Any] | None, reports: list[RankReport], output: Path) -> Iterator[Finding]:
    if run is None:
        return
    steps = len(run.get("tokens", ()))
    max_steps = run.get("arguments", {}).get("max_steps")
    newest = max((int(path.name[11:]) for path in output.glob("checkpoint-*") if path.name[11:].isdigit()), default=None)
    checkpoint = "no checkpoint" if newest is None else f"newest checkpoint: {newest}"
    if run.get("finished"):
        yield ok("run", what=f"finished {steps} steps", evidence=f"{RUN}, {checkpoint}")
    elif not any(report.kind == "died" for report in reports):
        yield unknown(
            "run",
            what="has not finished: it runs, was stopped, or was killed without a word",
            evidence=f"{max_steps} steps asked, {checkpoint}",
        )


def _rank_name(report: RankReport) -> str:
    return f"rank {report.rank}" if report.ranks > 1 else "run"


def _innermost_line(report: RankReport) -> str:
    """Return the innermost line of the main thread, and the line of Upshift that called it."""
    main = next(iter(report.stacks), None)
    if main is None or not main.frames:
        return "no stack"
    upshift_line = next((line for line in reversed(main.frames) if line.startswith("upshift/")), None)
    if upshift_line is None or upshift_line == main.frames[-1]:
        return main.frames[-1]
    return f"{main.frames[-1]}, called from {upshift_line}"
