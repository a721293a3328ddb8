"""The report page: complete in one file, harmless whatever its texts say, honest about what is unknown or left out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_elements import Elements

from upshift.errors import RequestError
from upshift.planning.analysis.explain import Reason
from upshift.reports.plots import MAX_DRAWN, Candidate, frontier, placed_candidates
from upshift.reports.run.charts import MAX_POINTS, candidate_plot, loss_figure, memory_figure, moving_mean
from upshift.reports.run.content import (
    ComparisonRow,
    Fact,
    LossCurve,
    MemoryHistory,
    MemorySample,
    PredictionRow,
    RunPage,
    Sample,
)
from upshift.reports.run.page import run_page_html, write_run_page
from upshift.value import Value

HOSTILE = "</script><script>boom()</script><img src=https://x.test/a onerror='boom()'>\"&{{%{x}}}\u2028"
PLOT_IDS = {"plot-candidates", "plot-memory", "plot-loss"}


def full_page(words: str = "words") -> RunPage:
    """A page with something in every section, and ``words`` wherever a text can stand."""
    memory = [
        MemorySample(seconds=at, phase=phase, parts={"weights": 0.5, words: 0.1 * at}, resident_gib=1 + at / 9)
        for at, phase in enumerate(["load", words, "steady", "steady", "save"])
    ]
    return RunPage(
        title=words,
        summary=words,
        facts=(Fact(label=words, text=words),),
        comparison=(
            ComparisonRow(plan="default", role="default", tokens_per_second=1000.0, peak_gib=4.0, held_out_loss=3.0),
            ComparisonRow(plan=words, role="chosen", tokens_per_second=2500.0, peak_gib=2.0, held_out_loss=3.01),
        ),
        predictions=(PredictionRow(quantity=words, unit=words, predicted=2.1, measured=2.0),),
        reasons=(Reason(choice=words, value=words, why=words, runner_up=words, runner_up_cost=words),),
        candidates=(
            Candidate(label=words, status="chosen", tokens_per_second=2600.0, peak_gib=2.1,
                      measured_tokens_per_second=2500.0, measured_peak_gib=2.0),
            Candidate(label="slow", tokens_per_second=900.0, peak_gib=1.0, changes_mathematics=True),
            Candidate(label="big", status="rejected", reason=words, tokens_per_second=3000.0, peak_gib=90.0),
        ),
        memory_limit_gib=8.0,
        memory=MemoryHistory(samples=tuple(memory), predicted_peak_gib=1.4),
        loss_curves=(LossCurve(name=words, training=((1, 9.0), (2, None), (3, 7.5)), held_out=((3, 7.7),)),),
        samples=(Sample(prompt=words, text=words),),
        commands=(words,),
        environment=(Fact(label=words, text=words),),
        flop_convention=words,
    )  # fmt: skip


@pytest.fixture(scope="module")
def hostile() -> Elements:
    return Elements(run_page_html(full_page(HOSTILE)))


def test_loads_nothing_from_anywhere(hostile: Elements) -> None:
    for tag, attributes in hostile.elements:
        assert tag not in ("iframe", "object", "embed", "img", "base")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith(("#", "data:"))
        assert not [name for name in attributes if name.startswith("on")]
    assert ("meta", "default-src 'none'") in [
        (tag, (attributes.get("content") or "").split(";")[0]) for tag, attributes in hostile.elements
    ]


def test_hostile_words_are_shown_and_never_run(hostile: Elements) -> None:
    assert hostile.words.count(HOSTILE) > 12
    figures, library, drawing = hostile.scripts
    assert "boom" not in library + drawing
    assert set(json.loads(figures)) == PLOT_IDS
    assert "<script" not in figures and "</" not in figures
    for figure in json.loads(figures).values():
        for trace in figure["data"]:
            assert "<script" not in json.dumps([trace.get("name"), trace.get("text")])
            assert HOSTILE not in trace.get("hovertemplate", "")


def test_plotting_library_is_inlined_once() -> None:
    page = run_page_html(full_page())
    assert page.count("* plotly.js v") == 1
    assert "boom" not in page


def test_page_is_accessible(hostile: Elements) -> None:
    tags = [tag for tag, _ in hostile.elements]
    assert tags.count("h1") == 1 and tags.count("title") == 1
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert ("html", {"lang": "en"}) in hostile.elements
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in hostile.elements if tag == "th")
    plots = [attributes for _, attributes in hostile.elements if attributes.get("class") == "plot"]
    assert {one["id"] for one in plots} == PLOT_IDS
    assert all(one["role"] == "img" and one["aria-label"] for one in plots)


def test_empty_page_says_why_each_section_is_empty() -> None:
    page = run_page_html(RunPage(title="Nothing yet", summary=""))
    assert page.count('class="empty"') == 9
    assert "<script" not in page
    assert "None" not in page and "nan" not in page.replace("tenance", "")
    assert len(page) < 20_000


def test_missing_numbers_are_unknown_and_not_compared() -> None:
    rows = (ComparisonRow(plan="a", role="default"), ComparisonRow(plan="b", role="chosen", tokens_per_second=5.0))
    peak, zero = (PredictionRow(quantity="peak", predicted=1.0, measured=measured) for measured in (None, 0.0))
    run = RunPage(title="t", summary="s", comparison=rows, predictions=(peak, zero))
    page = Elements(run_page_html(run)).words
    # Nine cells of the comparison, the measured peak and two errors, the FLOP convention.
    assert page.count("unknown") == 9 + 3 + 1
    assert "\N{MULTIPLICATION SIGN}" not in page


def test_ratios_are_against_the_plain_default() -> None:
    words = Elements(run_page_html(full_page())).words
    assert "2.50 \N{MULTIPLICATION SIGN}" in words
    assert "0.50 \N{MULTIPLICATION SIGN}" in words
    assert "+0.010" in words
    assert "+5.0 %" in words


def test_frontier_holds_the_fastest_plan_of_every_memory_size() -> None:
    points = placed_candidates([
        Candidate(label=label, status=status, tokens_per_second=speed, peak_gib=peak)
        for label, status, speed, peak in (("a", "candidate", 5.0, 1.0), ("b", "candidate", 4.0, 2.0),
                                           ("c", "tried", 9.0, 3.0), ("d", "rejected", 99.0, 1.0),
                                           ("e", "candidate", 9.0, 4.0), ("f", "candidate", 6.0, 1.0))
    ])  # fmt: skip
    assert [point.candidate.label for point in frontier(points)] == ["f", "c"]


def test_thinning_keeps_tried_and_frontier_and_is_said() -> None:
    many = [
        Candidate(label=f"p{index}", tokens_per_second=1.0 + index * 7919 % 10_007, peak_gib=1.0 + index * 31 % 997)
        for index in range(20_000)
    ]
    many[5] = many[5].changed(status="tried")
    drawing = candidate_plot(many, limit_gib=None)
    assert drawing.num_predicted == 20_000
    assert drawing.num_drawn <= MAX_DRAWN * 1.1
    page = run_page_html(RunPage(title="t", summary="s", candidates=tuple(many)))
    assert f"Of 20,000 plans {drawing.num_drawn:,} are drawn" in page
    assert drawing.figure is not None
    texts = "".join("".join(trace.get("text", [])) for trace in drawing.figure["data"])
    assert all(f"<b>{label}</b>" in texts for label in ["p5", *(p.candidate.label for p in frontier(placed_candidates(many)))])


def test_long_series_keep_their_peaks_and_ends() -> None:
    samples = [MemorySample(seconds=at, phase="steady", parts={"weights": 1.0}) for at in range(10_000)]
    samples[4321] = samples[4321].changed(parts={"weights": 7.0})
    figure = memory_figure(MemoryHistory(samples=tuple(samples)), limit_gib=None)
    assert figure is not None
    assert max(figure["data"][0]["y"]) == 7.0 and len(figure["data"][0]["y"]) <= MAX_POINTS
    points = tuple((float(at), 1.0) for at in range(10_000))
    drawn = loss_figure([LossCurve(name="a", training=points)])
    assert drawn is not None
    assert all(trace["x"][-1] == 9999.0 and len(trace["x"]) <= MAX_POINTS + 1 for trace in drawn["data"])


@given(st.lists(st.tuples(st.floats(0, 1e9), st.none() | st.floats(-1e6, 1e6)), max_size=60))
def test_moving_mean_stays_within_the_curve(points: list[tuple[float, float | None]]) -> None:
    known = [y for _, y in points if y is not None]
    smooth = [y for _, y in moving_mean(points, share=0.3)]
    assert len(smooth) == len(known)
    assert all(y is not None and min(known) - 1e-3 <= y <= max(known) + 1e-3 for y in smooth)


NUMBERS = st.none() | st.floats(0, 1e15)
POINTS = st.lists(st.tuples(st.floats(0, 1e15), st.none() | st.floats(-1e6, 1e6)), max_size=5)


def with_numbers(kind: type[Value], **parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists of a value whose numbers are any finite ones; ``parts`` for the fields that are no text and no number."""
    numbers = [name for name, field in kind.model_fields.items() if "loat" in str(field.annotation)]
    return st.lists(st.builds(kind, **{**dict.fromkeys(numbers, NUMBERS), **parts}), max_size=4)


