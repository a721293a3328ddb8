"""Write a plan with its prediction, model, host and versions to a lock file. Later, check what has changed since.

The file is a document of ``upshift plan --json`` with only the best plan, and an additional field ``lock``. So everything that
reads a plan from such a document can read a lock file.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from pydantic import Field

from upshift.atomic_file import write_whole
from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile, Variant
from upshift.models.source import ModelSource
from upshift.planning.cost.memory import PHASES
from upshift.planning.cost.segments import plan_trace
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate, Rejected, cost_plan, limit_of
from upshift.planning.search.variants import variants_for
from upshift.planning.workload import Workload
from upshift.record import Numbers
from upshift.units import GIB, format_bytes
from upshift.value import Value
from upshift.versions import installed_version

MOVED_SHARE = 0.01  # of peak or step time: a smaller change does not count as moved
MIN_SHOWN_SHARE = 0.002  # of the peak or the step: a part or a term that changed by less is left out


class LockedPlan(Value):
    plan: Plan
    predicted: Numbers


class Lock(Value):
    """Everything that the prediction followed from."""

    versions: dict[str, str]
    architecture: str
    model: str = Field(description="hash of the config")
    host: Host
    host_fingerprint: str
    described: bool = Field(description="whether the host was described, not detected")
    workload: Workload
    fixed: tuple[str, ...] = Field(description="field=value, as --set")
    terms_ms: dict[str, float] = Field(description="of the predicted step")
    segments: dict[str, str] = Field(description="digest of each part of the trace that the plan follows")


class LockFile(Value):
    plans: tuple[LockedPlan]
    lock: Lock


class Change(Value):
    """A number when the lock was written, and now. None: it did not exist then, or does not exist now."""

    name: str
    before: float | None
    now: float | None

    @property
    def share(self) -> float:
        """Return the relative change."""
        return (self.now or 0.0) / self.before - 1 if self.before else 0.0


class Check(Value):
    """The predicted cost of a plan now, compared with its lock."""

    moved: bool
    peak_gib: Change
    step_ms: Change
    parts_gib: tuple[Change, ...] = Field(description="parts of memory that moved, each at its highest")
    terms_ms: tuple[Change, ...] = Field(description="terms of the step that moved")
    segments: tuple[str, ...] = Field(description="parts of the trace that are not what they were")
    versions: dict[str, tuple[str | None, str | None]] = Field(description="of those that changed: then, now")
    problem: str | None = Field(None, description="why the plan cannot run any more")


def lock_plan(planning: Planning, source: ModelSource, *, fixed: tuple[str, ...], described: bool) -> LockFile:
    """Return the lock of the best plan, predicted by formula alone.

    So a check compares versions of libraries, and ignores what ran on this machine in the meantime.
    """
    plan = planning.best
    best = cost_plan(plan, host=planning.host, profile=planning.profile, workload=planning.workload)
    assert isinstance(best, Candidate), "it was costed before"
    lock = Lock(
        versions=_versions(planning.profile),
        architecture=planning.profile.architecture,
        model=source.model_hash,
        host=planning.host,
        host_fingerprint=planning.host.fingerprint,
        described=described,
        workload=planning.workload,
        fixed=fixed,
        terms_ms=_terms_ms(best),
        segments=_digests(planning.profile, best.plan, planning.workload),
    )
    return LockFile(plans=(LockedPlan(plan=best.plan, predicted=planning.numbers(best)),), lock=lock)


def write_lock(path: Path, locked: LockFile) -> None:
    """Write the lock file. Raises RequestError where the path cannot be written."""
    try:
        write_whole(path, locked.to_json(indent=1) + "\n")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; give --lock a file in a folder that exists") from None


def read_lock(path: Path) -> LockFile:
    """Read a lock file. Raises RequestError for a file without a lock."""
    advice = f"write one with  upshift plan MODEL ... --lock {path.name}"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; {advice}") from None
    try:
        return LockFile.from_json(text, origin=str(path))
    except RequestError as problem:
        raise RequestError(f"{problem}; {advice}") from None


def check_identity(locked: LockFile, source: ModelSource, host: Host | None) -> None:
    """Raise RequestError for another model, or for another host than the lock's. ``host``: None: the host is not compared."""
    lock = locked.lock
    if source.model_hash != lock.model:
        name = next(iter(source.config.get("architectures") or ()), source.config.get("model_type"))
        raise RequestError(
            f"the plan is locked for {lock.architecture} (config {lock.model}), and {source.reference} is {name} "
            f"(config {source.model_hash}); check it with its own model, or lock a new plan"
        )
    if host is not None and host.fingerprint != lock.host_fingerprint:
        advice = f"--on {lock.host.name}" if lock.described else "that machine"
        raise RequestError(
            f"the plan is locked for {lock.host.name} ({lock.host_fingerprint}), and this is {host.name} ({host.fingerprint}); "
            f"check it with {advice}, or lock a new plan"
        )


