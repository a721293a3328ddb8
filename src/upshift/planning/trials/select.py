"""Choose which plans to try, correct predictions after each trial, and choose the fastest plan that computes the same loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from upshift.errors import JobFailed
from upshift.planning.cost.memory import scale_to_peak
from upshift.planning.cost.time import tokens_per_step
from upshift.planning.cost.uncertainty import AGAIN_INTERVALS, VARYING_HELD_INTERVAL, Number, formula_interval
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import COST_KEY, Candidate, cost_plan
from upshift.planning.trials.calibration import Calibration, Sample, append_samples, sample_of
from upshift.planning.trials.runner import TrialResult, loosen_tolerance
from upshift.planning.workload import Workload
from upshift.record import Basis, Numbers, Record, Spread
from upshift.units import format_bytes, gib

LOSS_TOLERANCE = 0.005  # relative, of the untrained model's loss and the plain default's on the same tokens
# How much two plans that differ in a field may differ in speed. The more, the less the correction of one counts for the other.
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
CLOSE_SPEED = 0.93  # of the best speed: one trial on a shared machine cannot tell such plans apart
WATCHED_STEP_SHARE = (
    0.85  # of the longest step's allocations at least: a run of many lengths watches the longest of its first steps
)
MIN_STEADY_STEPS = 3  # a run's time is remembered from this number of steady steps on
FIRST_SHARE = 0.5  # of the budget, for the trial of the plain default, and for that of the best predicted plan
LATER_SHARE = 0.25  # of the budget, for a later trial that began in time
BUSY_SHARE = 0.25  # of the budget, beyond it, for measuring again what was measured beside other programs
MAX_SHOWN_UNTRIED = 3  # the most untried plans that are listed
NUM_REMEASURED = 2  # the best plans are measured again at the end, because one sample on a busy machine proves little


@dataclass
class Tried:
    """A plan that was tried, with the results of its trials."""

    candidate: Candidate
    results: list[TrialResult] = field(default_factory=list)
    wrong_loss: bool = False
    is_eligible: bool = True  # it has the fields that the user fixed, and it held no more memory than allowed

    @property
    def ok(self) -> bool:
        return any(result.failure is None for result in self.results) and not self.wrong_loss

    @property
    def best(self) -> TrialResult:
        """Return the fastest trial, among those on a quiet machine if there are any.

        A slower trial of the same plan was slowed by something else.
        """
        measured = [result for result in self.results if result.tokens_per_second]
        return max(measured, key=_trust_key) if measured else self.results[-1]

    @property
    def failure(self) -> str | None:
        return "its loss differs from the plain default's" if self.wrong_loss else self.best.failure

    @property
    def needs_another_trial(self) -> bool:
        return self.ok and (self.best.busy or self.best.rough)

    def exceeds(self, limit_bytes: float | None) -> bool:
        return limit_bytes is not None and (self.best.resident_bytes or 0) > limit_bytes

    def whole_run_speed(self, workload: Workload) -> float:
        """Return the tokens per second with one-time costs spread over the run."""
        best = self.best
        if not self.ok or best.step_seconds is None or not best.tokens_per_second:
            return 0.0
        one_time_per_step = (best.one_time_seconds or 0.0) / workload.total_steps
        return best.tokens_per_second * best.step_seconds.p50 / (best.step_seconds.p50 + one_time_per_step)

    def numbers(self) -> Numbers:
        """Return the measured numbers."""
        best = self.best
        return Numbers(
            peak_gib=gib(best.peak_bytes) if best.peak_bytes else None,
            resident_gib=gib(best.resident_bytes) if best.resident_bytes else None,
            step_ms=_in_ms(best.step_seconds),
            tokens_per_second=best.tokens_per_second,
            loss=best.check_loss,
            one_time_seconds=best.one_time_seconds,
        )


def _trust_key(result: TrialResult) -> tuple[bool, bool, float]:
    return not result.rough, not result.busy, result.tokens_per_second or 0.0


def _in_ms(seconds: Spread | None) -> Spread | None:
    if seconds is None:
        return None
    return seconds.changed(p20=1000 * seconds.p20, p50=1000 * seconds.p50, p80=1000 * seconds.p80)


@dataclass
class Proof:
    """The plans that were tried and the one that was chosen."""

    default: Tried
    tried: list[Tried]
    chosen: Tried
    notes: tuple[str, ...] = ()  # which plans were not tried and why, and what runs: for the user, a line each


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
    clock: Callable[[], float] = time.monotonic,
) -> Proof:
    """Try the plain default, then the plan with the best corrected prediction, until the budget is spent.

    The default and the best predicted plan may take half of the budget each, so that both are tried even if one is slow. Raise
    JobFailed if no plan runs.

    Args:
        run: measures one plan: ``run(plan, limit_seconds)``.
        limit_bytes: the most that the chosen plan may hold, if it is less than the free memory.
        obeys: returns whether a plan has the fields that the user fixed. The plain default may not have them.
    """
    trials = _Trials(candidates, workload, run, budget_seconds, on_trial, limit_bytes, obeys, clock)
    trials.measure(default)
    while (best := trials.choose_next()) is not None:
        trials.measure(best)
    trials.measure_again()
    return trials.proof()


@dataclass
class _Trials:
    """Plans that are tried one after the other within a budget of seconds."""

    candidates: list[Candidate]
    workload: Workload
    run: Callable[[Plan, float], TrialResult]
    budget: float
    on_trial: Callable[[Tried], None]
    limit_bytes: float | None
    obeys: Callable[[Plan], bool]
    clock: Callable[[], float]
    tried: list[Tried] = field(default_factory=list)
    left: float = 0.0  # seconds that were left when the next plan was last chosen

    def __post_init__(self) -> None:
        self.deadline = self.clock() + self.budget

    @property
    def allowed(self) -> list[Tried]:
        """Return the tried plans that have the fields the user fixed."""
        return [entry for entry in self.tried if self.obeys(entry.candidate.plan)]

    def measure(self, candidate: Candidate) -> None:
        """Measure a plan, for the first time or again."""
        previous = next((entry for entry in self.tried if _key(entry.candidate.plan) == _key(candidate.plan)), None)
        entry = previous or Tried(candidate)
        if not self.tried:
            seconds = FIRST_SHARE * self.budget
        else:
            min_share = FIRST_SHARE if len(self.tried) == 1 else LATER_SHARE
            seconds = max(self.deadline - self.clock(), min_share * self.budget)
        entry.results.append(self.run(candidate.plan, seconds))
        if previous is None:
            self.tried.append(entry)
        entry.wrong_loss = _has_wrong_loss(entry, self.tried[0])
        entry.is_eligible = self.obeys(entry.candidate.plan) and not entry.exceeds(self.limit_bytes)
        self.on_trial(entry)

    def choose_next(self) -> Candidate | None:
        """Return the plan to try now; None where no time is left or no plan is worth a trial."""
        only_default = len(self.tried) == 1
        expected = 0.5 * self.tried[0].best.wall_seconds if only_default else self.tried[-1].best.wall_seconds
        reserve = min(expected, 0.2 * self.budget) if len(self.tried) > 2 else 0.0
        self.left = self.deadline - self.clock() - reserve
        if only_default:  # the best predicted is tried, however slow the plain default was
            self.left = max(self.left, FIRST_SHARE * self.budget)
            expected = 0.0
        if not self.allowed:
            self.left = math.inf  # at least one plan that may be chosen is tried, even after the deadline
        elif all(entry.exceeds(self.limit_bytes) for entry in self.allowed):
            self.left += self.budget
        if not self.candidates or self.left <= 0.5 * expected:
            return None
        return _choose_next(self.candidates, self.tried, seconds=self.left, limit_bytes=self.limit_bytes)

    def measure_again(self) -> None:
        """Measure again the best plans if one trial each cannot tell them apart, and plans measured on a busy machine."""
        while (doubtful := self._doubtful()) is not None:
            self.measure(doubtful.candidate)
        for entry in _close_plans(self.tried, self.workload):
            if self.deadline - self.clock() > 0.5 * entry.best.wall_seconds:
                self.measure(entry.candidate)

    def _doubtful(self) -> Tried | None:
        """Return a plan with a doubtful result among the chosen one, the plain default and the best ones, or None."""
        working = sorted((entry for entry in self.tried if entry.ok), key=self._speed, reverse=True)
        if not working:
            return None
        seconds_left = self.deadline - self.clock() + BUSY_SHARE * self.budget
        for entry in _unique_entries(fastest(working, self.workload), self.tried[0], *working[:NUM_REMEASURED]):
            if entry.needs_another_trial and len(entry.results) == 1 and seconds_left > entry.best.wall_seconds:
                return entry
        return None

    def proof(self) -> Proof:
        """Return the proof of the trials. Raises JobFailed where no plan ran."""
        working = [entry for entry in self.tried if entry.ok and entry.is_eligible]
        if working:
            chosen = fastest(working, self.workload)
        else:
            timed_out = [entry for entry in self.allowed if entry.best.timed_out and not entry.wrong_loss]
            if not timed_out:
                raise _job_failure((self.allowed or self.tried)[0], self.tried[0], self.limit_bytes)
            chosen = max(timed_out, key=lambda entry: entry.candidate.tokens_per_second)
        return Proof(self.tried[0], self.tried, chosen, tuple(self._notes(chosen)))

    def _speed(self, entry: Tried) -> float:
        return entry.whole_run_speed(self.workload)

    def _notes(self, chosen: Tried) -> list[str]:
        lines = [*self._untried(chosen), self._what_runs(chosen)]
        busy = [entry for entry in _unique_entries(self.tried[0], chosen) if entry.best.busy]
        if busy:
            share = max(entry.best.waited_share for entry in busy)
            lines.append(
                f"other programs computed during the trials, which waited for a core up to {share:.0%} of their time; the speeds "
                "are without that waiting, and a run beside those programs is slower"
            )
        return lines

    def _untried(self, chosen: Tried) -> list[str]:
        """Return a line for each of the best untried plans that may be faster than the chosen one."""
        tried_keys = {_key(entry.candidate.plan) for entry in self.tried}
        speed = self._speed(chosen)
        faster = []
        for candidate in self.candidates:
            rate = candidate.tokens_per_second * speed_correction(candidate, self.tried)
            if rate > speed and _key(candidate.plan) not in tried_keys:
                faster.append((rate, candidate))
        faster.sort(key=lambda pair: -pair[0])
        lines = [
            f"not tried: {candidate.plan.label()} ({rate:,.0f} tokens/s expected): {self._why_not(candidate)}"
            for rate, candidate in faster[:MAX_SHOWN_UNTRIED]
        ]
        if len(faster) > MAX_SHOWN_UNTRIED:
            lines.append(f"nor were {len(faster) - MAX_SHOWN_UNTRIED:,} more plans that may be faster than the chosen one")
        return lines

    def _why_not(self, candidate: Candidate) -> str:
        held = candidate.resident * memory_correction(candidate, self.tried)
        if self.limit_bytes is not None and held > self.limit_bytes:
            return f"it would hold some {format_bytes(held)}, and {format_bytes(self.limit_bytes)} are allowed"
        longest = max(self.tried, key=lambda entry: sum(result.wall_seconds for result in entry.results))
        seconds = sum(result.wall_seconds for result in longest.results)
        name = "the plain default" if longest is self.tried[0] else longest.candidate.plan.label()
        budget_text = f"all trials have {self.budget:.0f} s, and {name} took {seconds:.0f} s"
        if candidate.time.one_time > max(self.left, 0.0):
            return (
                f"it compiles for some {candidate.time.one_time:.0f} s, and {max(self.left, 0.0):.0f} s were left; {budget_text}"
            )
        return f"no time was left; {budget_text}; a larger --trial-seconds tries more"

    def _what_runs(self, chosen: Tried) -> str:
        default = self.tried[0]
        name = "the plain default" if chosen is default else chosen.candidate.plan.label()
        if not chosen.ok:
            return f"runs: {name}, the best by prediction: no trial ended within its time; a larger --trial-seconds measures it"
        working = sum(entry.ok for entry in self.tried)
        rough_text = ", by one micro-batch alone" if chosen.best.rough else ""
        if working == 1:
            return f"runs: {name}, the only one of {len(self.tried)} tried that was measured{rough_text}"
        return f"runs: {name}, the fastest of {working} that were measured{rough_text}"


def fastest(working: list[Tried], workload: Workload) -> Tried:
    """Return the fastest plan. Among those too close to tell apart, return one that was measured on a quiet machine."""
    best = max(working, key=lambda entry: entry.whole_run_speed(workload))
    close_speed = CLOSE_SPEED * best.whole_run_speed(workload)
    quiet = [entry for entry in working if not entry.needs_another_trial and entry.whole_run_speed(workload) > close_speed]
    return max(quiet, key=lambda entry: entry.whole_run_speed(workload)) if best.needs_another_trial and quiet else best


def _job_failure(entry: Tried, default: Tried, limit_bytes: float | None) -> JobFailed:
    reason = entry.failure or f"it held more than the {format_bytes(limit_bytes or 0.0)} that are allowed"
    name = "the plain default" if entry is default else entry.candidate.plan.label()
    return JobFailed(f"no plan ran; {name} failed: {reason}")


def _close_plans(tried: list[Tried], workload: Workload) -> list[Tried]:
    """Return the best plans if one trial each cannot tell them apart, else no plan."""
    ordered = sorted((entry for entry in tried if entry.ok), key=lambda entry: -entry.whole_run_speed(workload))
    best = ordered[0].whole_run_speed(workload) if ordered else 0.0
    close_entries = [entry for entry in ordered if entry.whole_run_speed(workload) > CLOSE_SPEED * best]
    return close_entries[:NUM_REMEASURED] if len(close_entries) > 1 else []


def _unique_entries(*entries: Tried) -> list[Tried]:
    return list({id(entry): entry for entry in entries}.values())


def _has_wrong_loss(entry: Tried, default: Tried) -> bool:
    """Return whether a plan computes another loss than the plain default. A loss that is NaN or infinite is always wrong."""
    loss = entry.best.check_loss
    default_loss = default.best.check_loss
    tolerance = loosen_tolerance(LOSS_TOLERANCE, default.best.check_labels)
    if loss is None or default_loss is None:
        return False
    return not abs(loss - default_loss) <= tolerance * abs(default_loss)  # also for NaN, which is neither above nor below


def _choose_next(
    candidates: list[Candidate], tried: list[Tried], *, seconds: float, limit_bytes: float | None = None
) -> Candidate | None:
    """Return the untried plan with the best corrected speed.

    It must compile in time, and its corrected memory must be within the limit. If no plan is within the limit and none of the
    tried ones was, return the plan that needs least memory. A plan that is like a failed one is expected to be slow.
    """
    tried_keys = {_key(entry.candidate.plan) for entry in tried}
    untried = [
        candidate for candidate in candidates if _key(candidate.plan) not in tried_keys and candidate.time.one_time <= seconds
    ]
    if limit_bytes is not None:

        def expected_bytes(candidate: Candidate) -> float:
            return candidate.resident * memory_correction(candidate, tried)

        within_limit = [candidate for candidate in untried if expected_bytes(candidate) <= limit_bytes]
        if untried and not within_limit and all(entry.exceeds(limit_bytes) for entry in tried):
            within_limit = [min(untried, key=expected_bytes)]
        untried = within_limit
    best = None
    best_speed = 0.0
    for candidate in untried:
        speed = candidate.tokens_per_second * speed_correction(candidate, tried)
        if speed > best_speed:
            best = candidate
            best_speed = speed
    return best


def speed_correction(candidate: Candidate, tried: list[Tried]) -> float:
    """Return measured over predicted speed, as the plans tried so far suggest it for the candidate.

    A failed trial counts as speed 0. A trial that reached its time limit before it had a speed is left out.
    """
    ratios = []
    for entry in tried:
        measured_speed = entry.best.tokens_per_second if entry.ok else None
        if measured_speed is not None or not entry.best.timed_out or entry.wrong_loss:
            ratios.append((entry, (measured_speed or 0.0) / entry.candidate.tokens_per_second))
    if not any(ratio for _, ratio in ratios):  # plans least like the failed ones come first
        return 1.0 / (1.0 + sum(1.0 / (0.25 + _distance(candidate, entry)) for entry, _ in ratios))
    return _weighted_mean(candidate, ratios)


def memory_correction(candidate: Candidate, tried: list[Tried]) -> float:
    """Return measured over predicted memory, as the plans tried so far suggest it for the candidate."""
    measured_bytes = ((entry, entry.best.resident_bytes) for entry in tried)
    return _weighted_mean(
        candidate, [(entry, measured / entry.candidate.resident) for entry, measured in measured_bytes if measured]
    )


def _weighted_mean(candidate: Candidate, ratios: list[tuple[Tried, float]]) -> float:
    """Return the mean of the ratios, in which plans like the candidate count most (COSTS.md D8: residual correction)."""
    weighted_sum = weight_sum = 0.0
    for entry, ratio in ratios:
        weight = 1.0 / (0.25 + _distance(candidate, entry)) ** 2
        weighted_sum += weight * ratio
        weight_sum += weight
    return weighted_sum / weight_sum if weight_sum else 1.0


def _distance(candidate: Candidate, entry: Tried) -> float:
    """Return a measure of how differently two plans may run, from the fields in which they differ."""
    plan = candidate.plan
    other_plan = entry.candidate.plan
    return sum(weight for name, weight in FIELD_WEIGHTS.items() if getattr(plan, name) != getattr(other_plan, name))


def _key(plan: Plan) -> tuple[object, ...]:
    return tuple(getattr(plan, name) for name in COST_KEY)


def after_trial(entry: Tried, planning: Planning) -> Candidate:
    """Return the candidate with the trial's numbers in place of the predicted ones. Its speed is without one-time costs.

    Its memory is that of the trial if the trial had the longest micro-batch of the run. If a later batch may have a longer one,
    the memory is the formula's for the longest possible one, corrected by the trial. Its interval then begins at what the trial
    needed.
    """
    sample = _trial_sample(entry, planning)
    best = entry.best
    if sample is None or best.tokens_per_second is None:
        return entry.candidate
    candidate = Calibration((sample,)).of(_formula_candidate(entry.candidate.plan, planning), planning.workload)
    time = replace(candidate.time, one_time=best.one_time_seconds or 0.0)
    candidate = replace(candidate, time=time, tokens_per_second=best.tokens_per_second)
    bases = dict(candidate.bases)
    if best.rough:  # one micro-batch tells little more of a step than the formula does
        bases["step"] = Basis(tier="measured", interval=formula_interval("step", candidate.plan), num_records=1)
    if best.largest_of_run:
        memory = scale_to_peak(candidate.memory, best.peak_bytes) if best.peak_bytes else candidate.memory
        if best.peak_bytes and planning.workload.lengths is not None:
            interval = (WATCHED_STEP_SHARE, AGAIN_INTERVALS["allocated"][1])
            bases["allocated"] = Basis(tier="measured", interval=interval, num_records=1)
        if best.resident_bytes and planning.workload.lengths is not None and candidate.plan.host_memory == "keep":
            bases["held"] = Basis(tier="measured", interval=VARYING_HELD_INTERVAL, num_records=1)
        return replace(candidate, memory=memory, resident=float(best.resident_bytes or candidate.resident), bases=bases)
    for name, measured, predicted in _memory_pairs(best, candidate):
        low, high = formula_interval(name, candidate.plan)
        bases[name] = Basis(tier="formula", interval=(min(low, measured / predicted), high), num_records=1)
    return replace(candidate, bases=bases)


def _memory_pairs(best: TrialResult, candidate: Candidate) -> list[tuple[Number, float, float]]:
    """Return (number, its measured value, its prediction for the largest micro-batch that the run may have)."""
    pairs: list[tuple[Number, int | None, float]] = [
        ("allocated", best.peak_bytes, candidate.memory.peak),
        ("held", best.resident_bytes, candidate.resident),
    ]
    return [(name, float(measured), predicted) for name, measured, predicted in pairs if measured]


def remember_trials(tried: list[Tried], planning: Planning) -> None:
    """Store the trials for the predictions of later plans on this machine.

    Speeds that were measured beside other programs are left out.
    """
    samples = []
    for entry in tried:
        sample = _trial_sample(entry, planning) if entry.ok else None
        if sample is not None and entry.needs_another_trial:
            sample = sample.changed(numbers={name: pair for name, pair in sample.numbers.items() if name != "step"})
        if sample is not None and sample.numbers:
            samples.append(sample)
    append_samples(samples)


def _trial_sample(entry: Tried, planning: Planning) -> Sample | None:
    """Return the sample of a trial, or None if it measured no speed.

    A trial runs one global batch, which need not be an average or the largest one. Its speed holds for all batches. Its memory is
    compared with the prediction for its own micro-batch.
    """
    plan = entry.candidate.plan
    best = entry.best
    if best.step_seconds is None or not best.tokens_per_second:
        return None
    predicted = _formula_candidate(plan, planning)
    predicted_memory = _formula_candidate(plan, planning, best.largest_micro_batch)
    step_seconds = tokens_per_step(planning.profile, planning.workload) / best.tokens_per_second
    return sample_of(
        plan,
        planning.workload,
        "trial",
        {
            "step": (predicted.time.total, step_seconds),
            "allocated": (predicted_memory.memory.peak, best.peak_bytes),
            "held": (predicted_memory.resident, best.resident_bytes),
        },
    )


def remember_run(record: Record, planning: Planning) -> None:
    """Store a run for the predictions of later plans on this machine.

    With sequences of many lengths it is unknown whether the largest micro-batch ran. Then only the time is stored.
    """
    plan = Plan.model_validate(record.plan)
    measured = record.measured
    workload = planning.workload
    num_steps = measured.step_ms.num_samples if measured and measured.step_ms else 0
    if measured is None or not measured.tokens_per_second or num_steps < MIN_STEADY_STEPS:
        return
    formula = _formula_candidate(plan, planning)
    step_seconds = tokens_per_step(planning.profile, workload) / measured.tokens_per_second
    step_seconds *= 1.0 - record.details.get("waited_share", 0.0)  # other programs used this time
    numbers: dict[Number, tuple[float, float | None]] = {"step": (formula.time.total, step_seconds)}
    if workload.lengths is None or (plan.packing and not plan.flattens):
        numbers["allocated"] = (gib(formula.memory.peak), measured.peak_gib)
        numbers["held"] = (gib(formula.resident), measured.resident_gib)
    append_samples([sample_of(plan, workload, "run", numbers)])


def _formula_candidate(plan: Plan, planning: Planning, shape: tuple[int, int] | None = None) -> Candidate:
    candidate = cost_plan(plan, host=planning.host, profile=planning.profile, workload=planning.workload, shape=shape)
    assert isinstance(candidate, Candidate), "it was costed before"
    return candidate
