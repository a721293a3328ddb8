"""How much faster the best plan is than the one that trials chose: plans drawn at random, all of them run.

    python benchmarks/cases/regret.py [--quick] [--plans 20]

Each drawn plan is a trial of its own; then `prove` chooses within its budget, knowing nothing of them. The fastest few,
the chosen plan and the plain default are run again in turn, and their medians decide: regret is the chosen plan's step
time over the best one's, less 1. The run planned for is so long that one-time costs do not count.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shapes import SHAPES, TINY, write_config

from upshift.benchmarking.ab_test import ratio
from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table, interleave, percent
from upshift.models.source import find_model
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning, find_host, plan_training
from upshift.planning.search.enumerate import enumerate_plans
from upshift.planning.search.ranking import Candidate, cost_plan
from upshift.planning.search.space import parse_fixed
from upshift.planning.trials.runner import TrialRequest, TrialResult, trial_server
from upshift.planning.trials.select import Proof, Tried, prove
from upshift.planning.workload import Workload

CLAIMS = (
    Claim(
        name="regret",
        text="the plan that trials chose is nearly the best of all",
        ours="the chosen plan",
        baseline="the best of 20 drawn",
        unit="of the best's time",
        better="lower",
        goal=0.05,
        of=Source(row="summary", value="details.regret"),
    ),
)

SUITE = "--plans 3 --budget 15"
ROOT = Path(__file__).parents[1]
GOAL = 0.05
TOTAL_STEPS = 1_000_000
LIMIT_SECONDS = 600.0
Run = Callable[[Plan], TrialResult]


def draw(planning: Planning, fixed: dict[str, Any], *, count: int, seed: int) -> list[Candidate]:
    """Plans of the whole space that can be costed; those that do not fit are drawn too."""
    plans = list(enumerate_plans(planning.host, planning.profile, planning.workload, fixed=fixed))
    random.Random(seed).shuffle(plans)
    drawn: list[Candidate] = []
    for plan in plans:
        if len(drawn) == count:
            break
        known = cost_plan(plan, host=planning.host, profile=planning.profile, workload=planning.workload)
        if isinstance(known, Candidate):
            drawn.append(known)
    return drawn


def step_ms(result: TrialResult) -> float | None:
    return 1000 * result.step_seconds.p50 if result.step_seconds else None


def keep(case: Case, planning: Planning, tried: Tried, role: str) -> None:
    failure = tried.failure
    case.add(
        role, plan=plain(tried.candidate.plan).model_dump(), predicted=planning.numbers(tried.candidate),
        measured=None if failure else tried.numbers(), failure=failure,
        details={"step_ms": [step_ms(result) for result in tried.results]},
    )  # fmt: skip
    print_progress(f"{role}: {tried.candidate.plan.label()}: {failure or f'{step_ms(tried.best):.1f} ms'}")


def plain(plan: Plan) -> Plan:
    """Validated: plans of the space are made without."""
    return Plan.model_validate(plan.model_dump())


def decide(tried: dict[str, Tried], run: Run, *, rounds: int, finalists: int) -> dict[str, list[float]]:
    """Step times in ms of the fastest few, the chosen plan and the default, over all rounds."""
    works = {name: entry for name, entry in tried.items() if entry.ok}
    ordered = sorted(works, key=lambda name: step_ms(works[name].best) or float("inf"))
    names = dict.fromkeys([*ordered[:finalists], "chosen", "default"])
    runs = {name: partial(run, plain(works[name].candidate.plan)) for name in names}
    looks = interleave(runs, rounds=rounds)
    complete = [n for n in range(rounds) if all(looks[name][n].step_seconds for name in names)]
    return {name: [step_ms(looks[name][n]) or 0.0 for n in complete] for name in names}


def outcome_of(samples: dict[str, list[float]], tried: dict[str, Tried], proof: Proof) -> dict[str, Any]:
    medians = {name: statistics.median(times) for name, times in samples.items()}
    best = min(medians, key=lambda name: medians[name])
    against = ratio(samples["chosen"], samples[best])
    first = sorted(step_ms(t.best) or 0.0 for name, t in tried.items() if t.ok and name.startswith("drawn"))
    known = against.low is not None and against.high is not None
    return {
        "case": "regret", "regret": medians["chosen"] / medians[best] - 1,
        "interval": [against.low - 1, against.high - 1] if known else None,
        "best": tried[best].candidate.plan.label(), "chosen": proof.chosen.candidate.plan.label(),
        "default": proof.default.candidate.plan.label(),
        "chosen_over_default": ratio(samples["chosen"], samples["default"]).model_dump(),
        "drawn_median_over_chosen": statistics.median(first) / medians["chosen"] if first else None,
        "plans": len(tried), "failed": sum(not t.ok for t in tried.values()), "trials_of_prove": len(proof.tried),
        "medians_ms": medians, "goal_reached": medians["chosen"] / medians[best] - 1 <= GOAL,
    }  # fmt: skip


def run_case(case: Case, reference: str, options: Any) -> dict[str, Any]:
    settings = case.settings
    workload = Workload(
        sequence_length=settings["sequence_length"], global_batch=settings["global_batch"], total_steps=TOTAL_STEPS
    )
    planning = plan_training(find_model(reference), case.host, workload, fixed=tuple(options.set))
    with trial_server() as server:

        def run(plan: Plan, limit_seconds: float = LIMIT_SECONDS) -> TrialResult:
            return server.run(
                TrialRequest(
                    model_reference=reference,
                    from_config=True,
                    plan=plain(plan),
                    global_batch=workload.global_batch,
                    seconds=settings["seconds"],
                    limit_seconds=limit_seconds + 120.0,
                    seed=options.seed,
                )  # fmt: skip
            )

        tried: dict[str, Tried] = {}
        fixed = parse_fixed(tuple(options.set), case.host, planning.profile, workload)
        drawn = draw(planning, fixed, count=settings["plans"], seed=options.seed)
        for number, candidate in enumerate(drawn, start=1):
            tried[f"drawn {number}"] = Tried(candidate, [run(candidate.plan)])
            keep(case, planning, tried[f"drawn {number}"], "drawn")
        proof = prove(
            planning.ranking.candidates, planning.default, workload=workload, run=run, budget_seconds=settings["budget"]
        )
        for name, entry in (("chosen", proof.chosen), ("default", proof.default)):
            tried[name] = entry
            keep(case, planning, entry, name)
        samples = decide(tried, run, rounds=settings["rounds"], finalists=settings["finalists"])
    outcome = outcome_of(samples, tried, proof)
    case.add(
        "summary", plan=plain(proof.chosen.candidate.plan).model_dump(), measured=None, details=outcome | {"samples_ms": samples}
    )
    print(report(samples, tried, planning))
    return outcome


def report(samples: dict[str, list[float]], tried: dict[str, Tried], planning: Planning) -> str:
    def cells(name: str, entry: Tried) -> list[str]:
        times = samples.get(name)
        measured = statistics.median(times) if times else step_ms(entry.best)
        predicted = 1000 * entry.candidate.time.total
        shown = [f"{measured:.1f}" if measured else entry.failure or "failed", f"{predicted:.1f}"]
        return [f"{name}: {entry.candidate.plan.label()}", *shown, str(len(times) if times else len(entry.results))]

    ordered = sorted(tried.items(), key=lambda item: step_ms(item[1].best) or float("inf"))
    return format_table(("plan", "step ms", "predicted", "looks"), [cells(name, entry) for name, entry in ordered])


def parse(arguments: list[str] | None) -> Any:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--plans", type=int, help="how many to draw; default 20, 4 with --quick")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="fix a field of every plan")
    parser.add_argument("--budget", type=float, help="seconds of prove; default 60, 10 with --quick")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    settings = {"model": "llama-27m-gqa", "sequence_length": 256, "global_batch": 8, "seconds": 2.0, "rounds": 6, "finalists": 3}
    if options.quick:
        settings = {"model": "tiny", "sequence_length": 128, "global_batch": 4, "seconds": 0.2, "rounds": 4, "finalists": 1}
    settings |= {
        "seed": options.seed, "plans": options.plans or (4 if options.quick else 20),
        "budget": options.budget or (10.0 if options.quick else 60.0),
    }  # fmt: skip
    case = Case("regret", options.results, find_host(None), options.quick, settings)
    with tempfile.TemporaryDirectory(prefix="upshift-regret-") as folder:
        config = TINY if options.quick else SHAPES["llama-27m-gqa"]
        outcome = run_case(case, write_config(config, Path(folder) / "model"), options)
    print(f"regret {percent(outcome['regret'])}, goal at most {percent(GOAL)}", json.dumps(outcome), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
