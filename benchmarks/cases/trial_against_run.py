"""Does a run do what its trial said: tokens per second once warm, and the memory that the process holds?

    python benchmarks/cases/trial_against_run.py [--quick] [--only llama-mixed,bert-mixed] [--trial-seconds 20]

Twelve runs of `upshift train`, each in a process of its own, with trials: six models, full and mixed lengths, fp32 and bf16,
padded and packed, the loss whole and in chunks, one process and two, LoRA, and one run that is left to the planner. The trial of
the plan that then ran is compared with the run itself. Weights and tokens are random.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from shapes import SHAPES, TINY, write_config

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table, run_fresh
from upshift.errors import JobFailed
from upshift.hardware import detect
from upshift.record import Basis, Record

CLAIMS = (
    Claim(
        name="speed",
        text="a run is as fast as its trial said",
        ours="the run, once warm",
        baseline="its trial",
        unit="median error",
        better="lower",
        goal=0.05,
        of=Source(row="summary", value="details.speed.median"),
    ),
    Claim(
        name="speed_worst",
        text="in each of twelve runs",
        ours="the run, once warm",
        baseline="its trial",
        unit="worst error",
        better="lower",
        goal=0.10,
        of=Source(row="summary", value="details.speed.worst"),
    ),
    Claim(
        name="held",
        text="and its process holds what the interval behind the trial says",
        ours="runs within the interval",
        baseline="all",
        unit="of all",
        goal=1.0,
        of=Source(row="summary", value="details.held.within"),
    ),
    Claim(
        name="allocated",
        text="and so does what a step allocates",
        ours="runs within the interval",
        baseline="all",
        unit="of all",
        goal=1.0,
        of=Source(row="summary", value="details.allocated.within"),
    ),
)

SUITE = "--only llama-mixed,llama-full,bert-mixed --trial-seconds 12"
ROOT = Path(__file__).parents[1]
LENGTH, GLOBAL_BATCH, ROWS = 256, 8, 1397
TIMEOUT_SECONDS = 600.0
EAGER = ("torch_compile=off",)


@dataclass(frozen=True)
class Setting:
    """One run. ``fixed``: of its plan; the rest is the planner's choice."""

    model: str
    mixed: bool = True
    fixed: tuple[str, ...] = EAGER
    lora_rank: int | None = None
    steps: int = 24


SETTINGS = {
    "llama-mixed": Setting("llama-10m", fixed=(*EAGER, "precision=fp32", "packing=False", "num_processes=1")),
    "llama-packed": Setting("llama-10m", fixed=(*EAGER, "precision=bf16", "packing=True", "num_processes=1")),
    "llama-full": Setting("llama-10m", mixed=False, fixed=(*EAGER, "num_processes=1")),
    "llama-large": Setting(
        "llama-27m-gqa", fixed=(*EAGER, "precision=bf16", "packing=True", "loss_chunk_tokens=1024", "num_processes=1"), steps=16
    ),
    "gpt2-packed": Setting("gpt2-13m", fixed=(*EAGER, "precision=fp32", "packing=True", "num_processes=1")),
    "gpt2-full": Setting("gpt2-13m", mixed=False, fixed=(*EAGER, "precision=bf16", "num_processes=1")),
    "bert-mixed": Setting("bert-10m", fixed=(*EAGER, "num_processes=1")),
    "qwen2-chunked": Setting("qwen2-23m-tied", fixed=(*EAGER, "loss_chunk_tokens=1024", "num_processes=1"), steps=16),
    "t5-mixed": Setting("t5-9m", fixed=(*EAGER, "num_processes=1")),
    "llama-two-processes": Setting("llama-10m", fixed=(*EAGER, "num_processes=2")),
    "llama-lora": Setting("llama-10m", fixed=(*EAGER, "num_processes=1"), lora_rank=8),
    "gpt2-left-to-the-planner": Setting("gpt2-13m", fixed=(), steps=40),
}
QUICK = {
    "tiny-mixed": Setting("tiny", fixed=(*EAGER, "packing=False", "num_processes=1"), steps=12),
    "tiny-lora": Setting("tiny", fixed=(*EAGER, "num_processes=1"), lora_rank=4, steps=12),
}


def write_inputs(folder: Path, setting: Setting, *, seed: int, rows: int) -> tuple[str, Path]:
    """(the model, a folder or a config; its data: token ids a row)"""
    config = {"tiny": TINY, **SHAPES}[setting.model]
    reference = write_config(config, folder / "model")
    if setting.lora_rank is not None:  # an adapter goes around weights, not around a config alone
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(reference)
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4.3, 0.8, rows), 16, 2 * LENGTH) if setting.mixed else np.full(rows, LENGTH)
    path = folder / "data.jsonl"
    with path.open("w") as file:
        for length in lengths.astype(int):
            row = {"input_ids": rng.integers(1, config.vocab_size - 1, int(length)).tolist()}
            if config.model_type == "bert":  # without a tokenizer nothing tells which token is the mask
                row["labels"] = row["input_ids"]
            file.write(json.dumps(row) + "\n")
    return reference, path


