"""Predicted against measured memory: what `upshift plan --set ...` says of a plan, and what a trial of it measures.

    python benchmarks/cases/memory.py [--quick] [--models llama-10m] [--write docs/accuracy.md]

Each setting is planned with every choice fixed, then run as a trial in a process of its own. The time of a step is
measured on the side, with two samples: enough for the factor that the first ranking may be off by.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shapes import SHAPES, TINY, write_config
from transformers import PretrainedConfig

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source, find_cases
from upshift.benchmarking.documents import renew_text
from upshift.benchmarking.harness import append_rows, format_table, percent, read_rows
from upshift.hardware.spec import Host
from upshift.models.source import ModelSource, find_model
from upshift.planning.planner import Planning, find_host, plan_training
from upshift.planning.trials.runner import TrialRequest, TrialServer, trial_server
from upshift.planning.trials.select import Tried
from upshift.planning.workload import Workload
from upshift.record import Record
from upshift.units import gib

CLAIMS = (
    Claim(
        name="allocated",
        text="predicted memory is what a step allocates",
        ours="the prediction, before anything ran",
        baseline="what was measured",
        unit="worst error",
        better="lower",
        goal=0.02,
        of=Source(row="summary", value="details.errors.allocated.worst"),
    ),
    Claim(
        name="resident",
        text="and what the process holds",
        ours="the prediction, before anything ran",
        baseline="what was measured",
        unit="median error",
        better="lower",
        of=Source(row="summary", value="details.errors.resident.median"),
    ),
)

SUITE = "--models llama-10m"
ROOT = Path(__file__).parents[1]
SUMMARY = "memory/summary"  # its row: errors over all settings
COMMAND = "python benchmarks/cases/memory.py --write docs/accuracy.md"
FIXED = {
    "attention": "sdpa", "torch_compile": "off", "optim": "adamw_torch_fused", "loss_chunk_tokens": 0,
    "num_processes": 1, "host_memory": "system",
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {"tiny": TINY, **SHAPES}
ALLOCATED_GOAL, RESIDENT_GOAL = 0.02, 0.10
TRIAL_SECONDS, LIMIT_SECONDS = 2.0, 300.0  # a micro-batch of twice that is not put under the meter


@dataclass(frozen=True)
class Setting:
    model: str
    sequence_length: int
    micro_batch: int
    accumulation: int
    precision: str
    recompute: bool


def settings(host: Host, models: list[str], *, quick: bool) -> list[Setting]:
    """In bf16 too, where the host has instructions for it."""
    precisions = ("fp32",) if host.supports("bf16") is False else ("fp32", "bf16")
    models, lengths = (["tiny"], [128]) if quick else (models, [128, 384])
    batches = [(2, 2)] if quick else [(2, 2), (4, 1)]
    combined = itertools.product(models, lengths, batches, precisions, (False, True))
    return [Setting(m, length, micro, accumulation, p, r) for m, length, (micro, accumulation), p, r in combined]


def plan_of(source: ModelSource, case: Case, setting: Setting) -> Planning:
    workload = Workload(sequence_length=setting.sequence_length, global_batch=setting.micro_batch * setting.accumulation)
    fixed = FIXED | {
        "precision": setting.precision,
        "per_device_train_batch_size": setting.micro_batch,
        "gradient_accumulation_steps": setting.accumulation,
        "activation_checkpointing": layers_of(source) if setting.recompute else 0,
    }
    return plan_training(source, case.host, workload, fixed=tuple(f"{name}={value}" for name, value in fixed.items()))


def layers_of(source: ModelSource) -> int:
    names = ("num_hidden_layers", "n_layer", "num_layers")
    layers = next(source.config[name] for name in names if name in source.config)
    return int(layers + source.config.get("num_decoder_layers", 0))


def measure(case: Case, server: TrialServer, setting: Setting, source: ModelSource) -> Record:
    planning = plan_of(source, case, setting)
    candidate = planning.ranking.candidates[0]
    plan = candidate.plan.model_validate(candidate.plan.model_dump())
    request = TrialRequest(
        model_reference=source.reference, from_config=True, plan=plan, global_batch=plan.global_batch,
        seconds=TRIAL_SECONDS, limit_seconds=LIMIT_SECONDS, seed=case.settings["seed"],
    )  # fmt: skip
    tried = Tried(candidate, [server.run(request)])
    details = {
        "parameters": planning.profile.parameters.total,
        "base_resident_gib": gib(tried.best.base_resident_bytes or 0) or None,
    }
    return case.add(
        setting.model, plan=plan.model_dump(), predicted=planning.numbers(candidate),
        measured=None if tried.failure else tried.numbers(), failure=tried.failure, details=details,
    )  # fmt: skip


def newest(rows: list[Record]) -> list[Record]:
    """Of the last run, or the last that predicted a run's rows again."""
    kept = [row for row in rows if row.name != SUMMARY]
    return [row for row in kept if _written(row) == _written(kept[-1])]


