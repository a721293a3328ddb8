"""What earlier runs on a machine teach: where corrected numbers may lie, what one more record does, and what a file may hold."""

from __future__ import annotations

import math
import multiprocessing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_plans import made_up_planning

from upshift.hardware import describe
from upshift.planning.cost.uncertainty import MIN_RECORDS, STEP_INTERVAL, held_memory_spread
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate
from upshift.planning.trials import calibration
from upshift.planning.trials.calibration import (
    Calibration,
    MeasuredPair,
    Sample,
    append_samples,
    job_key,
    provenance,
    read_calibration,
    sample_of,
)
from upshift.units import GIB

RATIOS = st.floats(0.3, 3.0)
HOST = describe("epyc-9654-768gb")


@cache
def planning() -> Planning:
    return made_up_planning(on="epyc-9654-768gb", global_batch=4)


def best() -> Candidate:
    return planning().ranking.candidates[0]


def sample(number: int, ratio: float, *, of: Candidate | None = None, **changes: Any) -> Sample:
    """Of a plan of another model, unless ``of`` says which."""
    like = (of or best()).plan
    job = job_key(like, planning().workload) if of else f"other-{number}"
    pair = MeasuredPair(predicted=2.0, measured=2.0 * ratio)
    fields: dict[str, Any] = {
        "made_with": provenance(like.host), "job": job, "precision": like.precision, "torch_compile": like.torch_compile,
        "kind": "run", "numbers": {"step": pair, "held": pair},
    }  # fmt: skip
    return Sample(**fields | changes)


def corrected(*samples: Sample) -> Candidate:
    return Calibration(samples).of(best(), planning().workload)


def width(candidate: Candidate) -> float:
    low, high = candidate.basis("step").interval or (0.0, math.inf)
    return math.log(high / low)


@given(st.lists(RATIOS, min_size=1, max_size=12), st.booleans())
def test_a_corrected_number_lies_between_formula_and_measured(ratios: list[float], own: bool) -> None:
    found = corrected(*(sample(number, ratio, of=best() if own else None) for number, ratio in enumerate(ratios)))
    low, high = min([1.0, *ratios]), max([1.0, *ratios])
    for after, before in ((found.time.total, best().time.total), (found.resident, best().resident)):
        assert low * (1 - 1e-9) <= after / before <= high * (1 + 1e-9)
    assert found.basis("step").tier == found.basis("held").tier == ("measured" if own else "transferred")
    assert found.basis("step").num_records == len(ratios)


@given(RATIOS, st.integers(1, 12))
def test_one_more_record_of_the_same_never_leads_away(ratio: float, count: int) -> None:
    before, after = (corrected(*(sample(n, ratio) for n in range(some))) for some in (count, count + 1))
    measured = best().time.total * ratio
    assert abs(math.log(after.time.total / measured)) <= abs(math.log(before.time.total / measured)) + 1e-9
    if count >= MIN_RECORDS:
        assert after.time.total == pytest.approx(measured)
        assert width(after) < width(before) <= width(best()) * (1 + 1e-9)


@given(st.lists(RATIOS, min_size=2, max_size=8).flatmap(lambda ratios: st.tuples(st.just(ratios), st.permutations(ratios))))
def test_the_order_of_records_does_not_matter(orders: tuple[list[float], list[float]]) -> None:
    one, other = (corrected(*(sample(n % 3, ratio, job=f"job {ratio}") for n, ratio in enumerate(order))) for order in orders)
    assert one == other


@given(st.lists(RATIOS, max_size=6))
def test_others_never_change_allocated_memory(ratios: list[float]) -> None:
    found = corrected(*(sample(number, ratio) for number, ratio in enumerate(ratios)))
    assert found.memory == best().memory
    assert found.basis("allocated").tier == "formula"


def test_allocated_memory_is_taken_where_this_plan_was_measured() -> None:
    pair = MeasuredPair(predicted=4.0, measured=5.0)
    found = corrected(sample(0, 1.0, of=best(), numbers={"allocated": pair}), sample(1, 2.0))
    assert found.memory.peak == pytest.approx(1.25 * best().memory.peak)
    assert found.basis("allocated").tier == "measured" and found.basis("step").tier == "transferred"


def test_nothing_ran() -> None:
    numbers = planning().numbers(best())
    assert corrected() is best()
    assert (numbers.tier, numbers.interval, numbers.num_records) == ("formula", STEP_INTERVAL, 0)
    assert numbers.peak_basis is not None and numbers.peak_basis.tier == "formula"
    assert numbers.resident_basis is not None and numbers.resident_basis.tier == "formula"


