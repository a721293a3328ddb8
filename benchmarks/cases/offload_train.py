"""How near is the forecast of training an adapter around weights that wait on the disk?

    python benchmarks/cases/offload_train.py [--quick] [--gigabytes 1,2] [--tokens 16,256] [--steps 8] [--rounds 2]

A Llama with random weights in fp32, LoRA of rank 8, one row of so many tokens a step, no trial and no records of earlier runs:
the tokens a second that the plan says beside those that the run then measures, each in a fresh process. The page cache keeps no
weights, as where the model is larger than memory.
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

import numpy as np
from load import config_of, write_model
from load_run import evict

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table, interleave, run_fresh
from upshift.hardware import detect
from upshift.record import Record

CLAIMS = (
    Claim(
        name="near",
        text="tokens a second of LoRA around weights on the disk, as said before it starts",
        ours="the forecast",
        baseline="what was measured",
        unit="times apart",
        better="lower",
        goal=1.3,
        of=Source(row="summary", value="details.furthest"),
    ),
)

SUITE = "--gigabytes 1 --tokens 16 --rounds 1"
ROOT = Path(__file__).parents[1]
RANK, ROWS = 8, 64
PLAIN = ("weight_offload=disk", "precision=fp32", "torch_compile=off", "num_processes=1")
TIMEOUT_SECONDS = 600.0


def train(request: dict[str, Any]) -> dict[str, Any]:
    """In this process: the Record of a run that nothing was known of before."""
    from upshift.loading.offload import hooks
    from upshift.training.arguments import Arguments, TrainRequest
    from upshift.training.job.job import run_job
    from upshift.training.run import prepare_run

    host = detect()
    assert host.cpu is not None
    full = host.changed(cpu=host.cpu.changed(free_memory_bytes=0))
    asked = TrainRequest(
        model=request["model"], data=request["data"], sequence_length=request["tokens"], global_batch=1,
        max_steps=request["steps"], fixed=PLAIN, lora_rank=RANK, trial_seconds=0.0,
    )  # fmt: skip
    prepared, steps = prepare_run(asked)
    hooks.detect = lambda: full  # type: ignore[attr-defined]
    evict(sorted(Path(request["model"]).glob("*.safetensors")))
    job = prepared.job(Arguments(max_steps=steps), output=Path(request["output"]), overwrite=True)
    record = run_job(job, prepared.data)
    terms = prepared.planning.ranking.candidates[0].time.terms
    return {"record": json.loads(record.to_json()), "terms": terms, "disk": prepared.planning.host.disk_bytes_per_second}


def fresh(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """With a cache of its own: no records correct the forecast."""
    path = scratch / "request.json"
    path.write_text(json.dumps(request))
    with tempfile.TemporaryDirectory(dir=scratch) as cache:
        command = [sys.executable, str(Path(__file__)), "--of", str(path)]
        return run_fresh(command, timeout_seconds=TIMEOUT_SECONDS, env=os.environ | {"UPSHIFT_CACHE": cache})


def run(case: Case, gigabytes: float, scratch: Path, options: Any) -> list[float]:
    """-> of each length, the forecast over what was measured."""
    folder = scratch / "model"
    config = config_of(gigabytes, quick=options.quick)
    model_bytes = write_model(config, folder, options.seed)
    runs = {}
    for tokens in map(int, options.tokens.split(",")):
        rows = np.random.default_rng(options.seed).integers(config.vocab_size, size=(ROWS, tokens)).tolist()
        data = scratch / f"{tokens}.jsonl"
        data.write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
        request = {
            "model": str(folder), "data": str(data), "tokens": tokens, "steps": options.steps, "output": str(scratch / "out"),
        }  # fmt: skip
        runs[f"{gigabytes:g} GB, {tokens} tokens"] = partial(fresh, request, scratch)
    print_progress(f"{gigabytes:g} GB: rows of {options.tokens} tokens")
    ratios, table = [], []
    for name, found in interleave(runs, rounds=options.rounds).items():
        records = [Record.from_json(json.dumps(one["record"])) for one in found]
        pairs = [(one.predicted.tokens_per_second, one.measured.tokens_per_second) for one in records]  # type: ignore[union-attr]
        ratios.append(median(said / did for said, did in pairs))  # type: ignore[operator]
        for one, record in zip(found, records, strict=True):
            case.add(
                name, plan=record.plan, predicted=record.predicted, measured=record.measured,
                details={"model_bytes": model_bytes, "disk": one["disk"], "terms": one["terms"], "ratio": ratios[-1]},
            )  # fmt: skip
        said, did = (median(column) for column in zip(*pairs, strict=True))  # type: ignore[type-var]
        disk, bound = median(one["disk"] or 0.0 for one in found), max(found[0]["terms"], key=found[0]["terms"].get)
        table.append([name, f"{said:.2f}", f"{did:.2f}", f"{ratios[-1]:.2f}", f"{disk / 1e6:.0f}", bound])
    print(format_table(("weights, row", "said, tokens/s", "measured", "ratio", "disk MB/s", "bound by"), table))
    return ratios


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="a run of fewer than five has no steady ones")
    parser.add_argument("--gigabytes", default="1,2", help="of the files")
    parser.add_argument("--tokens", default="16,256", help="of a row")
    parser.add_argument("--scratch", type=Path, help="an existing folder on the disk to be measured; default: the system's own")
    parser.add_argument("--of", type=Path, help="one run's request, in this process")
    options = parser.parse_args(arguments)
    if options.of is not None:
        print(json.dumps(train(json.loads(options.of.read_text()))))
        return 0
    settings = {key: getattr(options, key) for key in ("gigabytes", "tokens", "steps", "rounds")}
    case, ratios = Case("offload_train", options.results, detect(), options.quick, settings), []
    for gigabytes in map(float, options.gigabytes.split(",")):
        with tempfile.TemporaryDirectory(prefix="upshift-offload-", dir=options.scratch) as scratch:
            ratios += run(case, gigabytes, Path(scratch), options)
    furthest = max(max(ratio, 1 / ratio) for ratio in ratios)
    case.add("summary", plan={}, measured=None, details={"ratios": ratios, "furthest": furthest})
    print(json.dumps({"case": "offload_train", "ratios": ratios, "furthest": furthest}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