def _written(row: Record) -> str:
    return str(row.details.get("predicted_at", row.environment.time))


def predict_again(case: Case, rows: list[Record]) -> list[Record]:
    """The newest recorded rows with what this version predicts of their memory, appended; nothing is measured. The time stays as
    it was predicted for the machine that ran them."""
    again = []
    with tempfile.TemporaryDirectory(prefix="upshift-memory-") as folder:
        for row in newest(rows):
            name, plan = row.name.split("/")[1], row.plan
            source = find_model(write_config(CONFIGS[name], Path(folder) / name))
            setting = Setting(
                name, plan["sequence_length"], plan["per_device_train_batch_size"], plan["gradient_accumulation_steps"],
                plan["precision"], plan["activation_checkpointing"] > 0,
            )  # fmt: skip
            planning = plan_of(source, case, setting)
            found, before = planning.numbers(planning.ranking.candidates[0]), row.predicted
            timed = found.changed(step_ms=before.step_ms, tokens_per_second=before.tokens_per_second) if before else found
            again.append(row.changed(predicted=timed, details={**row.details, "predicted_at": case.environment.time}))
    append_rows(case.path, again)
    return again


def run(case: Case, models: list[str]) -> list[Record]:
    chosen = settings(case.host, models, quick=case.quick)
    rows = []
    if case.host.supports("bf16") is False:
        print_progress("bf16 is left out: this machine has no instructions for it")
    with tempfile.TemporaryDirectory(prefix="upshift-memory-") as folder, trial_server() as server:
        for number, setting in enumerate(chosen, start=1):
            reference = write_config(CONFIGS[setting.model], Path(folder) / setting.model)
            row = measure(case, server, setting, find_model(reference))
            rows.append(row)
            said = row.failure or percent(row.prediction_error("peak_gib"), digits=2)
            print_progress(f"{number}/{len(chosen)} {row.name} {label(row)}: {said}")
    return rows


def label(row: Record) -> str:
    plan = row.plan
    return f"{plan['sequence_length']} · {_batch(row)} · {plan['precision']} · recompute {plan['activation_checkpointing']}"


def _batch(row: Record) -> str:
    return f"{row.plan['per_device_train_batch_size']} x {row.plan['gradient_accumulation_steps']}"


HEADER = (
    "model", "tokens", "batch", "precision", "recomputed", "allocated MiB", "predicted", "error", "held MiB", "predicted",
    "error", "time, measured / predicted",
)  # fmt: skip


def metered(rows: list[Record]) -> list[Record]:
    """Not those whose micro-batch was too slow for the meter: the machine was busy, and the trial was cut short."""
    return [row for row in rows if row.measured and row.predicted and row.measured.peak_gib]