def test_those_alike_come_first_and_often_run_jobs_count_once() -> None:
    alike = [sample(number, 1.5) for number in range(MIN_RECORDS)]
    others = [sample(number, 3.0, job=f"fp32 {number}", torch_compile="model") for number in range(9)]
    often = [sample(9, 0.5, job="again and again") for _ in range(50)]
    assert corrected(*alike, *others).time.total == pytest.approx(1.5 * best().time.total)
    assert corrected(*alike[:1], *others).time.total == pytest.approx(3.0 * best().time.total)
    assert corrected(*alike, *others, *often).time.total == pytest.approx(1.5 * best().time.total)


def test_ranking_follows_what_ran() -> None:
    first = best()
    slow = Calibration((sample(0, 3.0, of=first),))
    ranking = slow.rerank(planning().ranking, HOST, planning().workload)
    speeds = [one.tokens_per_second for one in ranking.candidates]
    assert speeds == sorted(speeds, reverse=True)
    assert ranking.candidates[0].plan != first.plan
    assert len(ranking.candidates) + len(ranking.too_big) == len(planning().ranking.candidates) + len(planning().ranking.too_big)


def test_what_holds_more_here_no_longer_fits() -> None:
    workload, ranking = planning().workload, planning().ranking
    held = max(one.resident for one in ranking.candidates)
    small = HOST.changed(cpu=HOST.cpu.changed(free_memory_bytes=int(1.1 * held)))  # type: ignore[union-attr]
    twice = Calibration(tuple(sample(number, 2.0) for number in range(MIN_RECORDS)))
    again = twice.rerank(ranking, small, workload)
    assert again.too_big and all("needs" in entry.reason for entry in again.rejected[: len(again.too_big)])
    assert all(one.resident <= 1.1 * held for one in again.candidates)


def test_risk_takes_the_spread_that_was_measured() -> None:
    tight = corrected(*(sample(number, 1.0) for number in range(30)))
    loose = corrected(*(sample(number, ratio) for number, ratio in enumerate([0.7, 0.8, 1.0, 1.25, 1.4])))
    spread = held_memory_spread(best().basis("held"))
    assert held_memory_spread(tight.basis("held")) < spread < held_memory_spread(loose.basis("held"))
    free = HOST.changed(cpu=HOST.cpu.changed(free_memory_bytes=int(1.1 * best().resident)))  # type: ignore[union-attr]
    chances = [one.numbers(model_flops_per_step=1.0, host=free).out_of_memory_probability for one in (tight, best(), loose)]
    assert chances == sorted(chances)  # type: ignore[type-var]


@pytest.fixture
def cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path))
    return tmp_path / calibration.FILE_NAME


def test_lines_cut_short_cost_only_themselves(cache_file: Path) -> None:
    kept = sample_of(best().plan, planning().workload, "run", {"step": (1.0, 2.0), "allocated": (GIB, None)})
    append_samples([kept])
    cache_file.write_bytes(cache_file.read_bytes() + kept.to_json().encode()[:70])
    append_samples([kept])
    cache_file.write_bytes(b"\xff\x00 nonsense\n[]\n" + cache_file.read_bytes())
    assert read_calibration(HOST).samples == (kept, kept)
    assert "allocated" not in kept.numbers


def test_only_this_host_with_this_software_counts(cache_file: Path) -> None:
    append_samples(
        [sample(0, 2.0), sample(1, 2.0, made_with=provenance("another")), sample(2, 2.0, made_with=f"{HOST.fingerprint}-old")]
    )
    assert [one.job for one in read_calibration(HOST).samples] == ["other-0"]


def test_no_file_and_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "file"))
    append_samples([sample(0, 1.0)])
    assert read_calibration(HOST).samples == ()


def test_the_file_stays_small(cache_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MAX_BYTES", 4096)
    for number in range(60):
        append_samples([sample(number, 1.0)])
        assert cache_file.stat().st_size <= 4096
    found = [one.job for one in read_calibration(HOST).samples]
    assert found == [f"other-{number}" for number in range(60 - len(found), 60)] and len(found) >= 4


def write_some(writer: int) -> None:
    for number in range(20):
        append_samples([sample(number, 1.0, job=f"{writer} {number}")])


def test_writers_at_once_leave_whole_lines(cache_file: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_some, args=(writer,)) for writer in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert len({one.job for one in read_calibration(HOST).samples}) == 60
