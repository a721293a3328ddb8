"""The benchmark cases run from end to end on tiny settings, and their comparisons can tell a gain from noise."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import sys
import tempfile
from collections.abc import Callable
from math import exp, expm1
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from warm_processes import WarmProcesses

from upshift.benchmarking import harness
from upshift.benchmarking.ab_test import ratio, relative_error
from upshift.benchmarking.claims import find_case
from upshift.benchmarking.harness import format_table, interleave, read_rows, run_fresh
from upshift.errors import JobFailed, RequestError
from upshift.hardware import detect
from upshift.planning.cost.uncertainty import GPU_STEP_INTERVALS
from upshift.planning.inference.plan import PROGRAMS
from upshift.planning.inference.time import StepTime
from upshift.planning.search.simplicity import MECHANISM_ERROR, PAIR_ERROR
from upshift.record import Record

CHEAP = ("--set", "torch_compile=off", "--set", "precision=fp32", "--set", "attention=sdpa")  # little is traced
ROOT = Path(__file__).parents[3]
CASES = ROOT / "benchmarks" / "cases"


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(CASES))
    return importlib.import_module


@pytest.fixture
def forked_runs(warm_processes: WarmProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the runs of a case as forks: for cases whose memory a test does not compare."""
    monkeypatch.setattr(harness, "subprocess", warm_processes)


