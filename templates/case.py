"""What is compared, in one sentence that is a question or a claim.

    python benchmarks/cases/NAME.py [--quick]

Copy to benchmarks/cases/NAME.py. `upshift bench list`, `run` and `report` find it by CLAIMS, which is read and not run: names and
numbers stand there as they are. Say here what runs, at what size, and what is timed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from upshift.benchmarking.ab_test import ratio
from upshift.benchmarking.case import Case, command_line
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import interleave
from upshift.benchmarking.timing import time_call
from upshift.hardware import detect
from upshift.record import Numbers, Spread

CLAIMS = (
    Claim(
        name="speed", text="a sum by sum() is faster than by a loop", ours="sum()", baseline="a loop", goal=2.0,
        of=Source(row="sum", value="details.loop_over_sum.value"),
    ),
)  # fmt: skip
ROOT = Path(__file__).parents[1]


def loop(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
    return total


def main(arguments: list[str] | None = None) -> int:
    options = command_line(__doc__ or "", results=ROOT / "results").parse_args(arguments)
    count = 10_000 if options.quick else 10_000_000
    case = Case(Path(__file__).stem, options.results, detect(), options.quick, {"count": count})
    contenders = {"sum": lambda: sum(range(count)), "loop": lambda: loop(count)}
    runs = {name: lambda call=call: time_call(call) for name, call in contenders.items()}
    samples = interleave(runs, rounds=3 if options.quick else 12)
    compared = ratio(samples["loop"], samples["sum"])
    for name, seconds in samples.items():
        milliseconds = [1000 * one for one in seconds]
        details = {"milliseconds": milliseconds, "loop_over_sum": compared.model_dump()}
        case.add(name, plan={}, measured=Numbers(step_ms=Spread.of(milliseconds)), details=details)
    print(json.dumps({"case": case.name, "loop_over_sum": str(compared)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
