"""A comparison says "faster" where that is so, and of the same thing twice hardly ever, whatever the noise is like."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import upshift
from upshift.benchmarking.ab_test import orders
from upshift.benchmarking.significance import CLAIM, interval, least_rounds, rounds_to_settle, verdict
from upshift.cli.main import app
from upshift.errors import JobFailed, RequestError

Noise = Callable[[random.Random], Iterator[float]]


def log_normal(rng: random.Random) -> Iterator[float]:
    while True:
        yield rng.gauss(0, 0.02)


def drifting(rng: random.Random) -> Iterator[float]:
    """A machine that others use: its speed wanders, and what comes second of a round is 1 % slower."""
    level, second = 0.0, False
    while True:
        level = 0.95 * level + rng.gauss(0, 0.03)
        yield level + rng.gauss(0, 0.01) + 0.01 * second
        second = not second


def with_outliers(rng: random.Random) -> Iterator[float]:
    while True:
        yield rng.gauss(0, 0.01) + (rng.random() < 0.1) * rng.uniform(0.2, 1.5)


def of_two_speeds(rng: random.Random) -> Iterator[float]:
    """Where the memory of a process lies makes it 3 % slower, or not."""
    while True:
        yield rng.choice((0.0, 0.03)) + rng.gauss(0, 0.002)


NOISES: tuple[Noise, ...] = (log_normal, drifting, with_outliers, of_two_speeds)


def rounds_of(noise: Noise, rng: random.Random, *, rounds: int, effect: float) -> list[float]:
    """Log ratios B / A of a comparison in which B takes ``1 + effect`` times as long."""
    stream, logs = noise(rng), []
    for order in orders(rounds, seed=rng.randrange(2**32)):
        took = {name: next(stream) for name in order}
        logs.append(took["B"] + math.log1p(effect) - took["A"])
    return logs


@pytest.mark.parametrize("noise", NOISES)
def test_the_same_twice_is_no_difference(noise: Noise) -> None:
    rng, comparisons = random.Random(12), 3000
    wrong = sum(
        verdict(interval(rounds_of(noise, rng, rounds=12, effect=0), confidence=CLAIM)) in ("faster", "slower")
        for _ in range(comparisons)
    )
    assert wrong <= 0.0015 * comparisons  # promised: 0.001. 20 of 20 are refused in 98 of 100 repetitions, or more


@pytest.mark.parametrize("noise", NOISES)
def test_five_percent_are_found(noise: Noise) -> None:
    """In 12 rounds, or in as many more as the comparison itself asks for, twice at most."""
    rng, found = random.Random(5), 0
    for _ in range(60):
        logs = rounds_of(noise, rng, rounds=12, effect=0.05)
        for _ in range(2):
            if verdict(interval(logs, confidence=CLAIM)) == "not decided":
                more = rounds_to_settle(logs, confidence=CLAIM)
                logs += rounds_of(noise, rng, rounds=min(more, 150), effect=0.05)
        outcome = verdict(interval(logs, confidence=CLAIM))
        assert outcome != "slower"
        found += outcome == "faster"
    assert found >= 54


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=45), st.sampled_from((0.9, 0.95, CLAIM)))
@settings(max_examples=60, deadline=None)
def test_an_interval_holds_its_value_and_turns_with_the_names(logs: list[float], confidence: float) -> None:
    found, turned = interval(logs, confidence=confidence), interval([-one for one in logs], confidence=confidence)
    assert (found.low is None) == (len(logs) < least_rounds(confidence)) == (found.high is None)
    assert turned.value == pytest.approx(-found.value)
    if found.low is not None and found.high is not None:
        assert found.low <= found.value <= found.high
        assert turned.low == pytest.approx(-found.high) and turned.high == pytest.approx(-found.low)
    opposite = {"faster": "slower", "slower": "faster"}
    assert verdict(turned) == opposite.get(verdict(found), verdict(found))


def test_known_intervals() -> None:
    """Order statistics of Hollander, Wolfe and Chicken's table: of 12 rounds at 95 %, means 14 and 65 of 78."""
    logs = [float(2**number) for number in range(12)]
    means = sorted((one + other) / 2 for number, one in enumerate(logs) for other in logs[number:])
    found = interval(logs, confidence=0.95)
    assert (found.low, found.high) == (means[13], means[64])
    assert [least_rounds(one) for one in (0.75, 0.95, CLAIM)] == [3, 6, 11]


