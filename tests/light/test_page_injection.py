"""No text of a page becomes markup: each field of what a page says, one at a time, holds a hostile text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile_pages import HARMLESS, HOSTILE, assert_is_text, texts_not_shown
from jinja2 import UndefinedError
from made_up_plans import made_up_planning
from page_elements import Elements
from test_page import full_page

from upshift.benchmarking.claims import Claim, ClaimStatus, Reading
from upshift.planning.planner import Planning
from upshift.reports import document
from upshift.reports.blocks import (
    Block,
    Cell,
    Command,
    Controls,
    Facts,
    Heading,
    Paragraph,
    Plot,
    Quote,
    Selection,
    Slider,
    SpokenWords,
    Table,
    Tile,
)
from upshift.reports.claims import claims_page
from upshift.reports.document import Page, Section, page_html
from upshift.reports.plan.page import plan_page_html
from upshift.reports.run.page import run_page_html
from upshift.serving.load_test.report import load_page_html
from upshift.serving.load_test.run import LoadTest, Phase
from upshift.serving.load_test.traffic import Traffic


@pytest.fixture(autouse=True)
def no_plotting_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out 5 MB of script that no text gets into."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")


def every_block(words: str) -> list[Block]:
    return [
        Paragraph(words), Heading(words), Facts([(words, words)]), Plot("plot", words, words), SpokenWords("spoken", words),
        Table(words, [(words, ""), (words, "")], [[words, Cell(words, words)], [Cell(words, words, True, True), None]]),
        Controls([Slider("slider", words, [words, words], 1), Selection("selection", words, [words])], words),
        Quote(words, words), Command(words),
    ]  # fmt: skip


def page_of(words: str) -> str:
    sections = [Section("section", words, words, every_block(words))]
    figures = {"plot": {"data": [{"name": words}], "layout": {}}}
    return page_html(Page(words, words, [Tile(words, words, words)], sections, figures, {"spoken": words}))


def test_every_kind_of_block_escapes_every_text() -> None:
    tried = {type(block) for block in every_block("")}
    assert tried == set(Block.__subclasses__())
    assert assert_is_text(page_of(HOSTILE), page_of(HARMLESS))
    hostile, harmless = Elements(page_of(HOSTILE)), Elements(page_of(HARMLESS))
    # A cell of whole words has each of them in an element of its own.
    assert hostile.words.count(HOSTILE) == harmless.words.count(HARMLESS) >= 20
    attributes = [value for _, attributes in hostile.elements for value in attributes.values()]
    assert attributes.count(HOSTILE) == 4  # labels of the plot, the table and the controls, and a slider's value


def test_what_a_template_lacks_is_an_error_and_not_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heading, "template", "table.html")
    with pytest.raises(UndefinedError, match="no attribute 'label'"):
        page_html(Page("t", "s", [], [Section("a", "b", "c", [Heading("d")])], {}))


def test_only_the_plotting_library_is_not_escaped() -> None:
    folder = Path(document.__file__).parent / "templates"
    templates = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.html")}
    assert len(templates) >= 10
    unescaped = [line for text in templates.values() for line in text.splitlines() if "|safe" in line or "autoescape" in line]
    assert unescaped == ["<script>{{ plotting_library|safe }}</script>"]


def test_no_text_of_a_run_becomes_markup() -> None:
    count, hidden = texts_not_shown(full_page(), run_page_html)
    assert count > 30 and hidden == {"group"}  # it only decides which marks the plot leaves out


def test_no_text_of_a_claim_becomes_markup() -> None:
    claim = Claim(name="claim", text="text", ours="ours", baseline="baseline", goal=2.0)
    readings = tuple(Reading(time="2026-11-23T09:00", commit="abc", value=value) for value in (1.0, 1.5))
    standing = ClaimStatus(name="case/claim", claim=claim, command="python case.py", readings=readings)
    count, hidden = texts_not_shown(standing, lambda one: claims_page([one]))
    # A time is cut to the minute, a command is shown word by word; the claim's name and options stand in the standing's.
    assert count >= 9 and hidden <= {"name", "options", "time", "command", "row", "value"}


def test_no_text_of_a_load_test_becomes_markup() -> None:
    spread = {"p50": 0.01, "p95": 0.02, "p99": 0.03}
    phase = Phase(
        rate=1.0, seconds=3.0, asked=3, statuses={"200": 3}, answered_per_second=1.0, tokens_per_second=50.0, first_token=spread,
        token=spread, within_promise=0.9, goodput=0.9, without_retry_after=0, reasons={},
    )  # fmt: skip
    test = LoadTest(
        url="http://127.0.0.1", model="model", traffic=Traffic(), promised_ttft_ms=500.0, predicted_capacity=3.0, capacity=2.0,
        phases=(phase,),
    )  # fmt: skip
    assert texts_not_shown(test, load_page_html) == (2, set())
    hostile, harmless = (test.changed(phases=(phase.changed(statuses={words: 3}),)) for words in (HOSTILE, HARMLESS))
    assert assert_is_text(load_page_html(hostile), load_page_html(harmless))


@pytest.mark.parametrize("field", ["model", "architecture", "flop_convention", "host", "gpu", "version", "library"])
def test_no_text_of_a_planning_becomes_markup(field: str) -> None:
    planning = made_up_planning(on="1xh200", global_batch=2)

    def page(words: str) -> str:
        profile, host = planning.profile, planning.host
        if field in ("architecture", "flop_convention"):
            profile = profile.changed(**{field: words})
        if field in ("version", "library"):
            profile = profile.changed(versions={"torch": words} if field == "version" else {words: "1"})
        if field == "host":
            host = host.changed(name=words)
        if field == "gpu":
            assert host.gpu is not None
            host = host.changed(gpu=host.gpu.changed(name=words))
        changed = Planning(host, profile, planning.workload, planning.ranking, planning.default)
        return plan_page_html(changed, model=words if field == "model" else "model")

    assert assert_is_text(page(HOSTILE), page(HARMLESS), field)