def check_lock(locked: LockFile, profile: ModelProfile) -> Check:
    """Return what has changed since the lock was written.

    ``profile``: traced with today's libraries (``variants_for`` what the lock says). The host's rates are the lock's own, so
    that only software moves the numbers.
    """
    entry = locked.plans[0]
    lock = locked.lock
    candidate = cost_plan(entry.plan, host=lock.host, profile=profile, workload=lock.workload)
    versions_now = _versions(profile)
    versions = {}
    for name in dict.fromkeys((*lock.versions, *versions_now)):
        locked_version = lock.versions.get(name)
        version_now = versions_now.get(name)
        if locked_version != version_now:
            versions[name] = (locked_version, version_now)
    peak = entry.predicted.peak_gib
    step = entry.predicted.step_ms.p50 if entry.predicted.step_ms else None
    if isinstance(candidate, Rejected):
        return Check(
            moved=True,
            peak_gib=Change(name="peak", before=peak, now=None),
            step_ms=Change(name="step", before=step, now=None),
            parts_gib=(),
            terms_ms=(),
            segments=(),
            versions=versions,
            problem=candidate.reason,
        )
    changes = (
        Change(name="peak", before=peak, now=candidate.memory.peak / GIB),
        Change(name="step", before=step, now=1000 * candidate.time.total),
    )
    digests = _digests(profile, entry.plan, lock.workload)
    names = dict.fromkeys((*lock.segments, *digests))
    problem = _no_longer_fits(candidate, lock, entry.predicted.resident_gib)
    return Check(
        moved=problem is not None or any(abs(change.share) > MOVED_SHARE for change in changes),
        peak_gib=changes[0],
        step_ms=changes[1],
        parts_gib=_moved_numbers(
            _parts_gib(_step_phases(entry.predicted.memory)), _parts_gib(_memory_gib(candidate)), total=peak
        ),
        terms_ms=_moved_numbers(lock.terms_ms, _terms_ms(candidate), total=step),
        segments=tuple(name for name in names if lock.segments.get(name) != digests.get(name)),
        versions=versions,
        problem=problem,
    )


def needed_variants(locked: LockFile) -> tuple[Variant, ...]:
    """Return the variants of the lock's own planning, whose profile is in the cache as long as the libraries are the same."""
    lock = locked.lock
    plan = locked.plans[0].plan
    selective = plan.recompute_granularity == "selective" and plan.activation_checkpointing > 0
    return variants_for(lock.host, lock.workload, lock.fixed, selective=selective)


def _no_longer_fits(candidate: Candidate, lock: Lock, before_gib: float | None) -> str | None:
    """Return why the plan does not fit any more, or None.

    ``before_gib``: the predicted held memory when the plan was locked. It may have been above the limit by formula, because runs
    had shown that the plan fits.
    """
    limit = limit_of(candidate, lock.host, lock.workload)
    if limit is None or candidate.resident <= limit or (before_gib is not None and before_gib > limit / GIB):
        return None
    return f"it no longer fits: needs {format_bytes(candidate.resident)} of {format_bytes(limit)}"


def _versions(profile: ModelProfile) -> dict[str, str]:
    upshift_version = installed_version("upshift") or "unknown"  # upshift runs from its source and was never installed
    return {"upshift": upshift_version, "python": platform.python_version(), **profile.versions}


def _terms_ms(candidate: Candidate) -> dict[str, float]:
    return {name: 1000 * seconds for name, seconds in candidate.time.terms.items()}


def _step_phases(phases: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: parts for name, parts in phases.items() if name in PHASES}


def _memory_gib(candidate: Candidate) -> dict[str, dict[str, float]]:
    return {name: {part: size / GIB for part, size in peak.parts.items()} for name, peak in candidate.memory.phases.items()}


def _parts_gib(phases: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the maximum of each part over the phases."""
    names = dict.fromkeys(part for phase_parts in phases.values() for part in phase_parts)
    return {name: max(phase_parts.get(name, 0.0) for phase_parts in phases.values()) for name in names}


def _moved_numbers(old_numbers: dict[str, float], new_numbers: dict[str, float], *, total: float | None) -> tuple[Change, ...]:
    """Return the numbers that moved, the largest change first. ``total``: the total of which a change must be a large share."""
    names = dict.fromkeys((*old_numbers, *new_numbers))
    changes = [Change(name=name, before=old_numbers.get(name), now=new_numbers.get(name)) for name in names]
    difference_by_name = {change.name: abs((change.now or 0.0) - (change.before or 0.0)) for change in changes}
    large_changes = [change for change in changes if difference_by_name[change.name] > MIN_SHOWN_SHARE * (total or 0.0)]
    return tuple(sorted(large_changes, key=lambda change: -difference_by_name[change.name]))


def _digests(profile: ModelProfile, plan: Plan, workload: Workload) -> dict[str, str]:
    """Return digests of the parameters and of each segment that the plan runs, by the name of its position in the model."""
    digests = {"parameters": _digest(profile.parameters)}
    trace = plan_trace(profile, plan, workload)
    if trace is None:
        return digests
    recomputes = plan.activation_checkpointing > 0
    granularity = plan.recompute_granularity
    gaps = trace.gaps_recomputed.get(granularity, trace.gaps) if recomputes else trace.gaps
    digests["before the layers"] = _digest(gaps[0])
    for stack, traced, gap in zip(profile.stacks, trace.stacks, gaps[1:], strict=True):
        for number, layer in enumerate(traced.plain):
            digests[f"{stack.path} layer {stack.traced_layers[number]}"] = _digest(layer)
        for number, layer in enumerate(traced.recomputed.get(granularity, ()) if recomputes else ()):
            digests[f"{stack.path} layer {stack.traced_layers[number]}, recomputed"] = _digest(layer)
        digests[f"after {stack.path}"] = _digest(gap)
    if plan.loss_chunk_tokens and trace.chunked_gap is not None:
        digests["loss in chunks"] = _digest(trace.chunked_gap)
    return digests


def _digest(value: Value) -> str:
    return hashlib.sha256(value.to_json().encode()).hexdigest()[:16]
