"""Try plans for real before a run, each in a process of its own, on the run's own data, and remember the results."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from upshift.planning.counterfactual import value_of
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.proof_store import recall_proof, store_proof
from upshift.planning.prove import Proof, Tried, prove, remember_trials
from upshift.planning.space import parse_fixed
from upshift.planning.trial import TrialRequest, TrialResult, trial_server

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


def known_proof(planning: Planning, path: Path, *, tried: Callable[[Tried], None] = lambda tried: None) -> Proof | None:
    """Return the proof of earlier trials of the same job, or None. Report each of its trials to ``tried`` again."""
    known = recall_proof(path, planning)
    for entry in known.tried if known is not None else ():
        tried(entry)
    return known
