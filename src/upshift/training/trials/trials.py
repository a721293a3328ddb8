"""Try plans for real before a run, each in a process of its own, on the run's own data, and remember the results.

Find out which of the ranked plans a model can run. Its modules are checked, without weights, before a trial or a run
starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from upshift.errors import RequestError
from upshift.models.adapter import complete_model
from upshift.models.build import build_model, choose_class
from upshift.models.source import ModelSource
from upshift.planning.analysis.what_if import value_of
from upshift.planning.plan import ALONE, Plan
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate, Rejected
from upshift.planning.search.space import parse_fixed
from upshift.planning.trials.runner import TrialRequest, TrialResult, trial_server
from upshift.planning.trials.select import Proof, Tried, prove, remember_trials
from upshift.planning.trials.store import recall_proof, store_proof
from upshift.training.distributed.parallelize import Rehearsals, why_cannot_run

START_LIMIT_SECONDS = 30.0  # a trial that began in time may take this much longer, so that a first compilation can end
TIMED_SECONDS = 3.0  # of one trial, beyond its warm-up


def try_plans(
    planning: Planning,
    path: Path,
    request: TrialRequest,
    *,
    seconds: float,
    trying: Callable[[Plan], None] = lambda plan: None,
    tried: Callable[[Tried], None] = lambda tried: None,
    limit_bytes: float | None = None,
    fixed: tuple[str, ...] = (),
) -> Proof:
    """Return the proof with the fastest of the plans tried within ``seconds``. Raise JobFailed when none runs.

    ``path`` is the file that keeps the proof. ``request`` is a trial of the plain default; the others differ in their plan.
    ``limit_bytes`` is the memory that the chosen plan may hold. ``fixed`` has the fields of the plan, with values, that the
    user set.
    """
    chosen = parse_fixed(fixed, planning.host, planning.profile, planning.workload)

    def obeys(plan: Plan) -> bool:
        return all(value_of(plan, name) == value for name, value in chosen.items())

    timed = min(TIMED_SECONDS, seconds / 10)
    with trial_server() as server:

        def run(plan: Plan, limit_seconds: float) -> TrialResult:
            trying(plan)
            checked = Plan.model_validate(plan.model_dump())
            return server.run(request.changed(plan=checked, seconds=timed, limit_seconds=limit_seconds + START_LIMIT_SECONDS))

        start = time.monotonic()
        proof = prove(
            planning.ranking.candidates, planning.default, workload=planning.workload, run=run, budget_seconds=seconds,
            on_trial=tried, limit_bytes=limit_bytes, obeys=obeys,
        )  # fmt: skip
    if time.monotonic() - start <= 2 * seconds + START_LIMIT_SECONDS:  # else something kept the machine busy
        store_proof(path, proof)
        remember_trials(proof.tried, planning)
    return proof


def recall_earlier_proof(planning: Planning, path: Path, *, tried: Callable[[Tried], None] = lambda tried: None) -> Proof | None:
    """Return the proof of earlier trials of the same job, or None. Report each of its trials to ``tried`` again."""
    known = recall_proof(path, planning)
    for entry in known.tried if known is not None else ():
        tried(entry)
    return known


def reject_unrunnable_plans(planning: Planning, source: ModelSource) -> Planning:
    """Return the planning with the plans that cannot run among the rejected.

    Raise RequestError if no plan can run, with the reason of the best.
    """
    ranking = planning.ranking
    if all(candidate.plan.layout == ALONE for candidate in ranking.candidates):
        return planning
    config = source.hf_config
    with torch.device("meta"):
        empty = build_model(config, choose_class(config, source.reference)[0], dtype=torch.float32)
        model = complete_model(empty, source)
    rehearsals = Rehearsals(source)
    return reject_plans(planning, lambda plan: why_cannot_run(plan, model) or rehearsals.why_not(plan))


def reject_plans(planning: Planning, reason_not: Callable[[Plan], str | None]) -> Planning:
    """Return the planning as ``runnable`` does, by ``reason_not``, which returns why a plan cannot run, or None."""
    ranking = planning.ranking
    reasons: dict[tuple[object, ...], str | None] = {}

    def reason(plan: Plan) -> str | None:
        key = (plan.num_processes, plan.layout, plan.torch_compile, plan.attention, plan.optim, plan.optimizer_in_backward)
        if key not in reasons:
            reasons[key] = reason_not(plan)
        return reasons[key]

    kept: list[Candidate] = []
    rejected: list[Rejected] = []
    for candidate in ranking.candidates:
        problem = reason(candidate.plan)
        if problem is None:
            kept.append(candidate)
        else:
            rejected.append(Rejected(candidate.plan, problem))
    if not kept:
        raise RequestError(f"no plan for {planning.host.name} can run: {rejected[0].reason}")
    return replace(planning, ranking=replace(ranking, candidates=kept, rejected=[*rejected, *ranking.rejected]))
