"""Try plans before a run, each in a separate process on the run's own data, and remember the results.

Before that, reject the plans that the model cannot run. The model's modules show this without weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from upshift.errors import RequestError
from upshift.models.source import ModelSource
from upshift.models.tracing.segments import Tracer
from upshift.planning.analysis.what_if import value_of
from upshift.planning.plan import ALONE, Plan
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate, Rejected
from upshift.planning.search.space import parse_fixed
from upshift.planning.trials.runner import TrialRequest, TrialResult, trial_server
from upshift.planning.trials.select import Proof, Tried, prove, remember_trials
from upshift.planning.trials.store import read_proof, store_proof
from upshift.training.distributed.parallelize import Rehearsals, why_cannot_run
from upshift.training.prepare import weight_dtype

START_LIMIT_SECONDS = 30.0  # a trial that began in time may take this much longer, for its first compilation
TIMED_SECONDS = 3.0  # of one trial, after its warm-up


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

    Args:
        planning: the ranked plans.
        path: the file that keeps the proof.
        request: a trial of the plain default. Other trials differ in their plan.
        seconds: the time for all trials.
        trying: is called with each plan before its trial.
        tried: is called with the result of each trial.
        limit_bytes: the memory that the chosen plan may hold.
        fixed: the fields of the plan that the user set, as ``name=value``.
    """
    fixed_fields = parse_fixed(fixed, planning.host, planning.profile, planning.workload)

    def has_fixed_fields(plan: Plan) -> bool:
        return all(value_of(plan, name) == value for name, value in fixed_fields.items())

    timed_seconds = min(TIMED_SECONDS, seconds / 10)
    with trial_server() as server:

        def run(plan: Plan, limit_seconds: float) -> TrialResult:
            trying(plan)
            trial = request.changed(
                plan=Plan.model_validate(plan.model_dump()),
                seconds=timed_seconds,
                limit_seconds=limit_seconds + START_LIMIT_SECONDS,
            )
            return server.run(trial)

        start = time.monotonic()
        proof = prove(
            planning.ranking.candidates,
            planning.default,
            workload=planning.workload,
            run=run,
            budget_seconds=seconds,
            on_trial=tried,
            limit_bytes=limit_bytes,
            obeys=has_fixed_fields,
        )
    if time.monotonic() - start <= 2 * seconds + START_LIMIT_SECONDS:  # else other programs kept the machine busy
        store_proof(path, proof)
        remember_trials(proof.tried, planning)
    return proof


def recall_earlier_proof(planning: Planning, path: Path, *, tried: Callable[[Tried], None] = lambda tried: None) -> Proof | None:
    """Return the proof of earlier trials of the same job, or None. Call ``tried`` with each of its trials again."""
    proof = read_proof(path, planning)
    if proof is not None:
        for trial in proof.tried:
            tried(trial)
    return proof


def reject_unrunnable_plans(planning: Planning, source: ModelSource) -> Planning:
    """Return the planning, with the plans that the model cannot run among the rejected ones.

    Raise RequestError if no plan can run, with the reason of the best one.
    """
    ranking = planning.ranking
    if all(candidate.plan.layout == ALONE for candidate in ranking.candidates):
        return planning
    tracer = Tracer(source)
    rehearsals = Rehearsals(source)

    def why_not(plan: Plan) -> str | None:
        return why_cannot_run(plan, tracer.whole_model(weight_dtype(source, plan))) or rehearsals.why_not(plan)

    return reject_plans(planning, why_not)


def reject_plans(planning: Planning, why_not: Callable[[Plan], str | None], *, by_recomputation: bool = False) -> Planning:
    """Return the planning, with the plans that cannot run among the rejected ones.

    ``why_not`` returns why a plan cannot run, or None if it can. It is called once for plans that differ only in fields which
    change no code; ``by_recomputation`` says that activation checkpointing matters to it. Raise RequestError if no plan can run.
    """
    ranking = planning.ranking
    reasons: dict[tuple[object, ...], str | None] = {}

    def cached_reason(plan: Plan) -> str | None:
        key: tuple[object, ...]
        precision = plan.precision if plan.precision in ("bf16-weights", "fp16") else ""  # of dtypes, or of a loss scaler
        key = (
            plan.num_processes,
            plan.layout,
            plan.torch_compile,
            plan.attention,
            plan.optim,
            plan.optimizer_in_backward,
            plan.optim_offload,
            precision,
        )
        if by_recomputation:
            key = (*key, plan.activation_checkpointing, plan.recompute_granularity)
        if key not in reasons:
            reasons[key] = why_not(plan)
        return reasons[key]

    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    for candidate in ranking.candidates:
        reason = cached_reason(candidate.plan)
        if reason is None:
            candidates.append(candidate)
        else:
            rejected.append(Rejected(candidate.plan, reason))
    if not candidates:
        raise RequestError(f"no plan for {planning.host.name} can run: {rejected[0].reason}")
    return replace(planning, ranking=replace(ranking, candidates=candidates, rejected=[*rejected, *ranking.rejected]))