def run(module: ModuleType, results: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The case's last line. It must have succeeded."""
    assert module.main(["--quick", "--results", str(results), *options]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return answer


def check_rows(path: Path) -> list[Record]:
    rows = read_rows(path)
    assert rows
    for row in rows:
        assert row.kind == "benchmark"
        assert row.details["quick"] is True
        assert row.environment.versions["torch"]
        assert row.measured is not None or row.failure is not None or row.name.endswith("/summary")
    return rows


def test_load(case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = ("--rounds", "1", "--settings", "bf16", "--caches", "cold", "--contenders", "dd,upshift", "--scratch", str(tmp_path))
    answer = run(case("load"), tmp_path, capsys, *one)
    rows = check_rows(tmp_path / "load.jsonl")
    assert [row.name for row in rows] == ["load/bf16, cold/dd", "load/bf16, cold/upshift"]
    ours = answer["results"]["bf16, cold/upshift"]
    assert ours["load"] > 0 and ours["first forward"] > 0 and ours["checksum"] > 0
    assert rows[1].details["over_dd"] > 0 and (rows[1].measured.resident_gib or 0) > 0  # type: ignore[union-attr]


def test_memory(
    case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "accuracy.md"
    module = case("memory")
    monkeypatch.setattr(module, "TRIAL_SECONDS", 0.5)  # memory does not depend on it
    answer = run(module, tmp_path, capsys, "--write", str(page))
    *rows, summary = check_rows(tmp_path / "memory.jsonl")
    precisions = 1 if detect().supports("bf16") is False else 2
    metered = module.metered(rows)  # beside other work a trial may be too slow for the meter
    assert answer["rows"] == len(rows) == 2 * precisions and answer["failed"] == len(rows) - len(metered) < len(rows)
    for row in metered:
        error = row.prediction_error("peak_gib")
        assert error is not None and abs(error) < 0.02, row.plan
        assert row.measured is not None and (row.measured.resident_gib or 0) > (row.measured.peak_gib or 0)
    assert summary.name == "memory/summary" and summary.details["errors"] == answer["errors"]
    assert "benchmarks/cases/memory.py --write" in page.read_text() and page.read_text().count("| tiny ") == 1 + len(metered)


def test_the_page_of_accuracy_is_what_the_rows_say(case: Callable[[str], ModuleType]) -> None:
    memory = case("memory")
    rows = read_rows(ROOT / "benchmarks" / "results" / "memory.jsonl")
    assert memory.page(memory.newest(rows)) == (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")


def test_attention(
    case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = case("attention")
    monkeypatch.setattr(module, "keep_freed_memory", lambda: None)  # it would hold for every test after this one
    assert len(run(module, tmp_path, capsys, "--rounds", "3")["sdpa_over_block"]) == 2
    assert len(check_rows(tmp_path / "attention.jsonl")) == 4


def test_head(case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, masked = run(case("head"), tmp_path, capsys, "--rounds", "3")["shapes"]
    assert plain["relative_difference"] < 1e-5 and masked["relative_difference"] < 1e-2
    assert masked["chunked_over_plain_memory"]["with"] < plain["chunked_over_plain_memory"]["with"] < 0.5
    assert len(check_rows(tmp_path / "head.jsonl")) == 4


def test_guides(case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the compiled pair and the quantized weights, which other tests run, and which take 20 s."""
    times = run(case("guides"), tmp_path, capsys, "--only", "checkpointing,accumulation")["times"]
    assert len(times) == 2 and min(times.values()) > 0
    first, second = check_rows(tmp_path / "guides.jsonl")
    assert first.details["verdict"] == "not decided" and second.baseline is not None  # two rounds


def test_planted(case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run(case("planted"), tmp_path, capsys)
    assert answer["false"] == {"right": 1.0, "not decided": 1} and answer["true"] == {"right": 0.0, "not decided": 1}
    assert len(check_rows(tmp_path / "planted.jsonl")) == 4


def test_startup(case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run(case("startup"), tmp_path, capsys, "--rounds", "1")
    assert len(check_rows(tmp_path / "startup.jsonl")) == 5
    assert 0 < answer["medians_ms"]["python"] < answer["medians_ms"]["plan, cached"]


def test_published_inference(case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = case("published_inference")
    said = run(module, tmp_path, capsys)
    details = json.loads((tmp_path / "published_inference.jsonl").read_text())["details"]
    assert details["speed"]["all"]["rows"] == details["speed"]["held out"]["rows"] + details["speed"]["fitted on"]["rows"]
    assert sum(one["rows"] for one in details["models"].values()) == details["speed"]["all"]["rows"] and -1 <= said["tau"] <= 1
    twice = [module.Score({"model": name}, "tokens/s", ours, 1.0) for name, ours in (("a", 1.5), ("a", 0.9), ("b", 2.0))]
    found = module.summaries(module.grouped(twice, lambda score: score.row["model"]))
    assert list(found) == ["b", "a"] and found["a"]["mean"] == pytest.approx(0.3) and found["a"]["bias"] == pytest.approx(0.2)


def test_a_source_is_judged_by_factors_that_did_not_see_it(case: Callable[[str], ModuleType]) -> None:
    """What a source measured changes its own ratios by as much, and the factors of the others; of training as of inference."""
    module, inference = case("leave_one_out"), case("leave_one_out_inference")
    terms = {"matrix products": 1.0, "attention": 0.2, "memory traffic": 0.4, "update": 0.1}
    for make, judge in (
        (lambda source, measured: module.Row(source, (8, 0), 100.0, measured, terms), module.left_out_ratios),
        (
            lambda source, measured: inference.Row(source, 100.0, measured, StepTime(weights=1.0, products=0.5, launches=0.1)),
            inference.left_out_ratios,
        ),
    ):
        before = judge([make("a", 100.0), make("b", 80.0), make("c", 90.0)])
        after = judge([make("a", 50.0), make("b", 80.0), make("c", 90.0)])
        assert after["a"][0] == pytest.approx(2.0 * before["a"][0])
        assert after["b"][0] < before["b"][0]  # the others are known to be slower now
    own = module.Row("a", (8, 0), 100.0, 100.0, terms)
    slow = module.Row("b", (8, 0), 100.0, 20.0, terms)
    fitted = module.left_out_ratios([own, slow])["a"][0]
    unfitted = module.left_out_ratios([own, slow._replace(is_limited=True)])["a"][0]
    assert fitted < unfitted == pytest.approx(own.ratio(module.unseen_factors("a")))


def test_printed_intervals_are_those_of_the_errors(case: Callable[[str], ModuleType]) -> None:
    """Of training they are computed from the published rows, of inference they stand in the row of the last run."""
    module = case("leave_one_out")
    ratios = module.left_out_ratios(module.read_rows())
    for program, printed in GPU_STEP_INTERVALS.items():
        found = module.interval(ratios, module.SAME_FACTS.get(program, program), is_new_kind=False)
        assert found == pytest.approx(printed, abs=0.01), program
    summary = read_rows(module.ROWS.with_name("published_inference.jsonl"))[-1]
    intervals = {program: engine.interval for program, engine in PROGRAMS.items()}
    assert {name: pytest.approx(bounds, abs=0.01) for name, bounds in summary.details["intervals"].items()} == intervals


def test_an_interval_knows_nothing_of_the_source_that_it_judges(case: Callable[[str], ModuleType]) -> None:
    module = case("leave_one_out")
    terms = {"matrix products": 1.0}
    rows = [module.Row(source, (8, 0), 100.0, 100.0, terms) for source in "ab" for _ in range(20)]
    ratios = {"a": [1.1] * 20, "b": [0.9] * 20}
    assert module.covered(rows, ratios) == {"a": [False] * 20, "b": [False] * 20}
    low, high = module.interval(ratios, "any", is_new_kind=False)
    assert low == pytest.approx(0.9) and high == pytest.approx(1.1)
    wider = module.interval(ratios, "any", is_new_kind=True)
    assert wider[0] < low and wider[1] > high


def test_the_errors_of_pairs_are_those_of_the_published_rows(case: Callable[[str], ModuleType]) -> None:
    module = case("published")
    scored = module.read_scored()
    page = (ROOT / "docs" / "accuracy_published.md").read_text(encoding="utf-8")
    for of_mechanisms, error in ((False, PAIR_ERROR), (True, MECHANISM_ERROR)):
        assert module.quantile(module.pair_errors(scored, of_mechanisms=of_mechanisms)) == pytest.approx(error, abs=5e-4)
        assert f"within {module.percent(expm1(error))} of the measured one" in page
    assert module.summary(scored) in page


def test_quick_plans_agree_where_nothing_fits(case: Callable[[str], ModuleType]) -> None:
    answer = case("quick_plans").compare("7B on a watch", "nothing fits", "nothing fits here")
    assert answer["same"] and answer["ratios"] == {}


def test_weak_scaling(case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(case("weak_scaling"), tmp_path, capsys, "--write", str(tmp_path))
    devices = json.loads((tmp_path / "weak_scaling.jsonl").read_text())["details"]["devices"]
    assert list(devices) == ["8", "10,000"] and said["share"] == devices["10,000"]["chosen"] / devices["8"]["chosen"]
    fastest = [max(one["all"], one["node"], one["tensor"]) for one in devices.values()]
    told_apart = exp(-MECHANISM_ERROR)  # of plans whose speeds are nearer, the simplest is chosen
    assert all(one["chosen"] >= told_apart * speed for one, speed in zip(devices.values(), fastest, strict=True))
    assert "10,000" in (tmp_path / "weak_scaling.svg").read_text()


@pytest.mark.usefixtures("forked_runs")
def test_suite(case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A case's rows go to their own folder, and one that has no time left is named."""
    rows = tmp_path / "rows"
    answer = run(case("suite"), tmp_path, capsys, "--only", "planted", "--rows", str(rows))
    assert answer["ended"] == 1 and len(check_rows(rows / "planted.jsonl")) == 4
    late = ("--quick", "--results", str(tmp_path), "--only", "planted", "--rows", str(rows), "--minutes", "0")
    assert case("suite").main(list(late)) == 1
    assert "not started: no time was left" in capsys.readouterr().out
    first, summary, missed, _ = read_rows(tmp_path / "suite.jsonl")
    assert first.failure is None and missed.failure and summary.details["cases"]["planted"]["seconds"] > 0


def test_regret_and_twins(case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run(case("regret"), tmp_path, capsys, "--plans", "2", "--budget", "1", *CHEAP)
    rows = check_rows(tmp_path / "regret.jsonl")
    assert [row.name for row in rows].count("regret/drawn") == 2
    assert {"regret/chosen", "regret/default", "regret/summary"} <= {row.name for row in rows}
    twin = answer["chosen_over_default"]  # how far apart is the machine's business, and never gates
    assert twin["value"] > 0 and answer["regret"] >= 0


@pytest.mark.usefixtures("forked_runs")
def test_trainer(
    case: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one package of the standard library in place of all of it: both contenders read every row before the first step."""
    package = Path(asyncio.__file__).parent
    monkeypatch.setattr(case("trainer_data"), "sysconfig", SimpleNamespace(get_paths=lambda: {"stdlib": str(package)}))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # else other runs would take this text's tokenizer
    options = ("--full", "--contenders", "plain,upshift", "--trial-seconds", "1", "--steps", "4", *CHEAP)
    answer = run(case("trainer"), tmp_path, capsys, *options)
    rows = check_rows(tmp_path / "trainer.jsonl")
    assert [row.name for row in rows] == ["trainer/plain", "trainer/upshift", "trainer/summary"]
    assert answer["same_tokens"] and answer["loss_goal_reached"]
    assert answer["largest_step_loss_difference"]["upshift"] < 1e-4  # the plain default, in fp32
    assert answer["ratios"]["upshift/plain tokens_per_second"]["num_rounds"] == 1
    for row in rows[:2]:
        assert row.measured is not None and row.measured.tokens_per_second and row.measured.resident_gib
    with pytest.raises(SystemExit):
        case("trainer").main(["--steps", "3"])


def test_an_order_is_judged_by_pairs_that_differ(case: Callable[[str], ModuleType]) -> None:
    tau = case("scaling").tau
    assert tau([1, 2, 3], [10, 20, 30]) == 1 and tau([3, 2, 1], [10, 20, 30]) == -1
    assert tau([1, 3, 2], [10, 20, 20.2]) == 1  # one percent apart: no order
    assert tau([1, 3, 2], [10, 20, 30]) == pytest.approx(1 / 3)


def test_choice(case: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """What came of a race and of its contestants in turn becomes rows that its claim is read from."""
    module = case("choice")
    folder = tmp_path / "benchmarks"
    (folder / "cases").mkdir(parents=True)
    (folder / "cases/choice.py").write_text((CASES / "choice.py").read_text())
    rows = module.Case("choice", folder / "results", detect(), False, {})
    slow, quick = (json.dumps({"engine": name, "precision": "fp32", "batch": 1}) for name in ("torch", "openvino"))
    race = {"chosen": slow, "forecasts": {"torch fp32": [30.0, 20.0], "openvino fp32": [None, 25.0]}}
    passes = {slow: [1.0, 1.1, 1.3], quick: [0.8, 1.0, 1.1]}
    answers = {setup: [{"seconds": one, "cpu_seconds": one, "others": 0.0} for one in found] for setup, found in passes.items()}
    several = module.row_of(rows, "several", race, answers, 30.0)
    alone = module.row_of(rows, "alone", race, {slow: answers[slow]}, 12.0)
    assert (several["share"], several["forecast"], alone["share"]) == (pytest.approx(1.1 / 1.3), 1.5, 1.0)
    rows.add("summary", plan={}, measured=None, details=module.summary([several, alone]))
    read = find_case("choice", folder / "cases")
    found = {figure.name: read.latest(figure.name) for figure in read.figures}
    assert found == {
        "share": pytest.approx(1.1 / 1.3), "median": pytest.approx(1.1 / 1.3), "workloads": 1, "race-seconds": 30.0,
        "forecast": 1.5,
    }  # fmt: skip


def noisy(rng: random.Random, middle: float, slow_rounds: list[float]) -> list[float]:
    return [middle * slow * rng.lognormvariate(0, 0.02) for slow in slow_rounds]


def test_twins_are_twins_and_a_gain_is_seen() -> None:
    rng, decided, seen, repeats = random.Random(1), 0, 0, 100
    for number in range(repeats):
        rounds = [rng.choice((1.0, 1.0, 3.0)) for _ in range(8)]  # the machine is slow for whole rounds
        one, twin, faster = noisy(rng, 10, rounds), noisy(rng, 10, rounds), noisy(rng, 11, rounds)
        decided += ratio(twin, one, seed=number).is_decided
        seen += ratio(faster, one, seed=number).low > 1
    assert decided <= 10 and seen >= 95


def test_one_round_decides_nothing() -> None:
    alone = ratio([3.0], [1.0])
    assert alone.value == 3 and alone.low is None and alone.high is None and not alone.is_decided
    assert "too few rounds" in str(alone)


def test_ratio_refuses() -> None:
    with pytest.raises(RequestError, match="2 and 1 samples"):
        ratio([1.0, 2.0], [1.0])
    with pytest.raises(RequestError, match="above 0"):
        ratio([1.0], [0.0])
    assert relative_error(1.1, 1.0) == pytest.approx(0.1) and relative_error(None, 1.0) is None


def test_interleave_takes_turns() -> None:
    order: list[str] = []
    results = interleave({name: lambda name=name: order.append(name) or name for name in "AB"}, rounds=2)  # type: ignore[misc]
    assert order == ["A", "B", "A", "B"] and results == {"A": ["A", "A"], "B": ["B", "B"]}


def test_run_fresh() -> None:
    child = "import time; block = bytearray(50_000_000); time.sleep(0.5); print('noise'); print('{\"answer\": 1}')"
    answer = run_fresh([sys.executable, "-c", child], timeout_seconds=30)
    assert answer["answer"] == 1 and answer["tree_resident_bytes"] > 50_000_000
    with pytest.raises(JobFailed, match="division"):
        run_fresh([sys.executable, "-c", "1 / 0"], timeout_seconds=30)
    with pytest.raises(JobFailed, match="longer than"):
        run_fresh([sys.executable, "-c", "import time; time.sleep(30)"], timeout_seconds=0.3)
    with pytest.raises(JobFailed, match="without a JSON line"):
        run_fresh([sys.executable, "-c", "print('hello')"], timeout_seconds=30)


def test_format_table() -> None:
    assert format_table(("a", "b"), [("x", 1), ("yy", None)]).splitlines() == ["a   b", "x   1", "yy"]
    assert format_table(("a", "b"), [("x", 1)], markdown=True).splitlines()[1] == "| --- | ---: |"


def test_watchdogs(case: Callable[[str], ModuleType]) -> None:
    """One process, without the fresh one that the case starts for it."""
    found = case("watchdogs").in_ranks(ranks=1, shape=[32, 1, 1, 16], rounds=2, steps=2)
    assert {*found} == {"plain", "twin", "watchdogs", "noting", "underflow_overflow"}
    assert all(len(seconds) == (4 if name == "noting" else 2) and min(seconds) > 0 for name, seconds in found.items())