PAGES = st.builds(
    RunPage,
    comparison=with_numbers(ComparisonRow),
    predictions=with_numbers(PredictionRow),
    candidates=with_numbers(Candidate),
    memory_limit_gib=NUMBERS,
    memory=st.builds(
        MemoryHistory,
        samples=with_numbers(
            MemorySample, seconds=st.floats(0, 1e15), parts=st.dictionaries(st.text(), st.floats(0, 1e15), max_size=3)
        ),
        predicted_peak_gib=NUMBERS,
    ),
    loss_curves=with_numbers(LossCurve, training=POINTS, held_out=POINTS),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(PAGES)
def test_any_page_survives_json_and_can_be_written_down(page: RunPage) -> None:
    assert RunPage.from_json(page.to_json()) == page
    before_library = run_page_html(page).split("<script>")[0]
    elements = Elements(before_library)
    assert {"run", "comparison", "prediction", "reasons", "plans", "memory", "loss", "text", "repeat"} <= elements.ids()
    assert set(json.loads(elements.scripts[0] if elements.scripts else "{}")) == PLOT_IDS & elements.ids()


def test_unwritable_path_is_a_request_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot write"):
        write_run_page(tmp_path / "file" / "page.html", RunPage(title="t", summary="s"))
    write_run_page(tmp_path / "new" / "page.html", RunPage(title="t", summary="s"))
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_importing_the_page_loads_no_heavy_library() -> None:
    code = "import sys, upshift.reports.run.page; print([m for m in ('torch', 'plotly', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


@pytest.mark.parametrize("limit", [3.0, 200.0])
def test_the_axis_ends_where_plans_end(limit: float) -> None:
    """A limit near the plans is a line in the picture. One far from all of them is named at the edge, and stretches no axis."""
    plans = [Candidate(label=str(size), tokens_per_second=100.0 * size, peak_gib=float(size)) for size in (1, 2)]
    drawing = candidate_plot(plans, limit_gib=limit).figure["layout"]
    is_near = limit < 10
    assert bool(drawing.get("shapes")) is is_near and ("type" in drawing["xaxis"]) is False
    (note,) = drawing["annotations"]
    assert f"{limit:.2f} GiB" in note["text"] and ("further right" in note["text"]) is not is_near
