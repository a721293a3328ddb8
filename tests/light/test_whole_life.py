"""Every phase of a job is held against the limit, and the one that does not fit is named with its bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from made_up_plans import made_up_planning

from upshift.errors import NothingFits
from upshift.planning import planner
from upshift.planning.cost.memory import WITH_LOGITS, Peak, required_bytes, scale_to_peak
from upshift.planning.planner import MAX_SHOWN_PLANS, Planning
from upshift.planning.search.feasibility import JobMemory
from upshift.planning.search.ranking import Candidate, Ranking
from upshift.units import GIB


@cache
def planning(on: str = "1xa100-80gb") -> Planning:
    return made_up_planning(on=on, global_batch=8)


def measured_small(candidate: Candidate, share: float = 0.2) -> Candidate:
    """As if the step had been measured to need so much less than its formula says, which evaluation is predicted by."""
    lasting = sum(size for part, size in candidate.memory.phases["backward"].parts.items() if part in ("weights", "gradients"))
    peak = lasting + share * (candidate.memory.peak - lasting)
    held = candidate.resident * peak / candidate.memory.peak
    return replace(candidate, memory=scale_to_peak(candidate.memory, peak), resident=held)


def life_with(limit: float) -> JobMemory:
    host = planning().host
    assert host.gpu is not None
    free = host.changed(gpu=host.gpu.changed(free_memory_bytes=int(limit)))
    return JobMemory(free, planning().profile, planning().workload)


def tight() -> tuple[JobMemory, Candidate]:
    """A candidate whose step fits and whose evaluation does not."""
    largest = max(planning().ranking.candidates, key=lambda one: one.memory.peak)
    small = measured_small(largest, 0.0)
    life = planning().job_memory
    phases = life.phase_peaks(small)
    assert phases["evaluation"].total > small.memory.peak
    between = (small.resident + life.held_bytes(small, phases["evaluation"].total)) / 2
    return life_with(between / 0.95), small


def test_phases_stand_in_the_order_of_the_job() -> None:
    on_gpu = [*planning().numbers(planning().ranking.candidates[0]).memory]
    assert on_gpu == ["load", "first step", "forward", "backward", "optimizer", "evaluation", "resume"]
    on_cpu = planning("epyc-9654-768gb")
    assert [*on_cpu.numbers(on_cpu.ranking.candidates[0]).memory][-2:] == ["save", "resume"]


def test_the_first_step_has_no_optimizer_state_before_its_update() -> None:
    memory = planning().numbers(planning().ranking.candidates[0]).memory
    assert sum(memory["first step"].values()) <= max(sum(memory[name].values()) for name in ("forward", "backward", "optimizer"))


def test_a_save_without_room_for_copies_is_no_failure() -> None:
    peak = Peak(total=3.0, parts={"weights": 1.0, "communication": 2.0})
    assert (required_bytes("save", peak), required_bytes("backward", peak)) == (1.0, 3.0)


def test_the_phase_that_does_not_fit_is_named() -> None:
    life, candidate = tight()
    reason = life.describe_excess(candidate) or ""
    assert reason.startswith("its step fits, evaluation does not: needs ") and "GiB of " in reason and "weights" in reason
    assert life.describe_problems(candidate) == (reason,)
    assert life_with(1000 * GIB).describe_problems(candidate) == ()


def test_such_a_plan_is_rejected_and_the_next_takes_its_place() -> None:
    life, candidate = tight()
    fine = min(planning().ranking.candidates, key=lambda one: one.resident)
    ranking = life.drop_unfitting(Ranking(candidates=[candidate, fine]), num_plans=1)
    assert ranking.candidates == [fine]
    assert [entry.plan for entry in ranking.rejected] == [candidate.plan] and "evaluation" in ranking.rejected[0].reason


def test_only_as_many_are_looked_at_as_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Candidate] = []
    monkeypatch.setattr(JobMemory, "describe_excess", lambda self, candidate: looked.append(candidate))
    ranking = planning().ranking
    assert life_with(GIB).drop_unfitting(ranking, num_plans=3) is ranking
    assert looked == ranking.candidates[:3] and len(ranking.candidates) > MAX_SHOWN_PLANS


def test_nothing_fits_says_which_phase() -> None:
    life, candidate = tight()
    ranking = life.drop_unfitting(Ranking(candidates=[candidate]), num_plans=5)
    with pytest.raises(NothingFits, match="evaluation does not: needs"):
        planner._raise_nothing_fits(ranking, life.host, life.workload, str)


def chunking() -> tuple[JobMemory, Candidate]:
    """A plan whose loss comes in chunks that take nothing, on a model whose head takes much."""
    made = planning()
    steps = tuple(step.model_copy(update={"chunked_gap": step.gaps[0]}) for step in made.profile.steps)
    profile = made.profile.model_copy(update={"steps": steps})
    life = JobMemory(made.host, profile, made.workload)
    plan = made.ranking.candidates[0].plan.model_copy(
        update={"loss_chunk_tokens": 1024, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    )
    found = planner.cost_plan(plan, host=made.host, profile=profile, workload=made.workload)
    assert isinstance(found, Candidate)
    return life, found


def test_logits_that_do_not_fit_are_said_with_the_micro_batch_that_does() -> None:
    life, candidate = chunking()
    assert life.describe_problems(candidate) == ()
    sizes = {size: life.phase_peaks(candidate, sequences=size)[WITH_LOGITS].total for size in (1, 2, 4, 8)}
    assert sizes[1] < sizes[2] < sizes[4] < sizes[8]
    held = life.held_bytes(candidate, (sizes[2] + sizes[4]) / 2)
    small = replace(life, host=life_with(held / 0.95).host)
    assert small.describe_excess(candidate) is None
    assert small.describe_problems(candidate)[0].endswith("in micro-batches of 2 it does")
