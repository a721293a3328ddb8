"""Training speed against transformers.Trainer: the same model, data, global batch, seed and learning rate.

    python benchmarks/cases/trainer.py [--quick] [--full] [--rounds 6]

plain    Trainer with its defaults: fp32, padding
careful  Trainer with what a careful person sets by hand: bf16, torch_compile, fused AdamW, and packing where it helps
upshift  the plan that trials chose once, before the rounds

Contenders run in turn, each time in a fresh process with an empty compilation cache. Speed counts real tokens. Steady: the
second half of the steps; with start-up: from the first step on, compilation included.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer_data import FULL, QUICK, Size, write_inputs
from trainer_run import CAREFUL

from upshift.benchmarking.ab_test import Ratio, ratio, relative_error
from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table, interleave, percent, run_fresh
from upshift.errors import JobFailed
from upshift.planning.planner import Planning, find_host
from upshift.planning.trials.store import proof_path
from upshift.record import Numbers, Spread
from upshift.training.arguments import TrainRequest
from upshift.training.run import PreparedRun, Watcher, prepare_run

CLAIMS = (
    Claim(
        name="plain",
        text="upshift train is faster than Trainer's defaults, with mixed lengths",
        ours="upshift train",
        baseline="transformers.Trainer, its defaults",
        options="--steps 10 --rounds 2",
        of=Source(
            row="summary", value="details.ratios.upshift/plain tokens_per_second.value", where={"full_length": False, "steps": 10}
        ),
    ),
    Claim(
        name="careful",
        text="and than careful flags with packing by hand",
        ours="upshift train",
        baseline="Trainer with bf16, torch_compile, fused AdamW, packing",
        options="--steps 10 --rounds 2",
        of=Source(
            row="summary",
            value="details.ratios.upshift/careful tokens_per_second.value",
            where={"full_length": False, "steps": 10},
        ),
    ),
    Claim(
        name="full",
        text="with sequences of full length, over careful flags",
        ours="upshift train",
        baseline="Trainer with bf16, torch_compile, fused AdamW",
        options="--full",
        of=Source(row="summary", value="details.ratios.upshift/careful tokens_per_second.value", where={"full_length": True}),
    ),
)
PEERS = {"transformers.Trainer": "--contenders plain,upshift", "careful": "--contenders careful,upshift"}

SUITE = "--quick"
ROOT = Path(__file__).parents[1]
GLOBAL_BATCH, LEARNING_RATE = 8, 5e-5  # TrainingArguments' own defaults
PLANNED_STEPS = 1000  # the run that the plan is chosen for; compilation is spread over it
LOSS_GOAL = 0.005
NAMES = ("plain", "careful", "upshift")
TIMEOUT_SECONDS = 3600.0
WATCHED_STEPS = 3  # Upshift's third step runs under the allocator's meter, which slows it


@dataclass(frozen=True)
class Inputs:
    model: str
    data: str
    folder: Path
    size: Size
    global_batch: int = GLOBAL_BATCH


def choose_plan(inputs: Inputs, fixed: tuple[str, ...], trial_seconds: float) -> PreparedRun:
    """Plans and proves anew: what earlier trials said of the same job on this machine is forgotten."""

    def planned(planning: Planning) -> None:
        proof_path(planning, fixed=fixed, from_config=True).unlink(missing_ok=True)

    watcher = Watcher(
        planned=planned,
        tried=lambda tried: print_progress(
            f"  trial: {tried.candidate.plan.label()}: {tried.failure or round(tried.best.tokens_per_second or 0)} tokens/s"
        ),
    )
    request = TrainRequest(
        model=inputs.model, data=inputs.data, sequence_length=inputs.size.sequence_length, global_batch=inputs.global_batch,
        max_steps=PLANNED_STEPS, fixed=fixed, from_config=True, trial_seconds=trial_seconds,
    )  # fmt: skip
    prepared, _ = prepare_run(request, watcher=watcher)
    return prepared


def request_of(name: str, inputs: Inputs, *, collator: str, seed: int) -> dict[str, Any]:
    common = {
        "contender": name, "model": inputs.model, "data": inputs.data, "plan": str(inputs.folder / "plan.json"),
        "sequence_length": inputs.size.sequence_length, "global_batch": inputs.global_batch, "steps": inputs.size.steps,
        "seed": seed, "learning_rate": LEARNING_RATE,
    }  # fmt: skip
    if name == "careful":
        return common | {"flags": CAREFUL, "collator": collator}
    return common | {"flags": {}, "collator": "pad"}


def run_contender(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    with tempfile.TemporaryDirectory(prefix="inductor-", dir=folder) as cache:
        answer = run_fresh(
            [sys.executable, str(Path(__file__).with_name("trainer_run.py")), str(path)],
            timeout_seconds=TIMEOUT_SECONDS, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        )  # fmt: skip
    return answer | speeds(answer["seconds"], answer["tokens"])


def speeds(seconds: list[float], tokens: list[int]) -> dict[str, Any]:
    half = max(len(seconds) // 2, WATCHED_STEPS)
    steps = [1000 * (after - before) for before, after in zip(seconds[half - 1 :], seconds[half:], strict=False)]
    steady = (tokens[-1] - tokens[half - 1]) / (seconds[-1] - seconds[half - 1])
    return {
        "tokens_per_second": steady, "tokens_per_second_with_startup": tokens[-1] / seconds[-1],
        "startup_seconds": max(seconds[half - 1] - tokens[half - 1] / steady, 0.0), "step_ms": steps,
    }  # fmt: skip


def numbers(answer: dict[str, Any]) -> Numbers:
    last = answer["losses"][len(answer["losses"]) // 2 :]
    return Numbers(
        peak_gib=answer["peak_gib"],
        resident_gib=answer["resident_gib"],
        step_ms=Spread.of(answer["step_ms"], num_warmup=len(answer["seconds"]) - len(answer["step_ms"])),
        tokens_per_second=answer["tokens_per_second"],
        loss=statistics.fmean(last),
        evaluation_loss=answer["evaluation_loss"],
        one_time_seconds=answer["startup_seconds"],
    )


def compare(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, ratios over the rounds, and whether the losses agree with plain's."""
    fields = ("tokens_per_second", "tokens_per_second_with_startup", "startup_seconds", "resident_gib", "evaluation_loss")
    medians = {
        name: {field: statistics.median(answer[field] for answer in answers) for field in fields}
        for name, answers in results.items()
    }
    ratios: dict[str, Ratio] = {}
    for ours, theirs in (("upshift", "plain"), ("upshift", "careful"), ("careful", "plain")):
        if ours in results and theirs in results:
            for field in fields[:2]:
                samples = [[answer[field] for answer in results[name]] for name in (ours, theirs)]
                ratios[f"{ours}/{theirs} {field}"] = ratio(*samples)
    errors = {
        name: relative_error(medians[name]["evaluation_loss"], medians["plain"]["evaluation_loss"])
        for name in medians if name != "plain" and "plain" in medians
    }  # fmt: skip
    step_errors = {
        name: max(abs(a / b - 1) for a, b in zip(results[name][0]["losses"], results["plain"][0]["losses"], strict=True))
        for name in errors
    }
    ours = errors.get("upshift")
    return {
        "case": "trainer", "medians": medians, "ratios": {name: value.model_dump() for name, value in ratios.items()},
        "evaluation_loss_over_plain": errors, "largest_step_loss_difference": step_errors,
        "same_tokens": len({tuple(answer["tokens"]) for answers in results.values() for answer in answers}) == 1,
        "loss_goal_reached": ours is not None and abs(ours) <= LOSS_GOAL,
    }  # fmt: skip


