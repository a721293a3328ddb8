"""The tables of ``upshift plan`` at 80 and 120 columns: no name is cut or broken, and rows that say the same are one."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace

import pytest
from made_up_plans import made_up_planning

from upshift.cli import tables
from upshift.cli.plan import command, ranking
from upshift.planning.cost.memory import MEMORY_PARTS
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate
from upshift.record import Basis

HOSTS = {"8xa100-40gb": 32, "epyc-9654-768gb": 4}
PLANNINGS = {host: made_up_planning(on=host, global_batch=batch) for host, batch in HOSTS.items()}


def printed(planning: Planning, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    file = io.StringIO()
    monkeypatch.setattr(tables, "out", tables.new_console(file=file, width=width))
    command._print_planning(planning, None, rows=5)
    return file.getvalue()


def with_best(planning: Planning, candidate: Candidate) -> Planning:
    ranking = replace(planning.ranking, candidates=[candidate, *planning.ranking.candidates[1:]])
    return replace(planning, ranking=ranking)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("host", HOSTS)
def test_names_are_whole_and_lines_fit(host: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planning = PLANNINGS[host]
    lines = printed(planning, width, monkeypatch).splitlines()
    words = re.findall(r"\S+", " ".join(lines))
    assert max(map(len, lines)) <= width and "…" not in "".join(words)
    memory = planning.numbers(planning.ranking.candidates[0]).memory
    for name in (*memory, *(part for part in MEMORY_PARTS if any(row.get(part, 0.0) > 0.01 for row in memory.values()))):
        assert {*name.split()} <= {*words}, name
    header = next(line for line in lines if "tok/s" in line).split()
    assert {"tok/s", "step", "held"} <= {*header}
    assert "resv." not in header or "a100" in host
    assert width < 120 or {"alloc.", "bound"} <= {*header}


@pytest.mark.parametrize("width", [80, 120])
def test_large_numbers_fit(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planning = PLANNINGS["8xa100-40gb"]
    best = planning.ranking.candidates[0]
    terms = {name: 1000 * seconds for name, seconds in best.time.terms.items()}
    large = replace(best, tokens_per_second=9_876_543.0, time=replace(best.time, terms=terms), resident=1234.5 * 2**30)
    text = printed(with_best(planning, large), width, monkeypatch)
    assert "9,876,543" in text and "1234.50" in text and "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_rows_that_say_the_same_are_one() -> None:
    candidates = PLANNINGS["8xa100-40gb"].ranking.candidates
    rows = ranking.folded_rows(candidates, rows=5)
    assert len(rows) == 5 and rows[0][1] is candidates[0]
    for (_, first, _), (_, other, _) in itertools.combinations(rows, 2):  # told apart by time or memory
        ratios = (
            other.time.total / first.time.total, other.tokens_per_second / first.tokens_per_second,
            other.memory.peak / first.memory.peak, other.resident / first.resident,
        )  # fmt: skip
        assert any(abs(ratio - 1) > 0.01 for ratio in ratios)


def test_twins_of_the_best_are_folded_and_others_are_not() -> None:
    best = PLANNINGS["8xa100-40gb"].ranking.candidates[0]
    twin = replace(best, plan=best.plan.model_copy(update={"precision": "fp16"}))
    of_both = replace(best, plan=best.plan.model_copy(update={"precision": "fp16", "optim": "adamw_torch"}))
    slower = replace(twin, tokens_per_second=0.98 * best.tokens_per_second)
    larger = replace(twin, resident=1.02 * best.resident)
    assert [row[2] for row in ranking.folded_rows([best, twin, of_both], rows=5)] == [2]
    assert [row[0] for row in ranking.folded_rows([best, larger, slower], rows=5)] == ["1", "2", "3"]
    assert [row[:1] + row[2:] for row in ranking.folded_rows([best, larger, twin], rows=1)] == [("1", 1)]


def test_each_number_says_how_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    planning = PLANNINGS["epyc-9654-768gb"]
    held = Basis(tier="transferred", interval=(0.95, 1.05), num_records=7)
    known = replace(planning.ranking.candidates[0], bases={"step": Basis(tier="measured", interval=(0.9, 1.1)), "held": held})
    text = printed(with_best(planning, known), 80, monkeypatch)
    assert " mft" in text and "Held: corrected by other runs here (7 runs); expect 0.95x to 1.05x" in text
    assert "m measured here; t corrected by other runs here; f formula" in " ".join(text.split())


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    planning = PLANNINGS["8xa100-40gb"]
    monkeypatch.setattr(type(planning.job_memory), "describe_problems", lambda self, one: ("its step fits, load does not",))
    text = printed(planning, 120, monkeypatch)
    assert "The plain default: its step fits, load does not" in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_plain_default_that_does_not_fit_shows_no_speed(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planning = PLANNINGS["8xa100-40gb"]

    def plain_row(default: Candidate) -> str:
        text = printed(replace(planning, default=default), width, monkeypatch)
        return text.partition("The plain default")[2].partition("Its step")[0]

    fitting = planning.ranking.candidates[0]
    too_large = planning.default
    assert too_large.resident > 40 * 2**30 > fitting.resident
    assert f"{fitting.tokens_per_second:,.0f}" in plain_row(fitting)
    row = plain_row(too_large)
    assert f"{too_large.tokens_per_second:,.0f}" not in row and f"{too_large.resident / 2**30:.2f}" in row
    assert "does not fit" in row
