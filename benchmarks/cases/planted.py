"""Does a comparison call a difference what is none, and find one that is there? Planted: the same code twice, and 5 % more work.

    python benchmarks/cases/planted.py [--quick] [--comparisons 20,3] [--rounds 12] [--max-rounds 24,192]

Each comparison is upshift.compare of two functions of this file, by the processor's seconds, which count on a machine that
others use. false: the same work under two names, which must not be called faster or slower in any of the comparisons. true: 5 %
more work, which must be found in each; where the machine is busy that takes more rounds. Nothing is left out: every comparison
is a row.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from upshift.benchmarking.ab_test import compare
from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.hardware import detect
from upshift.record import Numbers, Spread

CLAIMS = (
    Claim(
        name="false", text="the same code twice is not called a difference", ours="A", baseline="A under another name",
        unit="of the comparisons", goal=1.0, of=Source(row="false/summary", value="details.right"),
    ),
    Claim(
        name="true", text="5 % more work is found", ours="A", baseline="A with 5 % more work",
        unit="of the comparisons", goal=1.0, of=Source(row="true/summary", value="details.right"),
    ),
)  # fmt: skip
SUITE = "--comparisons 5,1"
ROOT = Path(__file__).parents[1]
WORK = 40_000


def work(count: int) -> None:
    total = 0
    for number in range(count):
        total += number * number


def one() -> None:
    work(WORK)


def same() -> None:
    work(WORK)


def more() -> None:
    work(WORK * 105 // 100)


PLANTED = {"false": ("same", ("alike", "not decided")), "true": ("more", ("faster",))}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--comparisons", default="20,3", help="of the same code, and of 5 % more work")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-rounds", default="24,192", help="likewise")
    options = parser.parse_args(arguments)
    counts, limits = ([1, 1], [2, 2]) if options.quick else [
        [int(number) for number in text.split(",")] for text in (options.comparisons, options.max_rounds)
    ]  # fmt: skip
    rounds = 2 if options.quick else options.rounds
    settings = {"comparisons": counts, "rounds": rounds, "max_rounds": limits, "work": WORK}
    case, here, outcome = Case("planted", options.results, detect(), options.quick, settings), str(Path(__file__).resolve()), {}
    for (planted, (other, right)), count, most in zip(PLANTED.items(), counts, limits, strict=True):
        verdicts = Counter[str]()
        for number in range(count):
            names = [f"{here}:{name}" for name in ("one", other)]
            found = compare(*names, rounds=rounds, max_rounds=most, measure="cpu_seconds")
            verdicts[found.verdict] += 1
            print_progress(f"{planted} {number + 1}/{count}: {found}")
            details = {"comparison": found.changed(a=found.a.changed(label="one"), b=found.b.changed(label=other)).model_dump()}
            milliseconds = Spread.of([1000 * seconds for seconds in found.a.samples], num_warmup=1)
            case.add(planted, plan={}, measured=Numbers(step_ms=milliseconds), details=details)
        share = sum(verdicts[verdict] for verdict in right) / count
        case.add(f"{planted}/summary", plan={}, measured=None, details={"right": share, "verdicts": dict(verdicts)})
        outcome[planted] = {"right": share, **verdicts}
    print(json.dumps({"case": "planted", **outcome}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