def test_what_is_said() -> None:
    assert verdict(interval([0.05 + 0.001 * number for number in range(12)], confidence=CLAIM)) == "faster"
    assert verdict(interval([0.05] * 10, confidence=CLAIM)) == "not decided"  # ten that agree are too few for 99.9 %
    assert rounds_to_settle([0.05] * 10, confidence=CLAIM) == 1
    assert verdict(interval([0.002] * 12, confidence=CLAIM)) == "alike"  # sure, and nothing


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planted.py").write_text("def less():\n    return 100\n\n\ndef more():\n    return 105\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_functions(work: Path) -> None:
    """Counted, not timed: whatever else runs here."""
    found = upshift.compare("planted:less", "planted:more", measure="result", rounds=6, confidence=0.95)
    assert found.verdict == "faster" and found.ratio == pytest.approx(1.05) and found.rounds_to_settle is None
    assert found.a.seconds.p20 <= found.a.seconds.p50 <= found.a.seconds.p80 and found.a.seconds.num_samples == 6
    assert str(found) == "A's is less: B's is 1.050 times A's (1.050 to 1.050 at 95 %, 6 rounds)"
    first, second = found.records(upshift.describe("h100"))
    assert first.name == "compare/A" and first.baseline == second.measured and first.details["samples"] == [100.0] * 6
    assert upshift.Record.from_json(first.to_json()) == first


def test_commands_and_more_rounds(work: Path) -> None:
    same = [sys.executable, "-Sc", "print(7)"]
    seen: list[int] = []
    found = upshift.compare(
        same, same, measure="result", rounds=2, max_rounds=5, confidence=0.9, on_sample=lambda number, *_: seen.append(number)
    )
    assert max(seen) == 4 and found.rounds == 5 and found.verdict == "not decided" and found.low is None
    assert found.rounds_to_settle == 1 and "about 1 more rounds would settle it" in str(found)


def test_refusals(work: Path) -> None:
    with pytest.raises(RequestError, match="'no-such-program' is not a program"):
        upshift.compare("no-such-program --fast", "true")
    with pytest.raises(RequestError, match="cannot be found by a fresh process"):
        upshift.compare(lambda: None, "true")
    with pytest.raises(RequestError, match="confidence of 95"):
        upshift.compare("true", "true", confidence=95)
    with pytest.raises(RequestError, match="--max-rounds 3 is below --rounds 12"):
        upshift.compare("true", "true", max_rounds=3)
    for name, said in (
        ("planted:nothing", "planted has no nothing; give module:function"),
        ("planted.py:nothing", "planted.py has no nothing"),
        ("absent:function", "there is no module absent"),
        ("absent.py:function", "there is no file absent.py"),
    ):
        with pytest.raises(RequestError, match=f"{name} is no function: {said}"):
            upshift.compare(name, "true")
    (work / "needy.py").write_text("import absent\n")
    with pytest.raises(JobFailed, match="No module named 'absent'"):
        upshift.compare("needy:function", "true")
    with pytest.raises(JobFailed, match="took longer than 0.2 s"):
        upshift.compare("sleep 5", "true", timeout_seconds=0.2)
    with pytest.raises(JobFailed, match="A gave no result to compare"):
        upshift.compare("true", "true", measure="result", rounds=1)


def test_a_folder_that_takes_no_rows_is_refused_before_the_first_round(work: Path) -> None:
    asked = ["bench", "compare", "true", "true", "--rounds", "1", "--results"]
    result = CliRunner().invoke(app, [*asked, str(work / "planted.py")])
    assert isinstance(result.exception, RequestError) and "--results" in str(result.exception)
    result = CliRunner().invoke(app, [*asked, str(work / "new" / "rows")])
    assert result.exit_code == 0 and len((work / "new" / "rows" / "compare.jsonl").read_text().splitlines()) == 2
