"""Does every case run, and all of them within an hour?

    python benchmarks/cases/suite.py [--quick] [--minutes 60] [--only encode,load] [--rows build/suite]

Each case in turn, in a process of its own, with what it states as SUITE: fewer rounds, the smaller of its shapes. What that
measures is appended to --rows and not to the results, which full runs make.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import CaseFile, Claim, Source, Table, find_case, find_cases
from upshift.benchmarking.harness import format_table, run_fresh
from upshift.errors import JobFailed
from upshift.hardware import detect

CLAIMS = (
    Claim(
        name="minutes",
        text="all cases, of fewer rounds, run one after the other on two cores within an hour",
        ours="all of them",
        baseline="an hour",
        unit="minutes",
        better="lower",
        goal=60.0,
        of=Source(row="summary", value="details.minutes"),
    ),
    Claim(
        name="ended",
        text="and each of them ends as it should",
        ours="cases that ended with exit code 0",
        baseline="all",
        unit="of all",
        goal=1.0,
        of=Source(row="summary", value="details.ended"),
    ),
)

TABLES = (
    Table(
        name="cases",
        header=("case", "options", "seconds"),
        of="summary",
        each="details.cases",
        cells=("{options}", "{seconds:.0f}"),
    ),
)

ROOT = Path(__file__).parents[1]
WORDS = 100  # letters of a failure that the table shows, its last: the row has all


def run(case: CaseFile, options: list[str], rows: Path, seconds: float) -> dict[str, Any]:
    """How a case ended, and after how long."""
    start, failure = time.monotonic(), ""
    try:
        run_fresh([sys.executable, str(case.path), *options, "--results", str(rows)], timeout_seconds=seconds)
    except JobFailed as error:
        failure = str(error)
    return {"options": " ".join(options), "seconds": time.monotonic() - start, "failure": failure}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--minutes", type=float, default=60.0, help="no case goes on after these")
    parser.add_argument("--only", help="names of cases, with commas; default: all")
    parser.add_argument("--rows", type=Path, default=ROOT.parent / "build" / "suite", help="folder of what the cases write")
    options = parser.parse_args(arguments)
    folder, this = Path(__file__).parent, Path(__file__).stem
    chosen = [find_case(name, folder) for name in options.only.split(",")] if options.only else list(find_cases(folder).values())
    chosen = [case for case in chosen if case.name != this]
    options.rows.mkdir(parents=True, exist_ok=True)
    settings = {"minutes": options.minutes, "cases": [case.name for case in chosen]}
    suite, start, found = Case(this, options.results, detect(), options.quick, settings), time.monotonic(), {}
    for case in chosen:
        left = 60.0 * options.minutes - (time.monotonic() - start)
        asked = ["--quick"] if options.quick else shlex.split(case.suite)
        print_progress(f"{case.name} {' '.join(asked)}")
        one = run(case, asked, options.rows.resolve(), left) if left > 0 else {
            "options": " ".join(asked), "seconds": 0.0, "failure": "not started: no time was left",
        }  # fmt: skip
        suite.add(case.name, plan={}, measured=None, failure=one["failure"] or None, details=one)
        found[case.name] = one
    minutes, ended = (time.monotonic() - start) / 60, sum(not one["failure"] for one in found.values()) / len(found)
    suite.add("summary", plan={}, measured=None, details={"minutes": minutes, "ended": ended, "cases": found})
    cells = [[name, one["options"], f"{one['seconds']:.0f}", one["failure"][-WORDS:]] for name, one in found.items()]
    print(format_table(("case", "options", "seconds", "failure"), cells))
    print(json.dumps({"case": this, "minutes": minutes, "ended": ended}))
    return 0 if ended == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
