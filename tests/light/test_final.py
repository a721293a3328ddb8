"""Who runs again at the end of a race, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from upshift.inference.race.policy import FINAL_SECONDS, FINAL_TURNS, MAX_FINALISTS, finalists, run_final
from upshift.inference.race.types import Contest, RaceRequest, Run, Skipped
from upshift.inference.registry import EngineName, EngineSetup
from upshift.models.source import ModelSource
from upshift.record import Spread


def ran(engine: EngineName, rate: float, *, batch: int = 256, **fields: Any) -> Run:
    setup = EngineSetup(engine=engine, precision="fp32", threads=1, batch=batch)
    given: dict[str, Any] = {"seconds": Spread.of([0.5]), "load_seconds": 0.1, "largest_difference": 0.0, "worst_cosine": 1.0}
    return Run(setup=setup, per_second=rate, **{**given, **fields})


SOURCE = ModelSource(reference="m", directory=None, config={})
ENTRANTS = RaceRequest(
    contest=Contest(task="encode", source=SOURCE, asked="", pad=0, batches=(256, 512), hint="latency"),
    setups=(), sample=Path("s"), reference=Path("r"),
)  # fmt: skip


def engines(runs: list[Run]) -> list[tuple[str, int]]:
    return [(run.setup.engine, run.setup.batch) for run in runs]


def test_those_that_are_near_run_again_each_with_its_best_batch() -> None:
    near = [ran("openvino", 98.0), ran("openvino", 99.0, batch=512), ran("ctranslate2", 100.0), ran("onnxruntime", 80.0)]
    assert engines(finalists(near, "exact")) == [("ctranslate2", 256), ("openvino", 512)]
    assert finalists([ran("openvino", 100.0), ran("ctranslate2", 80.0)], "exact") == []
    assert finalists([ran("openvino", 100.0), ran("openvino", 99.0, batch=512)], "exact") == []
    wrong = ran("ctranslate2", 100.0, largest_difference=1.0)
    assert finalists([ran("openvino", 100.0), wrong, ran("onednn", 100.0, stopped="time")], "exact") == []
    compiled = ran("torch-compiled", 100.0)
    assert finalists([compiled, ran("openvino", 99.0), ran("ctranslate2", 80.0)], "exact") == []
    many = [ran(engine, 100.0) for engine in ("openvino", "ctranslate2", "onednn", "onnxruntime", "torch")]  # type: ignore[arg-type]
    assert len(finalists(many, "exact")) == MAX_FINALISTS


def test_they_run_in_turn_and_the_middle_turn_counts() -> None:
    rates = {"openvino": iter((90.0, 120.0, 119.0)), "ctranslate2": iter((130.0, 100.0, 101.0))}
    order: list[str] = []

    def again(entrants: RaceRequest) -> Iterator[Run | Skipped]:
        (setup,) = entrants.setups
        order.append(setup.engine)
        assert entrants.contest.batches == (setup.batch,) and 0.0 < entrants.seconds <= FINAL_SECONDS
        yield ran(setup.engine, next(rates[setup.engine]), batch=setup.batch)

    near = [ran("openvino", 100.0, batch=512, forecast_per_second=7.0), ran("ctranslate2", 99.0)]
    first, second = run_final(near, ENTRANTS, again, seconds=1e9)
    assert order == ["openvino", "ctranslate2"] * FINAL_TURNS
    assert (first.setup, first.per_second, first.forecast_per_second) == (near[0].setup, 119.0, 7.0)
    assert (second.setup, second.per_second) == (near[1].setup, 101.0)


@pytest.mark.parametrize("seconds", [-1.0, 1.0])
def test_without_time_for_all_nobody_runs(seconds: float) -> None:
    def again(entrants: RaceRequest) -> Iterator[Run | Skipped]:
        raise AssertionError(entrants.setups)

    assert run_final([ran("openvino", 100.0), ran("ctranslate2", 99.0)], ENTRANTS, again, seconds=seconds) == []


def test_a_turn_that_time_cut_off_does_not_count_and_a_failure_does() -> None:
    def cut(entrants: RaceRequest) -> Iterator[Run | Skipped]:
        yield Skipped(setup=entrants.setups[0], reason="time")

    def fails(entrants: RaceRequest) -> Iterator[Run | Skipped]:
        setup = entrants.setups[0]
        yield Run(setup=setup, failure="killed") if setup.engine == "openvino" else ran("ctranslate2", 99.0)

    near = [ran("openvino", 100.0), ran("ctranslate2", 99.0)]
    assert [run.failure for run in run_final(near, ENTRANTS, fails, seconds=1e9)] == ["killed", None]
    assert run_final(near, ENTRANTS, cut, seconds=5.0) == []
