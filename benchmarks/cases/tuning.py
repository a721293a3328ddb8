"""A search of hyper-parameters against plain Optuna with transformers.Trainer: the same points, seeds and held-out loss.

    python benchmarks/cases/tuning.py [--quick] [--tasks lm,classifier,failures] [--seeds 1,2,3]

plain    Optuna around transformers.Trainer in one process, every trial to its end
upshift  upshift tune (lm) or upshift.Trainer.hyperparameter_search (classifier) with successive halving

Compared is the CPU time of everything a contender started, its own process and its imports included.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from tuning_data import write_classifier, write_failures, write_lm
from tuning_run import suggested

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table, run_fresh
from upshift.errors import JobFailed
from upshift.hardware import detect
from upshift.record import Numbers

CLAIMS = (
    Claim(
        name="compute",
        text="a search finds the same best with less compute",
        ours="upshift tune",
        baseline="Optuna with transformers.Trainer",
        options="--tasks classifier --seeds 1",
        better="lower",
        goal=0.4,
        of=Source(row="classifier/summary", value="details.median_compute"),
    ),
    Claim(
        name="compute-lm",
        text="likewise, of a causal language model",
        ours="upshift tune",
        baseline="Optuna with transformers.Trainer",
        options="--tasks lm --seeds 1",
        better="lower",
        goal=0.4,
        of=Source(row="lm/summary", value="details.median_compute"),
    ),
    Claim(
        name="growth",
        text="100 trials, 30 that do not fit, five that crash, one killed: the search ends and its process does not grow",
        ours="its largest memory after ten trials, less what it was then",
        baseline="what it was then",
        unit="of its memory",
        options="--tasks failures",
        better="lower",
        goal=0.02,
        of=Source(row="failures/summary", value="details.parent_growth"),
    ),
)

SUITE = "--tasks classifier --seeds 1"
ROOT = Path(__file__).parents[1]
TASKS = ("lm", "classifier", "failures")
SPACE: dict[str, Any] = {
    "learning_rate": {"low": 1e-5, "high": 1e-1, "log": True},
    "weight_decay": {"low": 0.0, "high": 0.1},
    "adam_beta2": [0.95, 0.99, 0.999],
    "lr_scheduler_type": ["linear", "cosine", "constant"],
}
COMPUTE_GOAL, LOSS_GOAL, MEMORY_GOAL = 0.4, 0.005, 0.02
TIMEOUT_SECONDS = 3 * 3600.0
SETTLED = 10  # trials after which the parent has loaded all it will
CRASHED, KILLED = (7, 27, 47, 67, 87), (55,)


@dataclass(frozen=True)
class Size:
    trials: int
    steps: int
    global_batch: int
    sequence_length: int
    hidden_size: int


FULL = Size(27, 180, 16, 128, 96)
QUICK = Size(4, 18, 4, 32, 32)


def draw_points(space: dict[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    return [suggested(study.ask(), space) for _ in range(count)]


def run_contender(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """In a fresh process with a fresh cache: what is planned is planned within its time."""
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="cache-", dir=folder) as cache:
        answer = run_fresh(
            [sys.executable, str(Path(__file__).with_name("tuning_run.py")), str(path)],
            timeout_seconds=TIMEOUT_SECONDS, env={**os.environ, "UPSHIFT_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/i"},
        )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return answer


def compare(task: str, case: Case, options: Any, folder: Path) -> dict[str, Any]:
    size = QUICK if options.quick else FULL
    model, data = (write_lm if task == "lm" else write_classifier)(folder, size)
    ratios, gaps, same = [], [], []
    for seed in options.seeds:
        common = {
            "task": task, "model": model, "data": data, "space": SPACE, "points": draw_points(SPACE, size.trials, seed),
            "seed": seed, "steps": size.steps, "global_batch": size.global_batch, "sequence_length": size.sequence_length,
        }  # fmt: skip
        answers = {}
        for name in ("plain", "upshift"):
            answers[name] = run_contender(common | {"contender": name}, folder)
            number, loss = best_of(answers[name])
            spent = f"{answers[name]['cpu_seconds']:.0f} CPU-s, {answers[name]['steps']} steps"
            print_progress(f"{task} seed {seed} {name}: best {loss:.4f} of trial {number}, {spent}")
            case.add(
                f"{task}/{name}", plan={}, measured=Numbers(evaluation_loss=loss),
                details={"seed": seed, "best": number, "points": common["points"]} | answers[name],
            )  # fmt: skip
        (plain, lowest), (ours, loss) = best_of(answers["plain"]), best_of(answers["upshift"])
        ratios.append(answers["upshift"]["cpu_seconds"] / answers["plain"]["cpu_seconds"])
        gaps.append(loss / lowest - 1)
        same.append(plain == ours)
    return {
        "task": task, "seeds": options.seeds, "compute": ratios, "median_compute": statistics.median(ratios), "loss_gap": gaps,
        "same_trial_is_best": same, "goal_reached": max(ratios) <= COMPUTE_GOAL and max(gaps) <= LOSS_GOAL,
    }  # fmt: skip


def best_of(answer: dict[str, Any]) -> tuple[int, float]:
    done = {int(number): value for number, value in answer["values"].items() if value is not None}
    number = min(done, key=lambda one: done[one])
    return number, done[number]


def failures(case: Case, options: Any, folder: Path) -> dict[str, Any]:
    """One hundred trials: 30 would not fit, 5 crash, one is killed."""
    count = 20 if options.quick else 100
    model, data, space, large, memory_gib = write_failures(folder)
    crash, kill = ([one for one in numbers if one < count] for numbers in (CRASHED, KILLED if not options.quick else (15,)))
    points = draw_points({"learning_rate": SPACE["learning_rate"]}, count, options.seed)
    for number, point in enumerate(points):
        point["sequence_length"] = large if number % 10 < 3 else space["sequence_length"][0]
    request = {
        "contender": "failures", "model": model, "data": data, "space": space, "points": points, "seed": options.seed,
        "steps": 3, "crash": crash, "kill": kill, "memory_gib": memory_gib,
    }  # fmt: skip
    answer = run_contender(request, folder)
    states = [row["state"] for row in answer["rows"]]
    settled = answer["resident"][SETTLED]
    outcome = {
        "task": "failures", "trials": count, "states": {state: states.count(state) for state in sorted(set(states))},
        "not_started": sum(row["reason"].startswith("not started") for row in answer["rows"]),
        "died": sum("died" in row["reason"] for row in answer["rows"]), "expected": [3 * count // 10, len(crash) + len(kill)],
        "parent_growth": max(answer["resident"][SETTLED:]) / settled - 1, "parent_mib": settled / 2**20,
        "best_loss": answer["best_loss"], "best_alone": answer["alone"],
    }  # fmt: skip
    outcome["goal_reached"] = (
        [outcome["not_started"], outcome["died"]] == outcome["expected"]
        and outcome["parent_growth"] <= MEMORY_GOAL
        and answer["best_loss"] == answer["alone"]
    )
    case.add("failures", plan={}, measured=Numbers(evaluation_loss=answer["best_loss"]), details=outcome | answer)
    return outcome


def table(outcomes: list[dict[str, Any]]) -> str:
    compared = [one for one in outcomes if "compute" in one]
    rows = [
        [one["task"], seed, f"{ratio:.2f}", f"{gap:+.2%}", "yes" if same else "no"]
        for one in compared
        for seed, ratio, gap, same in zip(
            one["seeds"], one["compute"], one["loss_gap"], one["same_trial_is_best"], strict=True
        )
    ]  # fmt: skip
    parts = [format_table(("task", "seed", "CPU time of plain's", "best loss over plain's", "same trial"), rows)] if rows else []
    for one in outcomes:
        if one["task"] == "failures":
            fields = ("trials", "not_started", "died", "parent_growth", "best_loss", "best_alone")
            parts.append(format_table(fields, [[one[field] for field in fields]]))
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="", help="default 1,2,3; 1 with --quick")
    options = parser.parse_args(arguments)
    options.seeds = [int(one) for one in (options.seeds or ("1" if options.quick else "1,2,3")).split(",")]
    size = QUICK if options.quick else FULL
    case = Case("tuning", options.results, detect(), options.quick, {"seeds": options.seeds, "space": SPACE, **vars(size)})
    outcomes = []
    for task in options.tasks.split(","):
        with tempfile.TemporaryDirectory(prefix="upshift-tuning-") as name:
            try:
                run = failures(case, options, Path(name)) if task == "failures" else compare(task, case, options, Path(name))
            except JobFailed as error:
                print(json.dumps({"case": "tuning", "task": task, "failure": str(error)}))
                return 1
        case.add(f"{task}/summary", plan={}, measured=None, details=run)
        outcomes.append(run)
    print(table(outcomes), json.dumps({"case": "tuning", "outcomes": outcomes}), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
