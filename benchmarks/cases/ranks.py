"""One process with all cores, or a process for each core: which trains faster, and does the planner know?

    python benchmarks/cases/ranks.py [--quick] [--rounds 2] [--shapes llama-10m,llama-27m-gqa,gpt2-13m] [--steps 12]

``upshift train`` on the standard library's source, random weights, sequences of 128, a global batch of 8, each number of
processes in turn, by the plan that is predicted to be its fastest. Its prediction stands beside what was measured.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from shapes import SHAPES, TINY
from trainer_data import QUICK, Size, write_inputs

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Figure, Source
from upshift.benchmarking.harness import format_table, interleave, run_fresh
from upshift.hardware import detect
from upshift.record import Record

CLAIMS = (
    Claim(
        name="llama-10m", text="one process with all cores trains 10 M parameters faster than one for each, as predicted",
        ours="one process", baseline="a process for each of two cores", goal=1.0,
        of=Source(row="llama-10m/1", value="measured.tokens_per_second"),
        over=Source(row="llama-10m/2", value="measured.tokens_per_second"),
    ),
    Claim(
        name="llama-27m-gqa", text="one process with all cores trains 27 M parameters faster than one for each, as predicted",
        ours="one process", baseline="a process for each of two cores", goal=1.0,
        of=Source(row="llama-27m-gqa/1", value="measured.tokens_per_second"),
        over=Source(row="llama-27m-gqa/2", value="measured.tokens_per_second"),
    ),
)  # fmt: skip
FIGURES = (
    Figure(
        name="llama-10m-predicted", of=Source(row="llama-10m/1", value="predicted.tokens_per_second"),
        over=Source(row="llama-10m/2", value="predicted.tokens_per_second"),
    ),
    Figure(
        name="llama-27m-gqa-predicted", of=Source(row="llama-27m-gqa/1", value="predicted.tokens_per_second"),
        over=Source(row="llama-27m-gqa/2", value="predicted.tokens_per_second"),
    ),
)  # fmt: skip

SUITE = "--rounds 1 --shapes llama-10m"
ROOT = Path(__file__).parents[1]
SEQUENCE, GLOBAL_BATCH = 128, 8
TIMEOUT_SECONDS = 900.0


def train(model: Path, data: str, output: Path, processes: int, steps: int) -> Record:
    command = [
        sys.executable, "-m", "upshift.cli.main", "train", str(model), "--data", data, "-o", str(output), "--overwrite", "--json",
        "--from-config", "--sequence-length", str(SEQUENCE), "--global-batch", str(GLOBAL_BATCH), "--max-steps", str(steps),
        "--trial-seconds", "0", "--set", "torch_compile=off", "--set", f"num_processes={processes}",
    ]  # fmt: skip
    found = run_fresh(command, timeout_seconds=TIMEOUT_SECONDS)
    del found["tree_resident_bytes"]
    return Record.from_json(json.dumps(found))


def run(case: Case, shape: str, scratch: Path, options: Any) -> dict[str, Any]:
    config = TINY if options.quick else SHAPES[shape]
    small = Size(config.vocab_size, QUICK.hidden_size, QUICK.intermediate_size, 1, 3, SEQUENCE, options.steps)
    folder, data = write_inputs(scratch, small, full_length=False)
    config.save_pretrained(folder)
    counts = (1, os.cpu_count() or 1)
    runs = {
        str(count): partial(train, Path(folder), data, scratch / f"out-{count}", count, options.steps) for count in counts
    }  # fmt: skip
    print_progress(f"{shape}: {' and '.join(runs)} processes")
    found, table = {}, []
    for count, records in interleave(runs, rounds=options.rounds).items():
        for record in records:
            case.add(f"{shape}/{count}", plan=record.plan, measured=record.measured, predicted=record.predicted)
        measured = median(record.measured.tokens_per_second or 0.0 for record in records if record.measured)
        predicted = records[0].predicted.tokens_per_second if records[0].predicted else None
        found[count] = {"measured": measured, "predicted": predicted}
        table.append([f"{shape}, {count} processes", f"{predicted or 0:.0f}", f"{measured:.0f}"])
    print(format_table(("run", "predicted tokens/s", "measured"), table))
    faster = {kind: max(found, key=lambda count: found[count][kind] or 0.0) for kind in ("measured", "predicted")}
    return {"tokens_per_second": found, "faster": faster, "planner_is_right": faster["measured"] == faster["predicted"]}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--shapes", default="llama-10m,llama-27m-gqa,gpt2-13m")
    options = parser.parse_args(arguments)
    settings = {"sequence_length": SEQUENCE, "global_batch": GLOBAL_BATCH, "steps": options.steps, "rounds": options.rounds}
    case, outcome = Case("ranks", options.results, detect(), options.quick, settings), {}
    for shape in ["tiny"] if options.quick else options.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="upshift-ranks-") as scratch:
            outcome[shape] = run(case, shape, Path(scratch), options)
    print(json.dumps({"case": "ranks", "shapes": outcome}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
