"""Chooses which plans to try, learns from each trial, and keeps the fastest that computes the same loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from upshift.errors import JobFailed
from upshift.planning.calibration import Calibration, Sample, remember, sample_of
from upshift.planning.cost.basis import Number
from upshift.planning.cost.time import tokens_per_step
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.rank import COST_KEY, Candidate, cost_plan
from upshift.planning.trial import TrialResult, loosened
from upshift.planning.workload import Workload
from upshift.record import Numbers, Record, Spread
from upshift.units import format_bytes, gib

LOSS_TOLERANCE = 0.005  # relative; of the untrained model's loss against the plain default's, on the same tokens
# How much two plans that differ in a field may differ in speed: a correction learned on one is trusted less on the other.
FIELD_WEIGHTS = {
    "precision": 4.0,
    "torch_compile": 3.0,
    "attention": 3.0,
    "num_processes": 3.0,
    "weight_offload": 3.0,
    "packing": 2.0,
    "activation_checkpointing": 1.0,
    "recompute_granularity": 1.0,
    "loss_chunk_tokens": 1.0,
    "optim": 1.0,
    "optimizer_in_backward": 1.0,
    "per_device_train_batch_size": 0.5,
    "host_memory": 0.5,
}
CLOSE = 0.93  # of the best speed; what one look on a shared machine cannot tell apart
MIN_STEADY_STEPS = 3  # of a run, for its time to be worth remembering
SECOND_LOOKS = 2  # the best few are measured again at the end, in turn: one sample on a busy machine proves little


@dataclass
class Tried:
    candidate: Candidate
    results: list[TrialResult] = field(default_factory=list)
    wrong_loss: bool = False

    @property
    def ok(self) -> bool:
        return any(result.failure is None for result in self.results) and not self.wrong_loss

    @property
    def best(self) -> TrialResult:
        """The fastest look: what slowed another one was not the plan."""
        good = [result for result in self.results if result.tokens_per_second]
        return max(good, key=lambda result: result.tokens_per_second or 0.0) if good else self.results[-1]

    @property
    def failure(self) -> str | None:
        return "its loss differs from the plain default's" if self.wrong_loss else self.best.failure

    def holds_more_than(self, limit_bytes: float | None) -> bool:
        return limit_bytes is not None and (self.best.resident_bytes or 0) > limit_bytes

    def whole_run_speed(self, workload: Workload) -> float:
        """Tokens per second with one-time costs spread over the run."""
        best = self.best
        if not self.ok or best.step_seconds is None or not best.tokens_per_second:
            return 0.0
        spread = (best.one_time_seconds or 0.0) / workload.total_steps
        return best.tokens_per_second * best.step_seconds.p50 / (best.step_seconds.p50 + spread)

    def numbers(self) -> Numbers:
        best = self.best
        return Numbers(
            peak_gib=gib(best.peak_bytes) if best.peak_bytes else None,
            resident_gib=gib(best.resident_bytes) if best.resident_bytes else None,
            step_ms=_in_ms(best.step_seconds),
            tokens_per_second=best.tokens_per_second,
            loss=best.check_loss,
            one_time_seconds=best.one_time_seconds,
        )


def _in_ms(seconds: Spread | None) -> Spread | None:
    if seconds is None:
        return None
    return seconds.changed(p20=1000 * seconds.p20, p50=1000 * seconds.p50, p80=1000 * seconds.p80)


@dataclass
class Proof:
    default: Tried
    tried: list[Tried]
    chosen: Tried


def prove(
    candidates: list[Candidate],
    default: Candidate,
    *,
    workload: Workload,
    run: Callable[[Plan, float], TrialResult],
    budget_seconds: float,
    on_trial: Callable[[Tried], None] = lambda tried: None,
    limit_bytes: float | None = None,
    obeys: Callable[[Plan], bool] = lambda plan: True,
) -> Proof:
    """Try the plain default, then what looks best after each correction, until the budget is spent.

    ``run(plan, limit_seconds)`` measures one plan. ``limit_bytes``: what the chosen one may hold, where that is less than is
    free. ``obeys``: whether a plan has what the user fixed, which the plain default need not. Raises JobFailed when none runs.
    """
    deadline = time.monotonic() + budget_seconds
    tried: list[Tried] = []

    def look(candidate: Candidate) -> None:
        known = next((t for t in tried if _key(t.candidate.plan) == _key(candidate.plan)), None)
        entry = known or Tried(candidate)
        entry.results.append(run(candidate.plan, max(deadline - time.monotonic(), 0.25 * budget_seconds)))
        if known is None:
            tried.append(entry)
        entry.wrong_loss = _differs(entry, tried[0])
        on_trial(entry)

    look(default)
    while candidates:
        expected = 0.5 * tried[0].best.wall_seconds if len(tried) == 1 else tried[-1].best.wall_seconds
        reserve = min(expected, 0.2 * budget_seconds) if len(tried) > 2 else 0.0
        left = deadline - time.monotonic() - reserve
        asked = [entry for entry in tried if obeys(entry.candidate.plan)]
        if not asked:
            left = math.inf  # one that may be chosen is tried, however late it is
        elif all(entry.holds_more_than(limit_bytes) for entry in asked):
            left += budget_seconds
        best_left = _next(candidates, tried, seconds=left, limit_bytes=limit_bytes) if left > 0.5 * expected else None
        if best_left is None:
            break
        look(best_left)
    for entry in _rivals(tried, workload):
        if deadline - time.monotonic() > 0.5 * entry.best.wall_seconds:
            look(entry.candidate)
    asked = [entry for entry in tried if obeys(entry.candidate.plan)]
    working = [entry for entry in asked if entry.ok and not entry.holds_more_than(limit_bytes)]
    if not working:
        raise _failed((asked or tried)[0], tried[0], limit_bytes)
    return Proof(default=tried[0], tried=tried, chosen=max(working, key=lambda t: t.whole_run_speed(workload)))


def _failed(first: Tried, default: Tried, limit_bytes: float | None) -> JobFailed:
    reason = first.failure or f"it held more than the {format_bytes(limit_bytes or 0.0)} that are allowed"
    which = "the plain default" if first is default else first.candidate.plan.label()
    return JobFailed(f"no plan ran; {which} failed: {reason}")


def _rivals(tried: list[Tried], workload: Workload) -> list[Tried]:
    """The best few, where they are too close to tell apart by one look each."""
    ordered = sorted((entry for entry in tried if entry.ok), key=lambda entry: -entry.whole_run_speed(workload))
    best = ordered[0].whole_run_speed(workload) if ordered else 0.0
    close = [entry for entry in ordered if entry.whole_run_speed(workload) > CLOSE * best]
    return close[:SECOND_LOOKS] if len(close) > 1 else []


def _differs(entry: Tried, default: Tried) -> bool:
    ours, theirs = entry.best.check_loss, default.best.check_loss
    tolerance = loosened(LOSS_TOLERANCE, default.best.check_labels)
    return ours is not None and theirs is not None and abs(ours - theirs) > tolerance * abs(theirs)


def _next(
    candidates: list[Candidate], tried: list[Tried], *, seconds: float, limit_bytes: float | None = None
) -> Candidate | None:
    """The untried plan with the best corrected speed, of those that compile in time and whose corrected memory is within the
    limit; where none is, and none tried was, the leanest. Like a failed trial is failed."""
    seen = {_key(entry.candidate.plan) for entry in tried}
    left = [one for one in candidates if _key(one.plan) not in seen and one.time.one_time <= seconds]
    if limit_bytes is not None:
        held = {id(one): one.resident * held_correction(one, tried) for one in left}
        within = [one for one in left if held[id(one)] <= limit_bytes]
        if left and not within and all(entry.holds_more_than(limit_bytes) for entry in tried):
            within = [min(left, key=lambda one: held[id(one)])]
        left = within
    best, best_speed = None, 0.0
    for candidate in left:
        speed = candidate.tokens_per_second * correction(candidate, tried)
        if speed > best_speed:
            best, best_speed = candidate, speed
    return best


def correction(candidate: Candidate, tried: list[Tried]) -> float:
    """Measured over predicted speed of the plans tried so far."""
    speeds = ((entry, entry.best.tokens_per_second if entry.ok else None) for entry in tried)
    return _of_the_nearest(candidate, [(entry, (speed or 0.0) / entry.candidate.tokens_per_second) for entry, speed in speeds])


def held_correction(candidate: Candidate, tried: list[Tried]) -> float:
    """Measured over predicted memory of the plans tried so far."""
    held = ((entry, entry.best.resident_bytes) for entry in tried)
    return _of_the_nearest(candidate, [(entry, measured / entry.candidate.resident) for entry, measured in held if measured])


def _of_the_nearest(candidate: Candidate, ratios: list[tuple[Tried, float]]) -> float:
    """Their mean, the nearest plans counting most (COSTS.md D8: residual correction)."""
    total = weight_sum = 0.0
    for entry, ratio in ratios:
        distance = sum(
            weight
            for name, weight in FIELD_WEIGHTS.items()
            if getattr(entry.candidate.plan, name) != getattr(candidate.plan, name)
        )
        weight = 1.0 / (0.25 + distance) ** 2
        total += weight * ratio
        weight_sum += weight
    return total / weight_sum if weight_sum else 1.0


def _key(plan: Plan) -> tuple[object, ...]:
    return tuple(getattr(plan, name) for name in COST_KEY)


def after_trial(entry: Tried, planning: Planning) -> Candidate:
    """The candidate with the trial's numbers in place of the predicted ones; one-time costs are apart from its speed."""
    sample, best = _trial_sample(entry, planning), entry.best
    if sample is None or best.tokens_per_second is None:
        return entry.candidate
    found = Calibration((sample,)).of(_by_formula(entry.candidate.plan, planning), planning.workload)
    time = replace(found.time, one_time=best.one_time_seconds or 0.0)
    return replace(found, time=time, tokens_per_second=best.tokens_per_second)


