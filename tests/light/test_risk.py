"""One accepted risk, one limit: the ranking, --why, --largest, the price of more memory, a lock's check and a refusal's words all
hold plans against the same number of bytes. And what holds for the memory and time of any plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from made_profile import make_profile

from upshift.errors import NothingFits
from upshift.hardware import describe
from upshift.hardware.spec import Host
from upshift.models.source import ModelSource
from upshift.planning import planner
from upshift.planning.analysis.explain import shadow_price
from upshift.planning.analysis.lock_file import check_lock, lock_plan
from upshift.planning.analysis.max_size import why_nothing_fits
from upshift.planning.analysis.what_if import describe_shortage, explain_choice
from upshift.planning.cost.uncertainty import Basis
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan, plain_default
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate, Ranking, cost_plan, limit_of
from upshift.planning.search.search import search
from upshift.planning.workload import Workload
from upshift.units import format_bytes

HOST = describe("a100-40gb")
PROFILE = make_profile()
SOURCE = ModelSource(reference="made up", directory=None, config={})
RISKS = (None, 0.001, 0.2)
FREE = 40960 * 2**20
STATED = {None: 0.95 * FREE, 0.001: FREE / (1 + 3.0902 * 0.08), 0.2: FREE / (1 + 0.8416 * 0.08)}


def planned(risk: float | None, host: Host = HOST) -> Planning:
    workload = Workload(sequence_length=1024, global_batch=16, risk=risk)
    ranking = search(host, PROFILE, workload, fixed={"torch_compile": "off", "optim": "adamw_torch_fused"})
    default = cost_plan(plain_default(host, PROFILE, workload), host=host, profile=PROFILE, workload=workload)
    assert isinstance(default, Candidate)
    return Planning(host, PROFILE, workload, ranking, default)


def told_limit(words: str) -> str:
    found = re.search(r" of ([\d.]+ GiB)", words)
    assert found is not None, words
    return found[1]


@pytest.mark.parametrize("risk", RISKS)
def test_every_answer_holds_plans_against_one_limit(risk: float | None) -> None:
    planning = planned(risk)
    ranking, workload = planning.ranking, planning.workload
    limit = STATED[risk]
    assert limit_of(ranking.candidates[0], HOST, workload) == pytest.approx(limit, rel=1e-4)
    assert max(candidate.resident for candidate in ranking.candidates) <= limit * 1.0001
    assert min(candidate.resident for candidate in ranking.too_big) >= limit * 0.9999
    words = format_bytes(limit)
    assert told_limit(describe_shortage(ranking.too_big[0], HOST, workload)) == words
    assert told_limit(why_nothing_fits(Ranking(too_big=ranking.too_big), HOST, workload)) == words
    big = explain_choice(planning, "per_device_train_batch_size=16", fixed=("activation_checkpointing=0", "precision=fp32"),
              trace=lambda length, variants: PROFILE)  # fmt: skip
    assert big.outcome == "does not fit"
    assert told_limit(big.why) == words
    with pytest.raises(NothingFits, match=f"nothing fits in the {words} usable"):
        planner._raise_nothing_fits(Ranking(too_big=ranking.too_big), HOST, workload, str)


@pytest.mark.parametrize("is_estimated", [False, True])
@pytest.mark.parametrize("risk", [0.001, 0.01, 0.05, 0.3])
def test_no_plan_is_riskier_than_accepted(risk: float, is_estimated: bool) -> None:
    """A model that was estimated from its sizes has wider intervals, so that less of the memory may be predicted."""
    profile = PROFILE.changed(is_estimated=is_estimated)
    workload = Workload(sequence_length=1024, global_batch=16, risk=risk)
    ranking = search(HOST, profile, workload, fixed={"torch_compile": "off", "optim": "adamw_torch_fused"})

    def probabilities(candidates: list[Candidate]) -> list[float]:
        numbers = [candidate.numbers(model_flops_per_step=1.0, host=HOST) for candidate in candidates]
        return [one.out_of_memory_probability or 0.0 for one in numbers]

    assert max(probabilities(ranking.candidates)) <= risk * 1.0001
    assert min(probabilities(ranking.too_big)) >= risk * 0.9999


def test_what_is_known_of_held_memory_moves_the_limit_in_words_too() -> None:
    planning = planned(0.01)
    sure = replace(planning.ranking.too_big[0], bases={"held": Basis(tier="measured", interval=(1 / 1.02, 1.02), num_records=9)})
    unsure = planning.ranking.too_big[0]
    limits = [limit_of(one, HOST, planning.workload) or 0.0 for one in (sure, unsure)]
    assert limits[0] > 1.1 * limits[1]
    for candidate, limit in zip((sure, unsure), limits, strict=True):
        assert told_limit(describe_shortage(candidate, HOST, planning.workload)) == format_bytes(limit)
        with pytest.raises(NothingFits, match=f"in the {format_bytes(limit)} usable"):
            planner._raise_nothing_fits(Ranking(too_big=[candidate]), HOST, planning.workload, str)


@pytest.mark.parametrize("risk", RISKS)
def test_the_price_of_more_memory_is_what_fits_the_larger_device(risk: float | None) -> None:
    """Against the limit of a device of 48 GiB, by the same risk."""
    planning = planned(risk)
    assert HOST.gpu is not None
    larger = HOST.changed(gpu=HOST.gpu.changed(memory_bytes=FREE + 8 * 2**30))
    reached = planned(risk, larger).ranking.candidates[0]
    gain = reached.tokens_per_second / planning.ranking.candidates[0].tokens_per_second - 1
    line = shadow_price(planning.ranking, HOST, planning.workload)
    assert line is not None
    assert line.startswith(f"8 GiB more memory would give {gain:+.1%}" if gain > 0 else "8 GiB more memory would not")


def test_a_lock_is_checked_by_the_risk_that_it_was_made_with() -> None:
    """A plan that just fits by a fixed share does not by a risk of one in a thousand."""
    planning = planned(None)
    biggest = max(planning.ranking.candidates, key=lambda candidate: candidate.resident)
    tight = replace(planning, ranking=replace(planning.ranking, candidates=[biggest]))
    locked = lock_plan(tight, SOURCE, fixed=(), described=True)
    assert check_lock(locked, PROFILE).problem is None
    assert HOST.gpu is not None
    smaller = HOST.changed(gpu=HOST.gpu.changed(memory_bytes=round(biggest.resident / 0.95 / 1.01)))
    lock = locked.lock.changed(host=smaller)
    assert check_lock(locked.changed(lock=lock), PROFILE).problem is None  # it did not fit by formula when it was locked, either
    grown = locked.plans[0].predicted.changed(resident_gib=0.9 * biggest.resident / 2**30)
    grew = locked.changed(lock=lock, plans=(locked.plans[0].changed(predicted=grown),))
    problem = check_lock(grew, PROFILE).problem
    assert problem is not None
    assert told_limit(problem) == format_bytes(0.95 * smaller.gpu.memory_bytes)  # type: ignore[union-attr]
    risky = grew.changed(lock=lock.changed(workload=lock.workload.changed(risk=0.2)))
    problem = check_lock(risky, PROFILE).problem
    assert problem is not None
    assert told_limit(problem) == format_bytes(smaller.gpu.memory_bytes / (1 + 0.84162 * 0.08))  # type: ignore[union-attr]


# --- any plan --------------------------------------------------------------------------------------------------------


def cost(host: Host, *, length: int = 1024, global_batch: int = 16, **fields: object) -> Candidate:
    workload = Workload(sequence_length=length, global_batch=global_batch)
    plain = {"device": "cuda", "host": host.fingerprint, "model": "feed", "sequence_length": length, "precision": "bf16",
             "per_device_train_batch_size": 2, "num_processes": host.num_devices}  # fmt: skip
    plan = Plan(**{**plain, **fields})  # type: ignore[arg-type]
    each = global_batch // plan.data_parallel // plan.per_device_train_batch_size
    found = cost_plan(plan.changed(gradient_accumulation_steps=each), host=host, profile=PROFILE, workload=workload)
    assert isinstance(found, Candidate)
    return found


@pytest.mark.parametrize("stage", ["optimizer", "gradients", "weights"])
def test_fewer_devices_never_need_less_memory_each(stage: str) -> None:
    needs = [
        cost(describe(f"{devices}xh100"), layout=Layout(fully_shard=stage, shard_size=devices)).resident  # type: ignore[arg-type]
        for devices in (2, 4, 8)
    ]
    assert needs[0] > needs[1] > needs[2]
    tensor = [cost(describe(f"{degree}xh100"), layout=Layout(tensor_parallel=degree)).resident for degree in (2, 4, 8)]
    assert tensor[0] > tensor[1] > tensor[2]


@pytest.mark.parametrize("on", ["1xh100", "4xh100", "2x2xa100-40gb"])
def test_longer_sequences_and_larger_batches_take_longer(on: str) -> None:
    host = describe(on)
    by_length = [cost(host, length=length) for length in (1024, 2048, 4096)]
    times = [candidate.time.total for candidate in by_length]
    assert 0.0 < times[0] < times[1] < times[2]
    assert times[1] > 1.5 * times[0] - by_length[0].time.terms["update"]
    peaks = [candidate.memory.peak for candidate in by_length]
    assert peaks[0] < peaks[1] < peaks[2]
    by_batch = [cost(host, global_batch=batch).time.total for batch in (16, 32, 64)]
    assert by_batch[0] < by_batch[1] < by_batch[2]
    recomputed = [cost(host, activation_checkpointing=layers) for layers in (0, 12, 24)]
    assert recomputed[0].memory.peak > recomputed[1].memory.peak > recomputed[2].memory.peak
    assert recomputed[0].time.total < recomputed[1].time.total < recomputed[2].time.total


def test_twice_the_rates_halve_what_they_bound() -> None:
    """On a host whose figures all double, and whose software costs nothing, a step takes half the time."""
    host = describe("1xh100")
    assert host.gpu is not None
    assert host.gpu.peak is not None
    doubled = {name: rate and 2 * rate for name, rate in host.gpu.peak.model_dump().items()}
    faster = host.changed(gpu=host.gpu.changed(peak=doubled))
    one, two = (cost(each).time.terms for each in (host, faster))
    for term in ("matrix products", "attention", "memory traffic", "update"):
        assert two[term] == pytest.approx(one[term] / 2), term
