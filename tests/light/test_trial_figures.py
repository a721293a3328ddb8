"""What trials teach of plans that were not tried, what a step would take with another choice, and other answers, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_profile import make_profile

from upshift.hardware import describe
from upshift.planning.analysis import bottleneck
from upshift.planning.analysis.bottleneck import Measured
from upshift.planning.analysis.explain import describe_difference, with_more_memory
from upshift.planning.analysis.lock_file import Change
from upshift.planning.analysis.what_if import _step_differences
from upshift.planning.cost.memory import Peak, StepMemory
from upshift.planning.cost.process_memory import CUDA_SLACK
from upshift.planning.cost.time import StepTime
from upshift.planning.plan import Plan
from upshift.planning.search.feasibility import JobMemory
from upshift.planning.search.ranking import Candidate, Ranking, Rejected
from upshift.planning.trials.calibration import Calibration, MeasuredPair, Sample, job_key
from upshift.planning.trials.runner import TrialResult
from upshift.planning.trials.select import Tried, _close_plans, memory_correction, prove, speed_correction
from upshift.planning.workload import Workload
from upshift.record import Spread

WORKLOAD = Workload(sequence_length=1024, global_batch=8, total_steps=10)
PROFILE = make_profile()


def candidate_of(*, terms: dict[str, float] | None = None, one_time: float = 0.0, **fields: object) -> Candidate:
    """Return a plan of 100 tokens a second by prediction, which holds 1,000 bytes, 600 of them in tensors."""
    plain = {"device": "cpu", "host": "h", "model": "m", "sequence_length": 1024, "per_device_train_batch_size": 2}
    plan = Plan(**{**plain, **fields})  # type: ignore[arg-type]
    memory = StepMemory({"forward": Peak(600.0, {"weights": 400.0, "activations": 200.0})})
    return Candidate(plan, memory, 1000.0, StepTime(terms or {"attention": 2.0}, one_time), 100.0)


def result_of(speed: float | None, *, step: float = 1.0, **fields: object) -> TrialResult:
    seconds = Spread(p20=step - 0.1, p50=step, p80=step + 0.1)
    return TrialResult(tokens_per_second=speed, step_seconds=seconds, **fields)  # type: ignore[arg-type]


def tried_of(speed: float, **fields: object) -> Tried:
    return Tried(candidate_of(**fields), [result_of(speed)])


# --- corrections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "distance"),
    [
        ({}, 0.0), ({"precision": "bf16"}, 4.0), ({"torch_compile": "layer"}, 3.0), ({"attention": "block"}, 3.0),
        ({"num_processes": 2}, 3.0), ({"weight_offload": "disk"}, 3.0), ({"packing": True}, 2.0),
        ({"activation_checkpointing": 3}, 1.0), ({"recompute_granularity": "selective"}, 1.0), ({"loss_chunk_tokens": 512}, 1.0),
        ({"optim": "sgd"}, 1.0), ({"optimizer_in_backward": True}, 1.0), ({"per_device_train_batch_size": 4}, 0.5),
        ({"host_memory": "keep"}, 0.5), ({"precision": "bf16", "per_device_train_batch_size": 4}, 4.5),
        ({"mup_base": "x=1"}, 0.0),
    ],
)  # fmt: skip
def test_plans_that_are_alike_count_most(fields: dict[str, object], distance: float) -> None:
    """One trial of a plan like the candidate but for one field was twice as fast as predicted, one far from it as predicted."""
    near = tried_of(200.0, **fields)
    far = tried_of(100.0, precision="fp16", torch_compile="model")
    weight = 1 / (0.25 + distance) ** 2
    others = 1 / (0.25 + 7.0) ** 2
    assert speed_correction(candidate_of(), [near, far]) == pytest.approx((2 * weight + others) / (weight + others))
    near.results = [result_of(200.0, resident_bytes=3000)]
    far.results = [result_of(100.0, resident_bytes=1000)]
    assert memory_correction(candidate_of(), [near, far]) == pytest.approx((3 * weight + others) / (weight + others))


def test_a_failed_plan_makes_those_like_it_slow_and_one_that_had_no_time_says_nothing() -> None:
    failed = Tried(candidate_of(precision="bf16"), [TrialResult(failure="out of memory", out_of_memory=True)])
    assert speed_correction(candidate_of(), [failed]) == pytest.approx(1 / (1 + 1 / 4.25))
    assert speed_correction(candidate_of(precision="bf16"), [failed, failed]) == pytest.approx(1 / (1 + 2 / 0.25))
    late = Tried(candidate_of(precision="bf16"), [TrialResult(failure="took longer", timed_out=True)])
    assert speed_correction(candidate_of(), [late]) == 1.0
    assert memory_correction(candidate_of(), [failed]) == 1.0
    beside = speed_correction(candidate_of(), [failed, tried_of(200.0, precision="bf16")])
    assert beside == pytest.approx((0.0 + 2.0) / 2)


def test_what_a_trial_says_of_its_plan() -> None:
    slow = result_of(50.0, step=2.0, one_time_seconds=10.0, peak_bytes=2**30, resident_bytes=2**31, check_loss=3.0)
    fast = result_of(80.0, step=2.0, one_time_seconds=10.0)
    tried = Tried(candidate_of(), [slow, fast])
    assert tried.best is fast and tried.ok and not tried.needs_another_trial
    # Ten seconds once, over ten steps of two seconds.
    assert tried.whole_run_speed(WORKLOAD) == pytest.approx(80.0 * 2.0 / 3.0)
    numbers = Tried(candidate_of(), [slow]).numbers()
    assert (numbers.peak_gib, numbers.resident_gib, numbers.tokens_per_second, numbers.loss) == (1.0, 2.0, 50.0, 3.0)
    assert numbers.step_ms is not None
    assert (numbers.step_ms.p20, numbers.step_ms.p50, numbers.step_ms.p80) == pytest.approx((1900.0, 2000.0, 2100.0))
    wrong = Tried(candidate_of(), [fast], wrong_loss=True)
    assert not wrong.ok and wrong.whole_run_speed(WORKLOAD) == 0.0
    assert wrong.failure == "its loss differs from the plain default's"
    broken = Tried(candidate_of(), [TrialResult(failure="died")])
    assert (broken.ok, broken.failure, broken.needs_another_trial) == (False, "died", False)
    assert Tried(candidate_of(), [TrialResult(failure="died"), fast]).ok
    assert Tried(candidate_of(), [fast.changed(busy=True)]).needs_another_trial
    assert tried.exceeds(2**31 - 1) is False and Tried(candidate_of(), [slow]).exceeds(2**31 - 1) is True
    assert not Tried(candidate_of(), [slow]).exceeds(2**31) and not Tried(candidate_of(), [slow]).exceeds(None)


def test_plans_that_one_trial_each_cannot_tell_apart() -> None:
    """Those above 93 % of the best speed, two at most."""
    best, near, nearer, far = (tried_of(speed) for speed in (100.0, 94.0, 96.0, 92.0))
    assert _close_plans([far, near, best], WORKLOAD) == [best, near]
    assert _close_plans([near, far, nearer, best], WORKLOAD) == [best, nearer]
    assert _close_plans([best, far], WORKLOAD) == []
    assert _close_plans([], WORKLOAD) == []


def sample_of(candidate: Candidate, **ratios: float) -> Sample:
    numbers = {name: MeasuredPair(predicted=1.0, measured=ratio) for name, ratio in ratios.items()}
    plan = candidate.plan
    return Sample(
        made_with="here", job=job_key(plan, WORKLOAD), precision=plan.precision, torch_compile=plan.torch_compile, kind="run",
        numbers=numbers,  # type: ignore[arg-type]
    )  # fmt: skip


def test_each_number_is_corrected_by_its_own_ratio() -> None:
    """A step of 2 s, and 10 s once over ten steps."""
    candidate = candidate_of(terms={"attention": 1.5, "update": 0.5}, one_time=10.0)
    held = Calibration((sample_of(candidate, held=2.0),)).of(candidate, WORKLOAD)
    assert (held.resident, held.time, held.tokens_per_second, held.memory) == (2000.0, candidate.time, 100.0, candidate.memory)
    step = Calibration((sample_of(candidate, step=2.0),)).of(candidate, WORKLOAD)
    assert step.time.terms == pytest.approx({"attention": 3.0, "update": 1.0})
    assert (step.time.one_time, step.resident) == (10.0, 1000.0)
    assert step.tokens_per_second == pytest.approx(100.0 * 3.0 / 5.0)
    allocated = Calibration((sample_of(candidate, allocated=1.5),)).of(candidate, WORKLOAD)
    assert allocated.memory.peak == pytest.approx(900.0)


# --- which trials are run --------------------------------------------------------------------------------------------


def trials_of(
    seconds: list[float],
    *,
    budget: float = 60.0,
    limit: float | None = None,
    held: tuple[int, ...] = (),
    speeds: tuple[float, ...] = (),
) -> list[tuple[int, float]]:
    """Return (plan, limit in seconds) of each trial. Trial i takes ``seconds[i]``; the plain default is plan 0.

    Plans are as fast as predicted, each slower than the one before; the default is the slowest.
    """
    candidates = [
        replace(candidate_of(loss_chunk_tokens=number), tokens_per_second=100.0 * 0.8**number) for number in range(1, 7)
    ]
    default = replace(candidate_of(), tokens_per_second=10.0)
    by_plan = {candidate.plan: number for number, candidate in enumerate([default, *candidates])}
    run_trials: list[tuple[int, float]] = []
    now = 0.0

    def run(plan: Plan, limit_seconds: float) -> TrialResult:
        nonlocal now
        number = by_plan[plan]
        run_trials.append((number, limit_seconds))
        took = seconds[min(len(run_trials), len(seconds)) - 1]
        now += took
        speed = speeds[number] if number < len(speeds) else [default, *candidates][number].tokens_per_second
        return result_of(speed, wall_seconds=took, resident_bytes=held[number] if number < len(held) else 1000)

    prove(candidates, default, workload=WORKLOAD, run=run, budget_seconds=budget, clock=lambda: now, limit_bytes=limit)
    return run_trials


def test_the_budget_is_shared_by_the_default_the_best_and_later_trials() -> None:
    """Half for the default, half at least for the best, then what is left, as long as one more trial is likely to end in time."""
    assert trials_of([10.0]) == [(0, 30.0), (1, 50.0), (2, 40.0), (3, 30.0), (4, 20.0)]
    assert trials_of([40.0, 10.0]) == [(0, 30.0), (1, 30.0), (2, 15.0)]
    assert trials_of([55.0, 30.0]) == [(0, 30.0), (1, 30.0)]
    assert trials_of([10.0, 45.0]) == [(0, 30.0), (1, 50.0)]
    assert trials_of([10.0, 35.0, 20.0]) == [(0, 30.0), (1, 50.0)]
    assert trials_of([10.0, 28.0, 10.0]) == [(0, 30.0), (1, 50.0), (2, 22.0)]


def test_plans_that_are_as_fast_are_measured_again_while_there_is_time() -> None:
    """The two best; one is left out where half of its trial would not end."""
    speeds = (10.0, 100.0, 99.0, 1.0, 1.0)
    assert trials_of([10.0], speeds=speeds) == [(0, 30.0), (1, 50.0), (2, 40.0), (3, 30.0), (4, 20.0), (1, 15.0)]
    assert trials_of([5.0], speeds=speeds)[-3:] == [(6, 30.0), (1, 25.0), (2, 20.0)]
    assert trials_of([5.0], speeds=(10.0, 100.0, 90.0, 1.0))[-1] == (6, 30.0)


def test_trials_go_on_beyond_the_budget_only_while_no_plan_holds_what_is_allowed() -> None:
    """1,000 bytes are allowed. Once more the budget is there where all tried plans held more."""
    beyond = (2000, 900, 900)
    assert [number for number, _ in trials_of([10.0, 25.0], budget=30.0, limit=1000.0, held=beyond)] == [0, 1]
    first_two = (2000, 2000, 400)
    assert len(trials_of([10.0, 25.0], budget=30.0, limit=1000.0, held=first_two)) == 3


# --- other answers ---------------------------------------------------------------------------------------------------


def measured_of(candidate: Candidate, **seconds: float) -> Measured:
    names = {"products": bottleneck.PRODUCTS, "idle": bottleneck.IDLE, "update": bottleneck.OPTIMIZER}
    by_kind = {names[name]: value for name, value in seconds.items()}
    return Measured(describe("epyc-9654"), PROFILE, WORKLOAD, candidate, by_kind)


def test_measured_seconds_scale_with_what_is_predicted() -> None:
    """Products took twice what was predicted, and would take twice of what another plan is predicted to."""
    here = candidate_of(terms={"matrix products": 1.0, "update": 0.5})
    there = candidate_of(terms={"matrix products": 0.4, "update": 0.5}, one_time=20.0)
    measured = measured_of(here, products=2.0, update=0.5)
    assert measured.scaled_seconds(there) == pytest.approx({bottleneck.PRODUCTS: 0.8, bottleneck.OPTIMIZER: 0.5})
    assert measured.total(there) == pytest.approx(0.8 + 0.5 + 20.0 / 10)
    assert measured.total(here) == pytest.approx(2.5)
    new = candidate_of(terms={"matrix products": 0.4, "update": 0.5, "dispatch": 0.3})
    assert measured.scaled_seconds(new)[bottleneck.IDLE] == pytest.approx(0.3)


def test_what_exceeds_three_times_a_roofline_goes_with_the_number_of_operators() -> None:
    here = candidate_of(terms={"matrix products": 1.0, "dispatch": 0.5})
    there = candidate_of(terms={"matrix products": 2.0, "dispatch": 0.1})
    measured = measured_of(here, products=5.0, idle=0.5)
    assert measured.scaled_seconds(there) == pytest.approx({bottleneck.PRODUCTS: 3.0 * 2.0 + 2.0 * 0.2, bottleneck.IDLE: 0.1})
    without = measured_of(candidate_of(terms={"matrix products": 1.0}), products=5.0)
    assert without.scaled_seconds(there)[bottleneck.PRODUCTS] == pytest.approx(3.0 * 2.0 + 2.0)
    unpredicted = measured_of(candidate_of(terms={"matrix products": 1.0}), products=1.0, idle=0.7)
    assert unpredicted.scaled_seconds(candidate_of(terms={"matrix products": 1.0}))[bottleneck.IDLE] == pytest.approx(0.7)


def test_a_change_is_named_by_what_does_not_follow_from_it() -> None:
    old = candidate_of(gradient_accumulation_steps=4).plan
    smaller = old.changed(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert bottleneck._changed_values(old, smaller) == {"per_device_train_batch_size": "4"}
    assert bottleneck._changed_values(old, old.changed(threads_per_process=2)) == {"threads_per_process": "2"}
    assert bottleneck._changed_values(old, old) == {}


def test_terms_that_differ_are_listed_with_compiling_spread_over_the_steps() -> None:
    best = candidate_of(terms={"attention": 1.0, "update": 1.0})
    other = candidate_of(terms={"attention": 1.5, "dispatch": 0.2, "update": 1.0001}, one_time=7.0)
    assert _step_differences(best, other, 10) == pytest.approx(
        {"compiling, spread over the steps": 700.0, "attention": 500.0, "dispatch": 200.0}
    )
    assert [*_step_differences(other, best, 10).values()] == pytest.approx([-700.0, -500.0, -200.0])


def test_shares_of_changes_and_words_of_differences() -> None:
    assert Change(name="peak", before=4.0, now=5.0).share == pytest.approx(0.25)
    assert Change(name="peak", before=4.0, now=None).share == -1.0
    assert Change(name="peak", before=None, now=5.0).share == 0.0
    assert describe_difference(1.25, 2.0**30) == "+25.0%, +1.00 GiB"
    assert describe_difference(0.5, -(2.0**31)) == "-50.0%, -2.00 GiB"
    assert describe_difference(1.0, 0.0) == "+0.0%, +0 B"


def test_more_memory_is_on_each_device_or_in_the_host() -> None:
    gpu = describe("8xh100")
    assert gpu.gpu is not None and gpu.gpu.memory_bytes is not None
    free = gpu.changed(gpu=gpu.gpu.changed(free_memory_bytes=5))
    larger = with_more_memory(free, 100)
    assert larger is not None and larger.gpu is not None
    assert (larger.gpu.memory_bytes, larger.gpu.free_memory_bytes) == (gpu.gpu.memory_bytes + 100, 105)
    unused = with_more_memory(gpu, 100)
    assert unused is not None and unused.gpu is not None and unused.gpu.free_memory_bytes is None
    cpu = with_more_memory(describe("epyc-9654-64gb"), 100)
    assert cpu is not None and cpu.cpu is not None and cpu.cpu.memory_bytes == 64 * 2**30 + 100
    assert with_more_memory(describe("epyc-9654"), 100) is None


def test_another_phase_holds_more_or_less_by_what_its_tensors_take_beside_the_steps() -> None:
    """A GPU's allocator adds 4 %. The step's tensors take 600 bytes of the 1,000 that it holds."""
    gpu = replace(candidate_of(), plan=candidate_of(device="cuda").plan)
    life = JobMemory(describe("h100"), PROFILE, WORKLOAD)
    assert life.held_bytes(gpu, 700.0) == pytest.approx(1000.0 + CUDA_SLACK * 100.0)
    assert life.held_bytes(gpu, 500.0) == pytest.approx(1000.0 - CUDA_SLACK * 100.0)
    ranking = Ranking(rejected=[Rejected(gpu.plan, "reason")], num_unseen=4)
    assert ranking.num_rejected == 5
    assert Ranking().num_rejected == 0


def test_numbers_of_a_candidate() -> None:
    candidate = candidate_of(terms={"attention": 0.5, "update": 1.5}, one_time=3.0)
    numbers = candidate.numbers(model_flops_per_step=8.0)
    assert numbers.step_ms is not None and numbers.step_ms.p50 == 2000.0
    assert (numbers.model_flops_per_second, numbers.binding_term, numbers.one_time_seconds) == (4.0, "update", 3.0)
    assert numbers.reserved_gib is None and numbers.out_of_memory_probability is None
