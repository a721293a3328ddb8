"""How long a user waits before anything is computed: importing, and planning for a model that was traced before.

    python benchmarks/cases/startup.py [--quick] [--rounds 9]

Each sample is a fresh process, timed from outside: its start and end count. The baselines, in the same rounds: a Python
process that does nothing, and one that imports transformers' Trainer.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from shapes import SHAPES, TINY, write_config

from upshift.benchmarking.case import Case, command_line
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table, interleave
from upshift.benchmarking.timing import time_call
from upshift.hardware import detect
from upshift.record import Numbers, Spread

CLAIMS = (
    Claim(
        name="plan",
        text="planning for a model that was traced before takes less than a second",
        ours="upshift plan",
        baseline="a Python that does nothing",
        unit="ms",
        better="lower",
        goal=1000.0,
        of=Source(row="plan, cached", value="measured.step_ms.p50"),
    ),
    Claim(
        name="import",
        text="importing is quick",
        ours="import upshift, with its Python",
        baseline="a Python that does nothing",
        unit="ms",
        better="lower",
        goal=100.0,
        of=Source(row="import upshift", value="measured.step_ms.p50"),
    ),
)

SUITE = "--rounds 5"
ROOT = Path(__file__).parents[1]
IMPORT_GOAL_MS, PLAN_GOAL_MS = 100.0, 1000.0


def commands(model: str, *, quick: bool) -> dict[str, list[str]]:
    python = [sys.executable, "-c"]
    plan = [sys.executable, "-m", "upshift.cli.main", "plan", model, "--train", "--sequence-length", "128", "--global-batch", "8"]
    if quick:  # less to trace before the first sample
        plan += ["--set", "precision=fp32", "--set", "torch_compile=off", "--set", "attention=sdpa"]
    return {
        "python": [*python, "pass"],
        "import upshift": [*python, "import upshift"],
        "import Trainer": [*python, "from transformers import Trainer"],
        "plan, cached": plan,
        "plan for a GPU that is not here, cached": [*plan, "--on", "1xh100"],
    }


def milliseconds(command: list[str]) -> float:
    return 1000 * time_call(lambda: subprocess.run(command, check=True, capture_output=True))


def run(case: Case, model: str, *, rounds: int) -> dict[str, Any]:
    timed = commands(model, quick=case.quick)
    for name in (name for name in timed if name.startswith("plan")):
        milliseconds(timed[name])  # traces, probes and caches what a first call caches
    samples = interleave({name: partial(milliseconds, command) for name, command in timed.items()}, rounds=rounds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name, values in samples.items():
        case.add(name, plan={}, measured=Numbers(step_ms=Spread.of(values, num_warmup=1)), details={"milliseconds": values})
    imported = medians["import upshift"] - medians["python"]
    outcome = {
        "case": "startup", "medians_ms": medians, "import_ms": imported,
        "goal_reached": imported < IMPORT_GOAL_MS and medians["plan, cached"] < PLAN_GOAL_MS,
    }  # fmt: skip
    print(format_table(("a process that", "median ms"), [[name, f"{value:.0f}"] for name, value in medians.items()]))
    return outcome


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    settings = {"model": "tiny" if options.quick else "llama-27m-gqa", "rounds": options.rounds}
    case = Case("startup", options.results, detect(), options.quick, settings)
    with tempfile.TemporaryDirectory(prefix="upshift-startup-") as folder:
        config = TINY if options.quick else SHAPES["llama-27m-gqa"]
        outcome = run(case, write_config(config, Path(folder) / "model"), rounds=options.rounds)
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