def train(case: Case, setting: Setting, folder: Path, cache: Path, trial_seconds: float) -> Record:
    """`upshift train` with trials, of a cache that has seen no trial of this job."""
    reference, data = write_inputs(folder, setting, seed=case.settings["seed"], rows=200 if case.quick else ROWS)
    command = [
        sys.executable, "-m", "upshift", "train", reference, "--data", str(data), "-o", str(folder / "out"),
        "--sequence-length", str(LENGTH), "--global-batch", str(GLOBAL_BATCH), "--max-steps", str(setting.steps),
        "--trial-seconds", str(trial_seconds), "--json",
    ]  # fmt: skip
    command += ["--from-config"] if setting.lora_rank is None else ["--lora-rank", str(setting.lora_rank)]
    for field in setting.fixed:
        command += ["--set", field]
    answer = run_fresh(command, timeout_seconds=TIMEOUT_SECONDS, env={**os.environ, "UPSHIFT_CACHE": str(cache)})
    answer.pop("tree_resident_bytes")
    return Record.model_validate(answer)


def compared(record: Record) -> dict[str, Any]:
    """Run over trial. ``calm_speed``: of the run without the time in which it waited for cores, as a trial's speed is."""
    trial, run = record.predicted, record.measured
    assert trial is not None and run is not None and trial.tokens_per_second and run.tokens_per_second
    waited = record.details["waited_share"]
    found: dict[str, Any] = {
        "trial_tokens_per_second": trial.tokens_per_second, "run_tokens_per_second": run.tokens_per_second,
        "speed": run.tokens_per_second / trial.tokens_per_second, "waited_share": waited,
        "calm_speed": run.tokens_per_second / (1.0 - waited) / trial.tokens_per_second,
        "cpu_seconds_per_step": record.details["cpu_seconds_per_step"],
    }  # fmt: skip
    for name, field, basis in (("held", "resident_gib", trial.resident_basis), ("allocated", "peak_gib", trial.peak_basis)):
        predicted, measured = getattr(trial, field), getattr(run, field)
        if predicted and measured:
            found[name] = {"predicted_gib": predicted, "measured_gib": measured, **within(measured / predicted, basis)}
    return found


def within(ratio: float, basis: Basis | None) -> dict[str, Any]:
    low, high = (basis.interval if basis else None) or (0.0, float("inf"))
    return {"ratio": ratio, "interval": [low, high], "tier": basis.tier if basis else None, "within": low <= ratio <= high}


def summary(found: dict[str, dict[str, Any]], failed: list[str]) -> dict[str, Any]:
    totals: dict[str, Any] = {"runs": len(found), "failed": failed}
    for name in ("speed", "calm_speed"):
        errors = [abs(one[name] - 1.0) for one in found.values()]
        totals[name] = {"median": statistics.median(errors), "worst": max(errors)} if errors else None
    for name in ("held", "allocated"):
        rows = [one[name] for one in found.values() if name in one]
        errors = [abs(row["ratio"] - 1.0) for row in rows]
        totals[name] = {
            "within": sum(row["within"] for row in rows) / len(rows), "median": statistics.median(errors), "worst": max(errors),
        } if rows else None  # fmt: skip
    return totals


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--only", help="names of runs, with commas; default: all")
    parser.add_argument("--trial-seconds", type=float, help="of each run's trials; default 20, 6 with --quick")
    options = parser.parse_args(arguments)
    trial_seconds = options.trial_seconds or (6.0 if options.quick else 20.0)
    settings = QUICK if options.quick else SETTINGS
    names = options.only.split(",") if options.only else list(settings)
    if unknown := [name for name in names if name not in settings]:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(settings)}")
    case = Case(Path(__file__).stem, options.results, detect(), options.quick, {
        "seed": options.seed, "runs": names, "trial_seconds": trial_seconds,
    })  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="upshift-trial-against-run-") as name:
        for run in names:
            folder = Path(name) / run
            folder.mkdir()
            print_progress(run)
            try:
                record = train(case, settings[run], folder, Path(name) / "cache", trial_seconds)
            except JobFailed as error:
                failed.append(run)
                case.add(run, plan={}, measured=None, failure=str(error))
                print_progress(f"  {error}")
                continue
            found[run] = compared(record)
            case.add(run, plan=record.plan, predicted=record.predicted, measured=record.measured, details=found[run])
    totals = summary(found, failed)
    case.add("summary", plan={}, measured=None, details={**totals, "rows": found})
    cells = [
        [
            run, f"{one['trial_tokens_per_second']:,.0f}", f"{one['run_tokens_per_second']:,.0f}", f"{one['speed']:.3f}",
            f"{one['calm_speed']:.3f}", f"{one['waited_share']:.0%}",
            *(f"{one[part]['ratio']:.3f}" if part in one else "" for part in ("held", "allocated")),
        ]
        for run, one in found.items()
    ]  # fmt: skip
    header = ("run", "trial tok/s", "run tok/s", "run / trial", "without waiting", "waited", "held / predicted", "allocated")
    print(format_table(header, cells))
    print(json.dumps({"case": case.name, **totals}))
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
