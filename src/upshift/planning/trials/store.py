"""Store the results of trials, so that the same job on the same machine with the same libraries is not tried twice."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

from upshift.disk_full import write_cache_file
from upshift.errors import RequestError
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate, cost_plan
from upshift.planning.trials.runner import TrialResult
from upshift.planning.trials.select import Proof, Tried, fastest
from upshift.settings import read_settings
from upshift.value import Value

FORMAT = "7"
MIN_TRIALS = 3  # with fewer, other programs kept the machine busy, so the results are not worth storing


class StoredTrial(Value):
    plan: Plan
    results: tuple[TrialResult, ...]
    wrong_loss: bool
    is_eligible: bool


class StoredProof(Value):
    """The stored trials of a job. The plain default comes first."""

    tried: tuple[StoredTrial, ...]
    chosen: int | None  # None: the chosen plan was removed
    notes: tuple[str, ...] = ()


def proof_path(planning: Planning, *, fixed: tuple[str, ...], from_config: bool) -> Path:
    versions = [version(name) for name in ("torch", "transformers")]
    text = repr(
        (
            FORMAT,
            planning.host.fingerprint,
            planning.profile.key,
            planning.workload.to_json(),
            sorted(fixed),
            from_config,
            versions,
        )
    )
    return read_settings().cache_dir / "trials" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def store_proof(path: Path, proof: Proof) -> None:
    """Write the proof, unless too few plans were measured, or the chosen one only ran beside other programs.

    In these two cases later trials may give better results.
    """
    if len(proof.tried) < MIN_TRIALS or not proof.chosen.ok or proof.chosen.needs_another_trial:
        return
    tried = tuple(
        StoredTrial(
            plan=Plan.model_validate(entry.candidate.plan.model_dump()),
            results=tuple(entry.results),
            wrong_loss=entry.wrong_loss,
            is_eligible=entry.is_eligible,
        )
        for entry in proof.tried
    )
    _write(path, StoredProof(tried=tried, chosen=proof.tried.index(proof.chosen), notes=proof.notes))


def read_proof(path: Path, planning: Planning) -> Proof | None:
    """Return the stored proof; None where nothing is stored, or where the plan does not fit the memory that is free now.

    After the chosen plan was removed, the fastest of the others is chosen that the trials could have chosen and that fits now.
    """
    if not path.is_file():
        return None
    try:
        stored = StoredProof.from_file(path)
    except RequestError:
        path.unlink()  # another version wrote it, or it was cut short
        return None
    tried = []
    for entry in stored.tried:
        candidate = cost_plan(entry.plan, host=planning.host, profile=planning.profile, workload=planning.workload)
        if not isinstance(candidate, Candidate):
            return None
        tried.append(Tried(candidate, list(entry.results), entry.wrong_loss, entry.is_eligible))
    remaining = tried if stored.chosen is None else [tried[stored.chosen]]
    usable = [entry for entry in remaining if entry.ok and entry.is_eligible and _fits_now(entry, tried[0], planning)]
    return Proof(tried[0], tried, fastest(usable, planning.workload), stored.notes) if usable else None


def _fits_now(entry: Tried, default: Tried, planning: Planning) -> bool:
    """Return whether a plan is in the ranking. The plain default need not be: it ran in its trial."""
    return entry is default or any(ranked.plan == entry.candidate.plan for ranked in planning.ranking.candidates)


def remove_plan(path: Path, plan: Plan) -> None:
    """Remove a plan that ran out of memory in a real run, so that it is not chosen again.

    ``read_proof`` then chooses another of the tried plans, or new trials are run.
    """
    if not path.is_file():
        return
    try:
        stored = StoredProof.from_file(path)
    except RequestError:
        path.unlink()  # another version wrote it, or it was cut short
        return
    remaining = tuple(trial for trial in stored.tried if trial.plan.label() != plan.label())
    if len(remaining) < MIN_TRIALS or remaining[0] != stored.tried[0]:
        path.unlink()
        return
    _write(path, StoredProof(tried=remaining, chosen=None))


def _write(path: Path, proof: StoredProof) -> None:
    write_cache_file("the trials' results are", path, proof.to_json())