def table(outcome: dict[str, Any]) -> str:
    rows = [
        [
            name, f"{m['tokens_per_second']:.0f}", f"{m['tokens_per_second_with_startup']:.0f}", f"{m['startup_seconds']:.1f}",
            f"{m['resident_gib']:.2f}", f"{m['evaluation_loss']:.4f}",
            percent(outcome["evaluation_loss_over_plain"].get(name), digits=2) if name != "plain" else "",
        ]
        for name, m in outcome["medians"].items()
    ]  # fmt: skip
    header = ("contender", "tokens/s", "with start-up", "start-up s", "resident GiB", "held-out loss", "against plain")
    ratios = [[name, str(Ratio.model_validate(value))] for name, value in outcome["ratios"].items()]
    return f"{format_table(header, rows)}\n\n{format_table(('ratio', 'median (interval)'), ratios)}"


def run(case: Case, options: Any, inputs: Inputs) -> dict[str, Any]:
    prepared = choose_plan(inputs, tuple(options.set), options.trial_seconds)
    (inputs.folder / "plan.json").write_text(prepared.plan.to_json())
    print_progress(f"chosen: {prepared.plan.label()}")
    names = options.contenders.split(",")
    requests = {n: request_of(n, inputs, collator=case.settings["collator"], seed=options.seed) for n in names}

    def keep(number: int, name: str, answer: dict[str, Any]) -> None:
        rates = f"{answer['tokens_per_second']:.0f} tokens/s, start-up {answer['startup_seconds']:.1f} s"
        print_progress(f"round {number + 1} {name}: {rates}")
        chosen = name == "upshift"
        case.add(
            name, plan=prepared.plan.model_dump() if chosen else requests[name] | {"model": None, "data": None, "plan": None},
            predicted=prepared.predicted if chosen else None, measured=numbers(answer), details={"round": number} | answer,
        )  # fmt: skip

    runs = {name: partial(run_contender, request, inputs.folder) for name, request in requests.items()}
    results = interleave(runs, rounds=options.rounds, on_result=keep)
    outcome = compare(results) | {"plan": prepared.plan.label(), "rounds": options.rounds, **case.settings}
    case.add("summary", plan=prepared.plan.model_dump(), measured=None, details=outcome)
    return outcome