def remember_trials(tried: list[Tried], planning: Planning) -> None:
    """For the predictions of later plans on this machine."""
    samples = [_trial_sample(entry, planning) for entry in tried if entry.ok]
    remember(sample for sample in samples if sample is not None)


def _trial_sample(entry: Tried, planning: Planning) -> Sample | None:
    """A trial runs one global batch, which may be larger or smaller than the average and short of the largest: its speed
    holds for all, its memory is compared at its own shape."""
    plan, best = entry.candidate.plan, entry.best
    if best.step_seconds is None or not best.tokens_per_second:
        return None
    whole, small = (_by_formula(plan, planning, shape) for shape in (None, best.largest_micro_batch))
    step = tokens_per_step(planning.profile, planning.workload) / best.tokens_per_second
    return sample_of(plan, planning.workload, "trial", {
        "step": (whole.time.total, step), "allocated": (small.memory.peak, best.peak_bytes),
        "held": (small.resident, best.resident_bytes),
    })  # fmt: skip


def remember_run(record: Record, planning: Planning) -> None:
    """Likewise, of a run. With sequences of many lengths nobody knows whether the largest micro-batch came
    by: then only its time is kept."""
    plan, measured, workload = Plan.model_validate(record.plan), record.measured, planning.workload
    steady = measured.step_ms.num_samples if measured and measured.step_ms else 0
    if measured is None or not measured.tokens_per_second or steady < MIN_STEADY_STEPS:
        return
    formula = _by_formula(plan, planning)
    step = tokens_per_step(planning.profile, workload) / measured.tokens_per_second
    numbers: dict[Number, tuple[float, float | None]] = {"step": (formula.time.total, step)}
    if workload.lengths is None or (plan.packing and not plan.flattens):
        numbers["allocated"] = (gib(formula.memory.peak), measured.peak_gib)
        numbers["held"] = (gib(formula.resident), measured.resident_gib)
    remember([sample_of(plan, workload, "run", numbers)])


def _by_formula(plan: Plan, planning: Planning, shape: tuple[int, int] | None = None) -> Candidate:
    found = cost_plan(plan, host=planning.host, profile=planning.profile, workload=planning.workload, shape=shape)
    assert isinstance(found, Candidate), "it was costed before"
    return found