def table(rows: list[Record], *, markdown: bool) -> str:
    """Return a table of every setting, in the order of the rows: model, length, batch, precision, recomputed layers."""
    return format_table(HEADER, [_cells(row) for row in metered(rows)], markdown=markdown)


def _cells(row: Record) -> list[str]:
    assert row.measured is not None and row.predicted is not None
    measured, predicted = row.measured, row.predicted
    plan = row.plan
    cells = [row.name.split("/")[1], str(plan["sequence_length"]), _batch(row), plan["precision"]]
    cells.append(f"{plan['activation_checkpointing']} layers")
    for field, digits in (("peak_gib", 2), ("resident_gib", 1)):
        cells += [f"{1024 * getattr(numbers, field):.1f}" for numbers in (measured, predicted)]
        cells.append(percent(row.prediction_error(field), digits=digits))
    return [*cells, f"{time_factor(row):.2f}"]


def time_factor(row: Record) -> float:
    error = row.prediction_error("step_ms")
    return float("nan") if error is None else 1 / (1 + error)


def summary(rows: list[Record]) -> dict[str, object]:
    good = metered(rows)
    worst = {}
    for name, field in (("allocated", "peak_gib"), ("resident", "resident_gib")):
        errors = sorted(abs(row.prediction_error(field) or 0.0) for row in good)
        worst[name] = {"median": statistics.median(errors), "worst": errors[-1]} if errors else None
    factors = sorted(time_factor(row) for row in good)
    within = [abs(row.prediction_error("resident_gib") or 0.0) <= RESIDENT_GOAL for row in good]
    return {
        "case": "memory", "rows": len(rows), "failed": len(rows) - len(good), "errors": worst,
        "resident_within_goal": sum(within) / len(within) if within else None,
        "step_measured_over_predicted": {"lowest": factors[0], "median": statistics.median(factors), "highest": factors[-1]}
        if factors else None,
        "goal_reached": len(good) == len(rows) and bool(good) and worst["allocated"]["worst"] <= ALLOCATED_GOAL  # type: ignore[index]
        and worst["resident"]["worst"] <= RESIDENT_GOAL,  # type: ignore[index]
    }  # fmt: skip


def by_model(rows: list[Record], *, markdown: bool) -> str:
    cells = []
    for name in dict.fromkeys(row.name.split("/")[1] for row in rows):
        good = [row for row in metered(rows) if row.name.split("/")[1] == name]
        if not good:
            continue
        errors = {f: [abs(row.prediction_error(f) or 0.0) for row in good] for f in ("peak_gib", "resident_gib")}
        worst = [f"{100 * max(errors[f]):.{d}f} %" for f, d in (("peak_gib", 2), ("resident_gib", 1))]
        median = f"{100 * statistics.median(errors['resident_gib']):.1f} %"
        cells.append([name, len(good), worst[0], median, worst[1]])
    header = ("model", "plans", "allocated, worst error", "held, median error", "held, worst error")
    return format_table(header, cells, markdown=markdown)