def parse(arguments: list[str] | None) -> Any:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--full", action="store_true", help="every sequence full-length: nothing to gain from padding less")
    parser.add_argument("--rounds", type=int, help="default 6; 1 with --quick")
    parser.add_argument("--steps", type=int, help=f"of each run, more than {WATCHED_STEPS}; default 40, 8 with --quick")
    parser.add_argument("--contenders", default=",".join(NAMES))
    parser.add_argument(
        "--collator", choices=("rows", "flatten", "pad", "pad-64"), help="of careful; default the fastest correct one"
    )
    parser.add_argument("--trial-seconds", type=float, help="default 60; 20 with --quick")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="fix a field of Upshift's plan")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps <= WATCHED_STEPS:
        parser.error(f"--steps {options.steps} leaves no steady step; use {WATCHED_STEPS + 1} or more")
    options.rounds = options.rounds or (1 if options.quick else 6)
    options.trial_seconds = options.trial_seconds or (20.0 if options.quick else 60.0)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    size = QUICK if options.quick else FULL
    if options.steps:
        size = Size(**{**vars(size), "steps": options.steps})
    collator = options.collator or ("pad" if options.full else "rows")
    settings = {"seed": options.seed, "full_length": options.full, "collator": collator, **vars(size)}
    case = Case("trainer", options.results, find_host(None), options.quick, settings)
    with tempfile.TemporaryDirectory(prefix="upshift-trainer-") as name:
        model, data = write_inputs(Path(name), size, full_length=options.full)
        try:
            outcome = run(case, options, Inputs(model, data, Path(name), size))
        except JobFailed as error:
            print(json.dumps({"case": "trainer", "failure": str(error)}))
            return 1
    print(table(outcome), json.dumps(outcome), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
