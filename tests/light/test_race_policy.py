"""RacePolicy: who runs in a race, for how long, who runs again, and when an earlier race answers."""

from __future__ import annotations

from typing import Any

import pytest

from upshift.inference.race.policy import (
    COMPILE_SECONDS,
    LONGER_RATIO,
    MIN_AMOUNT,
    RACE_SECONDS,
    RACE_SHARE,
    START_LIMIT_SECONDS,
    RacePolicy,
)
from upshift.inference.race.types import Limits, Run, Skipped
from upshift.inference.registry import ENGINES, EngineName, EngineSetup
from upshift.record import Spread

SETUP = EngineSetup(engine="torch", precision="fp32", threads=1, batch=1)
COMPILED = SETUP.changed(engine="torch-compiled")
NO_LIMITS = Limits()


def ran(rate: float, *, engine: EngineName = "torch", **fields: Any) -> Run:
    given: dict[str, Any] = {"seconds": Spread.of([0.5]), "largest_difference": 0.0, "worst_cosine": 1.0}
    return Run(setup=SETUP.changed(engine=engine), per_second=rate, **{**given, **fields})


def twice_as_fast(setup: EngineSetup) -> float:
    return 20.0 if setup.engine == "torch-compiled" else 10.0


def test_what_compiles_is_admitted_where_it_pays_or_is_asked_for() -> None:
    saved_by = 2 * 10.0 * COMPILE_SECONDS  # texts at 10 a second: compiled they take half their time
    few, many = (RacePolicy("exact", NO_LIMITS, amount) for amount in (saved_by - 1, saved_by + 1))
    out = few.admit((COMPILED,), [ran(10.0)], twice_as_fast)
    assert out.setups == () and [(one.reason, one.rate) for one in out.skipped] == [("compiling", 20.0)]
    assert many.admit((COMPILED,), [ran(10.0)], twice_as_fast).setups == (COMPILED,)
    named = RacePolicy("exact", NO_LIMITS, 1.0, engine="torch-compiled")
    assert named.admit((COMPILED,), [ran(10.0)], twice_as_fast) == ((COMPILED,), ())
    assert few.admit((SETUP,), [], twice_as_fast) == ((SETUP,), ())


def test_an_engine_with_its_own_process_is_admitted_where_its_starts_pay_or_is_asked_for() -> None:
    served = SETUP.changed(engine="vllm")
    starts = 2 * ENGINES["vllm"].start_seconds  # one in the race, one before the run
    few, many = (RacePolicy("exact", NO_LIMITS, amount) for amount in (10.0 * starts - 1, 10.0 * starts + 1))
    out = few.admit((served,), [ran(10.0)], twice_as_fast)
    assert out.setups == () and [one.reason for one in out.skipped] == ["start"]
    assert many.admit((served,), [ran(10.0)], twice_as_fast).setups == (served,)
    named = RacePolicy("exact", NO_LIMITS, 1.0, engine="vllm")
    assert named.admit((served,), [ran(10.0)], twice_as_fast) == ((served,), ())
    assert named.time_budget([ran(10.0)]) == RACE_SECONDS + START_LIMIT_SECONDS
    assert few.is_final([ran(10.0)], out.skipped, RACE_SECONDS) and not many.is_final([ran(10.0)], out.skipped, RACE_SECONDS)
    fast = ran(20.0, engine="vllm", load_seconds=30.0)
    assert fast.seconds_for(20.0) == 31.0 and ran(10.0, load_seconds=30.0).seconds_for(20.0) == 2.0
    assert not RacePolicy("exact", NO_LIMITS, 1e6).select_finalists([fast, ran(19.9)])  # it would start in each turn


def test_the_time_of_a_race_is_what_is_asked_for_or_a_share_of_the_run() -> None:
    assert RacePolicy("exact", NO_LIMITS, 1.0).time_budget([ran(10.0)]) == RACE_SECONDS
    amount = 10.0 * 3600 * 24
    assert RacePolicy("exact", NO_LIMITS, amount).time_budget([ran(10.0)]) == pytest.approx(RACE_SHARE * 3600 * 24)
    assert RacePolicy("exact", NO_LIMITS, amount, seconds=5.0).time_budget([ran(10.0)]) == 5.0


def test_a_final_is_for_many_texts_without_limits() -> None:
    near = [ran(100.0, engine="openvino"), ran(99.0, engine="ctranslate2")]
    assert [run.per_second for run in RacePolicy("exact", NO_LIMITS, MIN_AMOUNT).select_finalists(near)] == [100.0, 99.0]
    assert not RacePolicy("exact", NO_LIMITS, MIN_AMOUNT - 1).select_finalists(near)
    assert not RacePolicy("exact", Limits(ttft_ms=10.0), MIN_AMOUNT).select_finalists(near)


def test_an_earlier_race_answers_if_nothing_that_it_left_out_could_win_now() -> None:
    runs, late = [ran(10.0)], (Skipped(setup=COMPILED, reason="time"),)
    assert RacePolicy("exact", NO_LIMITS, 1.0).is_final(runs, late, RACE_SECONDS)
    assert not RacePolicy("exact", NO_LIMITS, 1.0).is_final(runs, late, RACE_SECONDS / LONGER_RATIO - 1)
    coarse = (Skipped(setup=COMPILED, reason="quality", cosine=0.95),)
    assert RacePolicy(0.99, NO_LIMITS, 1.0).is_final(runs, coarse, RACE_SECONDS)
    assert not RacePolicy(0.9, NO_LIMITS, 1.0).is_final(runs, coarse, RACE_SECONDS)
    behind = [ran(10.0), ran(1.0, engine="openvino", stopped="behind")]
    assert RacePolicy(0.9, NO_LIMITS, 1.0).is_final(behind, (), RACE_SECONDS)
    assert not RacePolicy(0.9, Limits(ttft_ms=1.0), 1.0).is_final(behind, (), RACE_SECONDS)
