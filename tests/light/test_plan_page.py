"""The page of a planning: complete in one file, harmless whatever a model is called, and all that it draws is also said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from made_up_plans import made_up_planning
from page_elements import Elements

from upshift.cli.plan import ranking
from upshift.errors import RequestError
from upshift.planning.analysis.explain import describe_value
from upshift.planning.cost.pipeline_schedule import simulate
from upshift.planning.planner import Planning
from upshift.reports.document import write_page
from upshift.reports.plan.charts import MAX_DRAWN, MAX_PASSES, draw_plans, num_drawn, schedule_figure
from upshift.reports.plan.page import fastest_pipelined, plan_page_html, write_plan_page
from upshift.reports.plan.what_if_grid import family_grid, is_fitting
from upshift.reports.plan.words import held_gib, limit_gib, memory_by_phase

HOSTILE = "</script><script>boom()</script><img src=https://x.test/a onerror='boom()'>\"&{{%{x}}}\u2028"
PLOTS = {"plot-plans", "plot-memory", "plot-time", "plot-schedule", "plot-family", "plot-family-memory"}
CONTROLS = {"plan-shown", "sequence-length", "micro-batch"}


@pytest.fixture(scope="module")
def planning() -> Planning:
    return made_up_planning(architecture=HOSTILE)


@pytest.fixture(scope="module")
def page(planning: Planning) -> str:
    return plan_page_html(planning, model=HOSTILE)


@pytest.fixture(scope="module")
def elements(page: str) -> Elements:
    return Elements(page)


@pytest.fixture(scope="module")
def figures(elements: Elements) -> dict[str, Any]:
    return json.loads(elements.scripts[0])


def states(value: Any) -> list[dict[str, Any]]:
    """Every choice that a control makes, anywhere in a figure or in words."""
    if isinstance(value, list):
        return [one for part in value for one in states(part)]
    if not isinstance(value, dict):
        return []
    return ([value] if "choices" in value else []) + [one for part in value.values() for one in states(part)]


def test_loads_nothing_from_anywhere(page: str, elements: Elements) -> None:
    for tag, attributes in elements.elements:
        assert tag not in ("iframe", "object", "embed", "img", "base")
        assert "src" not in attributes and "srcset" not in attributes
        assert (attributes.get("href") or "#").startswith(("#", "data:"))
        assert not [name for name in attributes if name.startswith("on")]
    contents = [attributes.get("content") or "" for tag, attributes in elements.elements if tag == "meta"]
    assert any(content.startswith("default-src 'none'") for content in contents)
    assert len(page.encode()) < 6_000_000


def test_hostile_words_are_shown_and_never_run(elements: Elements, figures: dict[str, Any]) -> None:
    assert elements.words.count(HOSTILE) >= 3
    data, words, library, drawing = elements.scripts
    assert "boom" not in library + drawing
    assert "<" not in data + words
    assert set(figures) == PLOTS
    assert set(json.loads(words)) <= elements.ids()


def test_page_is_accessible(elements: Elements) -> None:
    tags = [tag for tag, _ in elements.elements]
    assert tags.count("h1") == 1 and tags.count("title") == 1
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    plots = [attributes for _, attributes in elements.elements if attributes.get("class") == "plot"]
    assert {one["id"] for one in plots} == PLOTS
    assert all(one["role"] == "img" and one["aria-label"] for one in plots)
    controls = {attributes["id"] for _, attributes in elements.elements if "data-control" in attributes}
    assert controls == CONTROLS
    assert {attributes["for"] for tag, attributes in elements.elements if tag == "label"} == CONTROLS
    assert [one["aria-live"] for _, one in elements.elements if "aria-live" in one] == ["polite", "polite"]


def test_the_heading_says_what_was_found(planning: Planning, elements: Elements) -> None:
    best = planning.ranking.candidates[0]
    for words in (f"{best.tokens_per_second:,.0f} tokens per second", f"{held_gib(best):.2f} GiB", best.time.binding_term,
                  "8xa100-40gb", "0.66 to 1.55 times as long", "nothing was run", "running out of memory"):  # fmt: skip
        assert words in elements.words, words
    for reason in planning.reasons:
        assert reason.choice in elements.words
    assert planning.shadow_price is not None
    assert planning.shadow_price[1:] in elements.words


def test_no_reason_is_given_for_what_trials_have_put_aside(planning: Planning) -> None:
    assert planning.reasons_for(planning.best) == planning.reasons
    other = next(one.plan for one in planning.ranking.candidates if one.plan.optim != planning.best.optim)
    kept = {reason.choice: reason.value for reason in planning.reasons_for(other)}
    assert "optim" not in kept and kept
    assert all(describe_value(other, name) == value for name, value in kept.items())


def test_the_picture_holds_the_front_the_best_and_what_is_too_big(planning: Planning, figures: dict[str, Any]) -> None:
    drawing, limit = draw_plans(planning), limit_gib(planning)
    assert limit is not None and planning.ranking.too_big
    traces = figures["plot-plans"]["data"]
    hollow = [trace for trace in traces if trace.get("marker", {}).get("symbol") == "circle-open"]
    assert hollow and all(min(trace["x"]) > limit for trace in hollow)
    (line,) = [trace for trace in traces if trace["name"] == "fastest for its memory"]
    assert len(line["x"]) == len(drawing.front)
    assert line["x"] == sorted(line["x"]) and line["y"] == sorted(line["y"])
    (best,) = [trace for trace in traces if trace["name"] == "best"]
    assert best["y"] == [pytest.approx(planning.ranking.candidates[0].tokens_per_second, rel=1e-5)]
    for trace in traces:
        assert len(trace["x"]) == len(trace["y"]) == len(trace["text"])
        assert all("step" in text and "GiB:" in text for text in trace["text"])
    beats = [
        one for one in planning.ranking.candidates
        if not any(kept.tokens_per_second >= one.tokens_per_second and held_gib(kept) <= held_gib(one) for kept in drawing.front)
    ]  # fmt: skip
    assert beats == []
    assert drawing.num_drawn <= 1.1 * MAX_DRAWN
    assert figures["plot-plans"]["layout"]["annotations"][0]["text"].startswith("memory limit")


def test_bars_add_up(planning: Planning, figures: dict[str, Any]) -> None:
    best = planning.ranking.candidates[0]
    bars = figures["plot-memory"]["data"]["choices"][0]
    for index, row in enumerate(memory_by_phase(planning, best).values()):
        assert sum(trace["y"][index] for trace in bars) == pytest.approx(sum(row.values()), rel=0.01)
    terms = figures["plot-time"]["data"]["choices"][0]
    assert sum(trace["x"][0] for trace in terms) == pytest.approx(best.time.total, rel=0.03)
    assert terms[0]["name"] == f"{best.time.binding_term} (binding)"


def test_every_control_has_as_many_choices_as_states(elements: Elements, figures: dict[str, Any]) -> None:
    sliders = {one["id"]: int(one["max"] or 0) + 1 for _, one in elements.elements if one.get("type") == "range"}
    counts = sliders | {"plan-shown": [tag for tag, _ in elements.elements].count("option")}
    found = states(figures) + states(json.loads(elements.scripts[1]))
    assert {one["by"] for one in found} == CONTROLS
    assert all(len(one["choices"]) == counts[one["by"]] for one in found)
    assert min(counts.values()) > 2


def test_the_grid_holds_the_best_plan_where_it_stands(planning: Planning) -> None:
    grid = family_grid(planning)
    assert grid is not None
    row, column = grid.best
    best, cell = planning.ranking.candidates[0], grid.cells[row][column]
    assert (grid.sequence_lengths[row], grid.micro_batches[column]) == (2048, best.plan.per_device_train_batch_size)
    assert cell.shown.tokens_per_second == pytest.approx(best.tokens_per_second)
    assert cell.shown.resident == pytest.approx(best.resident)
    assert max(grid.sequence_lengths) == planning.profile.max_positions
    for cells in grid.cells:
        for one in cells:
            assert one.fits == is_fitting(one.shown, planning) == any(is_fitting(plan, planning) for plan in one.plans)
            assert one.shown.plan.global_batch == planning.workload.global_batch
    smallest = [cells[0].plans[0].resident for cells in grid.cells]
    assert smallest == sorted(smallest)


def test_lengths_that_were_not_traced_say_so(elements: Elements) -> None:
    lengths = json.loads(elements.scripts[1])["sequence-length-value"]["choices"]
    traced = [words for words in lengths if "extrapolated" not in words]
    assert traced == ["512 tokens", "1,024 tokens", "1,536 tokens", "2,048 tokens"]


def test_the_schedule_is_drawn_whole_or_says_how_much(planning: Planning) -> None:
    candidate = fastest_pipelined(planning)
    assert candidate is not None
    plan = candidate.plan.changed(
        gradient_accumulation_steps=4096,
        layout={**candidate.plan.layout.model_dump(), "pipeline_parallel": 4, "pipeline_schedule": "1f1b", "virtual_stages": 1},
    )
    assert 4 <= num_drawn(plan) < 4096
    drawn = schedule_figure(plan)["data"]
    expected = simulate("1f1b", ranks=4, micro_batches=num_drawn(plan))
    assert sum(len(trace["x"]) for trace in drawn) == len(expected) <= MAX_PASSES
    assert sum(sum(trace["x"]) for trace in drawn) == sum(one.duration for one in expected)


def test_one_device_has_no_schedule() -> None:
    alone = made_up_planning(on="1xh200", global_batch=2)
    found = Elements(plan_page_html(alone, model="some/model"))
    assert set(json.loads(found.scripts[0])) == PLOTS - {"plot-schedule"}
    sections = [attributes["id"] for tag, attributes in found.elements if tag == "section"]
    assert "schedule" not in sections and "#schedule" not in [one.get("href") for _, one in found.elements]
    assert sections == ["request", "plans", "step", "family", "reasons"]  # and nothing was rejected


def test_images_are_counted_as_images(capsys: pytest.CaptureFixture[str]) -> None:
    planning = made_up_planning(on="1xa100-80gb", global_batch=8, objective="image-classification")
    best = planning.ranking.candidates[0]
    assert best.tokens_per_second == pytest.approx(8 / (best.time.total + best.time.one_time / planning.workload.total_steps))
    ranking.print_plans(planning, rows=1)
    printed = capsys.readouterr().out
    assert "images/s" in printed and "tok/s" not in printed
    page = plan_page_html(planning, model="made up")
    assert "global batch 8 images," in page and "images per second" in page
    assert "okens per second" not in page and 'id="sequence-length"' not in page


def test_nothing_is_said_to_fit_memory_that_is_unknown() -> None:
    planning = made_up_planning(on="epyc-9654", global_batch=8)
    page = plan_page_html(planning, model="made up")
    assert "plans fit" not in page and "The memory of epyc-9654 is unknown" in page
    assert planning.shadow_price is None and "fit" not in ranking.plans_title(7, 2, planning.host)
    assert "plans that fit" in ranking.plans_title(7, 2, made_up_planning(on="epyc-9654-768gb").host)


def test_what_cannot_be_written_is_a_request_error(planning: Planning, page: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path, "is a directory"), (tmp_path / "file" / "page.html", "cannot write")):
        with pytest.raises(RequestError, match=why):
            write_page(path, page)
    write_plan_page(tmp_path / "new" / "page.html", planning, model=HOSTILE)
    written = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert written == page, "the page is not the same every time"


def test_the_page_shows_the_fastest_rejected_plan_of_each_reason() -> None:
    planning = made_up_planning()
    lessons = planning.lessons
    found = Elements(plan_page_html(planning, model="some/model"))
    assert len(lessons) > 1 and "rejected" in [attributes.get("id") for tag, attributes in found.elements if tag == "section"]
    shown = " ".join(found.words.split())
    for lesson in lessons[:12]:
        assert lesson.plan.label() in shown and " ".join(lesson.reason.split()) in shown
        assert lesson.speed is None or f"{lesson.speed - 1:+.1%}" in shown