PAGE = """# Accuracy of predictions

`upshift plan` predicts memory and time before anything runs. This page compares predictions of training plans with measurements.
It covers small models (from {smallest:.0f} to {largest:.0f} million parameters) on {cores} CPU cores.
For GPUs and large models, read [what others measured](accuracy_published.md). Unknown words are in the [glossary](glossary.md).

| predicted, before anything ran | result, over {metered} plans |
| --- | --- |
| allocated memory: all tensors at the highest moment of a step | wrong by at most {allocated:.2f} % |
| held memory: all memory of the process at its highest | wrong by {held:.1f} % in the median, by {held_worst:.1f} % at worst |
| time of a step, before any trial | measured / predicted: {median:.2f} in the median, from {low:.2f} to {high:.2f} |

A time above 1 means that a step took longer than predicted. Other programs ran at the same time, which makes steps slower.

Upshift does not rely on predicted times alone. Before a run starts, **trials** measure the best plans for some seconds each.
For one model, we ran 20 plans drawn at random, and compared the best of them with the plan that the trials chose. The chosen
plan was slower by [0.00](../benchmarks/results/regret.jsonl "regret/regret") of the best plan's time
([what is counted](../benchmarks/README.md#regret-what-is-counted)).

A run is about as fast as its trial said. We compared twelve runs of six models with their trials. The speed differed by
[0.05](../benchmarks/results/trial_against_run.jsonl "trial_against_run/speed") in the median and by
[0.09](../benchmarks/results/trial_against_run.jsonl "trial_against_run/speed_worst") at worst, as a share of the
trial's speed. The memory of
[1.00](../benchmarks/results/trial_against_run.jsonl "trial_against_run/held") of them was within the printed interval. No other
program ran. Repeat it with `python benchmarks/cases/trial_against_run.py`.

## How it was measured

Upshift predicted {rows} plans, and then ran each in a process of its own. {unmetered} of them were too slow to measure.
The tables show the other {metered}.

| | |
| --- | --- |
| command | `{command}` |
| raw data | [benchmarks/results/memory.jsonl](../benchmarks/results/memory.jsonl) |
| machine | {processor}, {cores} cores |
| libraries | torch {torch}, transformers {transformers} |
| measured | {time} |{again}
| models | random weights |
| data | every sequence has its full length |
| time of a step | two steps for each plan |

## By model

{summary}

## Every plan

| column | meaning |
| --- | --- |
| tokens | the length of a sequence |
| batch | micro-batch x gradient accumulation steps |
| recomputed | the number of layers with activation checkpointing |
| error | how much larger (+) or smaller (-) the prediction is than the measurement |

{table}
"""


def page(rows: list[Record]) -> str:
    environment = rows[0].environment
    totals = summary(rows)
    errors: dict[str, dict[str, float]] = totals["errors"]  # type: ignore[assignment]
    factors: dict[str, float] = totals["step_measured_over_predicted"]  # type: ignore[assignment]
    sizes = [row.details["parameters"] / 1e6 for row in rows]
    predicted_at = rows[0].details.get("predicted_at")
    again = f"\n| memory predicted again by a later version (`--predict-again`) | {predicted_at} |" if predicted_at else ""
    num_metered = len(metered(rows))
    text = PAGE.format(
        again=again, command=COMMAND, processor=environment.processor, cores=environment.num_cores,
        torch=environment.versions.get("torch"), transformers=environment.versions.get("transformers"), time=environment.time,
        rows=len(rows), metered=num_metered, unmetered=len(rows) - num_metered, smallest=min(sizes), largest=max(sizes),
        allocated=100 * errors["allocated"]["worst"], held=100 * errors["resident"]["median"],
        held_worst=100 * errors["resident"]["worst"], low=factors["lowest"], high=factors["highest"], median=factors["median"],
        summary=by_model(rows, markdown=True), table=table(rows, markdown=True),
    )  # fmt: skip
    return renew_text(text, find_cases(Path(__file__).parent))


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--models", default=",".join(SHAPES), help="with commas")
    parser.add_argument("--predict-again", action="store_true", help="no run: predict the newest recorded rows anew")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table to this Markdown file")
    options = parser.parse_args(arguments)
    models = options.models.split(",")
    if unknown := [name for name in models if name not in SHAPES]:
        parser.error(f"--models: {', '.join(unknown)} is none of {', '.join(SHAPES)}")
    case = Case("memory", options.results, find_host(None), options.quick, {"seed": options.seed})
    rows = predict_again(case, read_rows(case.path)) if options.predict_again else run(case, models)
    print(table(rows, markdown=False), by_model(rows, markdown=False), sep="\n\n")
    if options.write:
        options.write.write_text(page(rows), encoding="utf-8")
    found = summary(rows)
    case.add("summary", plan={}, measured=None, details={**found, "measured_at": rows[0].environment.time})
    print(json.dumps(found))
    return 0 if any(row.measured for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
