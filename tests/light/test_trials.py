"""Which plans are tried in which time, what a run is told of those that were not, and what is done about a busy machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from made_up_plans import made_up_planning

from upshift.benchmarking.timing import BUSY_CORES, LoadMeter, Moment, ThreadClock, Timing, read_moment, timing_between
from upshift.errors import JobFailed
from upshift.planning.cost.memory import LASTING_PARTS
from upshift.planning.cost.uncertainty import AGAIN_INTERVALS, STEP_INTERVAL
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.trials.runner import TrialResult, unfinished_result
from upshift.planning.trials.select import FIRST_SHARE, Proof, Tried, after_trial, prove
from upshift.planning.trials.store import read_proof, remove_plan, store_proof
from upshift.record import Spread
from upshift.training import held_memory

BUDGET = 60.0


@cache
def planning() -> Planning:
    return made_up_planning(on="epyc-9654-768gb", global_batch=4)


@dataclass
class Machine:
    """Its clock moves by what trials take. ``takes``: seconds of a plan's trial. It ends a trial at its limit."""

    takes: Callable[[Plan], float] = lambda plan: 5.0
    result: Callable[[Plan, int], TrialResult] | None = None
    now: float = 100.0
    looks: list[tuple[Plan, float]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def run(self, plan: Plan, limit_seconds: float) -> TrialResult:
        before = sum(seen == plan for seen, _ in self.looks)
        self.looks.append((plan, limit_seconds))
        seconds = min(self.takes(plan), limit_seconds)
        self.now += seconds
        if self.takes(plan) > limit_seconds:
            return unfinished_result().changed(check_loss=2.0, wall_seconds=seconds)
        found = self.result(plan, before) if self.result else measured(predicted(plan))
        return found.changed(wall_seconds=seconds)


def predicted(plan: Plan) -> float:
    found = (one for one in (planning().default, *planning().ranking.candidates) if one.plan == plan)
    return next(found).tokens_per_second


def measured(speed: float, **more: Any) -> TrialResult:
    return TrialResult(tokens_per_second=speed, step_seconds=Spread.of([1.0]), check_loss=2.0, **more)


def proof(machine: Machine, **more: Any) -> Proof:
    plans = planning()
    return prove(
        plans.ranking.candidates, plans.default, workload=plans.workload, run=machine.run, budget_seconds=BUDGET,
        clock=machine.clock, **more,
    )  # fmt: skip


def is_default(plan: Plan) -> bool:
    return plan == planning().default.plan


def test_a_slow_plain_default_leaves_time_for_the_best_predicted() -> None:
    machine = Machine(takes=lambda plan: 500.0 if is_default(plan) else 20.0)
    found = proof(machine)
    assert machine.looks[0][1] == FIRST_SHARE * BUDGET
    assert machine.looks[1][0] == planning().ranking.candidates[0].plan
    assert found.chosen.candidate.plan == planning().ranking.candidates[0].plan
    assert found.default.failure is not None and "longer than the trial's limit" in found.default.failure


def test_a_slow_best_predicted_is_said_and_the_default_runs() -> None:
    machine = Machine(takes=lambda plan: 5.0 if is_default(plan) else 500.0)
    found = proof(machine)
    assert found.chosen is found.default
    late = planning().ranking.candidates[0].plan.label()
    assert "the plain default" in found.notes[-1] and "the only one of" in found.notes[-1]
    assert any(note.startswith("not tried: ") and "no time was left" in note and late in note for note in found.notes)


@pytest.mark.parametrize("default_seconds", [1.0, 29.0])
def test_what_was_not_tried_is_said_with_what_took_its_time(default_seconds: float) -> None:
    """One trial that takes the whole time, as the last one that began in time does."""
    machine = Machine(takes=lambda plan: default_seconds if is_default(plan) else 29.0)
    found = proof(machine)
    tried = {entry.candidate.plan.label() for entry in found.tried}
    lines = [note for note in found.notes if note.startswith("not tried: ")]
    assert all("tokens/s expected" in line and "all trials have 60 s, and" in line for line in lines)
    assert all(line.removeprefix("not tried: ").partition(" (")[0] not in tried for line in lines)
    assert found.notes[-1] == f"runs: {found.chosen.candidate.plan.label()}, the fastest of {len(found.tried)} that were measured"


def test_nothing_that_cannot_be_faster_is_named() -> None:
    """The chosen plan is so fast that no other is expected to reach it."""
    best = planning().ranking.candidates[0].plan
    machine = Machine(result=lambda plan, look: measured(predicted(plan) * (1.0 if plan != best else 1e6)))
    assert proof(machine).chosen.candidate.plan == best
    slow = Machine(takes=lambda plan: 20.0, result=lambda plan, look: measured(1e12 if is_default(plan) else 1.0))
    assert not [note for note in proof(slow).notes if note.startswith("not tried")]


def test_where_no_trial_ends_the_best_predicted_runs_and_is_said_to_be_unmeasured() -> None:
    found = proof(Machine(takes=lambda plan: 500.0))
    assert found.chosen.candidate.plan == planning().ranking.candidates[0].plan and not found.chosen.ok
    assert "no trial ended within its time" in found.notes[-1]
    assert after_trial(found.chosen, planning()).tokens_per_second == found.chosen.candidate.tokens_per_second


def test_a_default_that_runs_out_of_memory_does_not_end_the_trials() -> None:
    full = TrialResult(failure="out of memory", out_of_memory=True)
    found = proof(Machine(result=lambda plan, look: full if is_default(plan) else measured(predicted(plan))))
    assert not is_default(found.chosen.candidate.plan) and found.chosen.ok
    with pytest.raises(JobFailed, match="no plan ran; the plain default failed: out of memory"):
        proof(Machine(result=lambda plan, look: full))


def test_what_was_measured_beside_other_programs_is_measured_again() -> None:
    """The first look at each is busy, the second one is not: its speed counts, though it is the lower one."""

    def result(plan: Plan, look: int) -> TrialResult:
        return measured(predicted(plan) * (1.0 if look == 0 else 0.999), busy=look == 0, waited_share=0.4)

    machine = Machine(takes=lambda plan: 4.0, result=result)
    found = proof(machine)
    for entry in (found.default, found.chosen):
        assert not entry.best.busy and len(entry.results) == 2
        assert entry.best.tokens_per_second == pytest.approx(0.999 * predicted(entry.candidate.plan))
    assert not any("other programs" in note for note in found.notes)


def test_a_machine_that_stays_busy_is_said_and_not_remembered(tmp_path: Path) -> None:
    found = proof(Machine(result=lambda plan, look: measured(predicted(plan), busy=True, waited_share=0.4)))
    assert any("other programs computed" in note and "40%" in note for note in found.notes)
    store_proof(tmp_path / "busy.json", found)
    assert not (tmp_path / "busy.json").exists()
    quiet = proof(Machine())
    store_proof(tmp_path / "quiet.json", quiet)
    again = read_proof(tmp_path / "quiet.json", planning())
    assert again is not None and again.notes == quiet.notes


@pytest.mark.parametrize("limited", ["fields", "memory"])
def test_after_a_plan_is_removed_the_next_one_has_what_the_user_fixed(tmp_path: Path, limited: str) -> None:
    """The plain default is the fastest, and breaks the limit. A third of the others break it, too."""

    def breaks(plan: Plan) -> bool:
        return is_default(plan) or len(plan.label()) % 3 == 0

    def result(plan: Plan, look: int) -> TrialResult:
        speed = 1e9 if breaks(plan) else predicted(plan)
        return measured(speed, resident_bytes=200 if breaks(plan) and limited == "memory" else 50)

    limits = {"obeys": lambda plan: not breaks(plan)} if limited == "fields" else {"limit_bytes": 100}
    path = tmp_path / "proof.json"
    first = proof(Machine(takes=lambda plan: 2.0, result=result), **limits)
    assert len(first.tried) > 4 and sum(breaks(entry.candidate.plan) for entry in first.tried) > 1
    store_proof(path, first)
    chosen = [first.chosen.candidate.plan]
    while path.is_file():
        remove_plan(path, chosen[-1])
        following = read_proof(path, planning())
        if following is None:
            break
        chosen.append(following.chosen.candidate.plan)
    assert len(chosen) > 1 and not any(map(breaks, chosen))
    speeds = [predicted(plan) for plan in chosen]
    assert speeds == sorted(speeds, reverse=True)


def test_a_rough_speed_counts_less_than_a_steady_one() -> None:
    tried = Tried(planning().default, [measured(200.0, rough=True), measured(100.0, busy=True), measured(50.0)])
    assert tried.best.tokens_per_second == 50.0
    assert Tried(planning().default, [measured(200.0, rough=True)]).needs_another_trial


def test_the_interval_of_a_rough_speed_is_the_formulas() -> None:
    candidate = planning().ranking.candidates[0]
    rough, steady = (
        after_trial(Tried(candidate, [measured(10.0, rough=is_rough)]), planning()).basis("step") for is_rough in (True, False)
    )
    assert rough.interval == STEP_INTERVAL and steady.interval == AGAIN_INTERVALS["step"]


def test_a_trials_memory_is_the_runs_where_it_saw_the_longest_batch_and_is_said_not_to_be_where_it_did_not() -> None:
    candidate = planning().ranking.candidates[0]
    lasting = sum(candidate.memory.phases["optimizer"].parts.get(part, 0.0) for part in LASTING_PARTS)
    allocated, held = int((lasting + candidate.memory.peak) / 2), int(0.7 * candidate.resident)
    shape = (1, planning().workload.sequence_length // 4)
    result = measured(10.0, peak_bytes=allocated, resident_bytes=held, largest_micro_batch=shape)
    whole = after_trial(Tried(candidate, [result]), planning())
    assert whole.memory.peak == pytest.approx(allocated, rel=1e-6) and whole.resident == held
    assert (whole.basis("held").tier, whole.basis("held").interval) == ("measured", AGAIN_INTERVALS["held"])
    part = after_trial(Tried(candidate, [result.changed(largest_of_run=False)]), planning())
    for name, number, bytes_measured in (("allocated", part.memory.peak, allocated), ("held", part.resident, held)):
        basis = part.basis(name)  # type: ignore[arg-type]
        low, high = basis.interval or (0.0, 0.0)
        assert basis.tier == "formula" and number > bytes_measured
        assert low * number <= 1.001 * bytes_measured and high > 1.0


@dataclass
class FakeLoad:
    """A clock and counters that move by what is told. ``waits``: seconds of each second in which the thread had no core."""

    waits: float = 0.0
    others: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    own: float = 0.0
    all: float = 0.0

    def work(self, seconds: float) -> None:
        self.seconds += seconds / (1.0 - self.waits)
        self.waited += seconds * self.waits / (1.0 - self.waits)
        self.own += seconds
        self.all += seconds + self.others * seconds / (1.0 - self.waits)

    def read(self) -> Moment:
        ran = ThreadClock(self.own, self.waited)
        return Moment(self.seconds, self.own, {7: ran, 8: ThreadClock(0.0, 0.0)}, self.all)


@pytest.mark.parametrize(
    ("waits", "others", "busy"), [(0.0, 0.0, False), (0.02, 0.05, False), (0.5, 0.5, True), (0.9, 1.9, True), (0.0, 0.6, True)]
)
def test_waiting_for_a_core_is_seen_and_taken_off(waits: float, others: float, busy: bool) -> None:
    load = FakeLoad(waits=waits, others=others)
    timing = LoadMeter(load.read).time(lambda: load.work(2.0))
    assert timing.busy is busy
    assert timing.calm_seconds == pytest.approx(2.0)
    assert timing.other_cores == pytest.approx(others)


@pytest.mark.parametrize(
    ("others", "calm"),
    [
        ({}, 4.0),
        ({8: ThreadClock(0.01, 9.9)}, 4.0),  # it samples memory: nobody waits for it
        ({8: ThreadClock(3.0, 7.0)}, 4.0),  # it computes, and was delayed most; the first needs its four seconds all the same
        ({8: ThreadClock(3.0, 2.0)}, 5.0),
    ],
)
def test_threads_that_look_on_delay_nothing(others: dict[int, ThreadClock], calm: float) -> None:
    """Ten seconds, in which the busiest thread had a core for four, and waited for five or six."""
    busiest = ThreadClock(4.0, 6.0 if not others or others[8].waited > 5 else 5.0)
    before = Moment(0.0, 0.0, {}, None)
    after = Moment(10.0, 7.0, {7: busiest, **others}, None)
    assert timing_between(before, after).calm_seconds == pytest.approx(calm)


def test_without_the_kernels_counters_nothing_is_claimed() -> None:
    timing = timing_between(Moment(0.0, 0.0, None, None), Moment(3.0, 1.0, None, None))
    assert (timing.busy, timing.calm_seconds, timing.cpu_seconds) == (False, 3.0, 1.0)
    short = Timing(0.05, 0.05, other_cores=2 * BUSY_CORES)
    assert not short.busy, "ticks of a hundredth of a second say nothing of so short a time"


def test_the_counters_of_this_machine_are_read() -> None:
    before = read_moment()
    sum(range(200_000))
    after = read_moment()
    timing = timing_between(before, after)
    assert timing.seconds > 0.0 and 0.0 <= timing.waited <= timing.seconds and timing.other_cores >= 0.0
    assert timing.calm_seconds <= timing.seconds


def test_free_heap_goes_back_once_where_the_steps_need_that_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_memory.platform, "libc_ver", lambda: ("glibc", "2.36"))
    times_given_back: list[int] = []
    held = held_memory.HeldMemory(1000.0, give_back=lambda: times_given_back.append(1))
    assert [held.after_step(size) for size in (900, 1000, 1001, 900)] == [False, False, True, False]
    assert not any(held.after_step(2000) for _ in range(100))  # it came back within a few steps
    assert len(times_given_back) == 1


def test_free_heap_goes_back_each_time_that_holes_have_slowly_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_memory.platform, "libc_ver", lambda: ("glibc", "2.36"))
    resident = [500.0]
    held = held_memory.HeldMemory(1000.0, give_back=lambda: resident.__setitem__(0, 500.0))
    times_given_back = 0
    for _ in range(400):
        resident[0] += 10.0
        times_given_back += held.after_step(round(resident[0]))
    assert times_given_back == 400 // 51
    nothing_known = held_memory.HeldMemory(None, give_back=lambda: None)
    assert not nothing_known.after_step(10**12)


# In a process of its own: what other tests have left in this one may be given back meanwhile.
LIMITED = """
import mmap
from upshift.training import held_memory
held_memory.free_memory_bytes = lambda: 2**30
with held_memory.limited_memory(num_processes=2):
    mmap.mmap(-1, 2**28, flags=mmap.MAP_PRIVATE).close()
    try:
        mmap.mmap(-1, 2**29, flags=mmap.MAP_PRIVATE)
    except OSError as error:
        print(error.strerror)
mmap.mmap(-1, 2**29, flags=mmap.MAP_PRIVATE)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux alone")
def test_memory_beyond_the_containers_raises_an_error_before_the_kernel_ends_the_process() -> None:
    """1 GiB is free, and two processes share it: one may take 0.475 GiB."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert done.stdout == "Cannot allocate memory\n"
