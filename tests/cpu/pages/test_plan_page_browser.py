"""The page of a planning in a real browser: plots are drawn, sliders move them, nothing fails, and nothing is loaded."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import Command
from headless import opened
from made_up_plans import made_up_planning

from upshift.reports.plan.page import write_plan_page

HOSTILE = "</script><script>document.title = 'broken'</script><b>%{x}"

# Moves each slider by one and the selection to its last, as the keyboard does, and writes down what the page then shows.
DRIVER = """
<script>
window.addEventListener("load", function () {
  function shown() {
    var found = {};
    ["plot-plans", "plot-memory", "plot-time", "plot-schedule", "plot-family", "plot-family-memory"].forEach(function (id) {
      var place = document.getElementById(id);
      found[id] = place.data.map(function (trace) { return [trace.name, trace.x, trace.y]; });
    });
    ["plan-words", "family-words", "sequence-length-value", "micro-batch-value"].forEach(function (id) {
      found[id] = document.getElementById(id).textContent;
    });
    found.spoken = document.getElementById("sequence-length").getAttribute("aria-valuetext");
    return found;
  }
  var log = [], ids = ["sequence-length", "micro-batch", "plan-shown"];
  function next() {
    log.push(shown());
    if (!ids.length) {
      var place = document.createElement("pre");
      place.id = "log";
      place.textContent = JSON.stringify({states: log, hover: document.getElementById("plot-plans").data[0].text.length,
        loaded: performance.getEntriesByType("resource").map(function (entry) { return entry.name; })});
      document.body.appendChild(place);
      return;
    }
    var control = document.getElementById(ids.shift());
    var slid = control.value === "0" ? "1" : String(control.value - 1);
    control.value = control.options ? String(control.options.length - 1) : slid;
    control.dispatchEvent(new Event("input", {bubbles: true}));
    setTimeout(next, 700);
  }
  setTimeout(next, 700);
});
</script>
"""


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The document, and what it showed at first and after each control was moved."""
    folder = tmp_path_factory.mktemp("page")
    page = folder / "page.html"
    write_plan_page(page, made_up_planning(architecture=HOSTILE), model=HOSTILE)
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", DRIVER + "</body>"), encoding="utf-8")
    document, said = opened(page, folder / "profile")
    assert said == []
    (log,) = re.findall(r'<pre id="log">(.*?)</pre>', document, flags=re.S)
    return document, json.loads(html.unescape(log))


def test_plots_are_drawn_without_an_error(driven: tuple[str, dict[str, Any]]) -> None:
    document, log = driven
    assert 'data-plots="6"' in document
    assert "<title>Plan for &lt;/script&gt;" in document
    drawn = document[document.index("<body") :].split('<figure><div class="plot')[1:]
    assert [part.count('class="main-svg"') >= 1 for part in drawn] == [True] * 6
    assert drawn[0].count('class="point"') > 100
    assert log["hover"] > 0 and log["loaded"] == []


def test_sliders_move_the_picture_and_the_words(driven: tuple[str, dict[str, Any]]) -> None:
    first, length, size, plan = driven[1]["states"]
    for before, after, moved in (
        (first, length, {"plot-family", "plot-family-memory", "family-words", "sequence-length-value", "spoken"}),
        (length, size, {"plot-family", "plot-family-memory", "family-words", "micro-batch-value"}),
        (size, plan, {"plot-memory", "plot-time", "plan-words"}),
    ):
        assert {name for name in before if before[name] != after[name]} == moved
    assert length["spoken"] == length["sequence-length-value"] != first["spoken"]


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upshift: Command) -> None:
    planning = made_up_planning(on="1xh200", global_batch=2)
    monkeypatch.setattr("upshift.cli.plan.questions.plan_training", lambda *request, **more: planning)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    request = ("plan", tmp_path / "config.json", "--on", "1xh200", "--html")

    refused = upshift(*request, tmp_path)
    assert refused.code == 2 and "is a directory" in refused.err
    page = tmp_path / "page.html"
    written = upshift(*request, page)
    assert written.code == 0 and f"Page: {page}" in written.err.replace("\n", "")
    document, said = opened(page, tmp_path / "profile")
    assert said == []
    assert "<title>Plan for MadeUpForCausalLM on 1xh200</title>" in document
    assert 'data-plots="5"' in document
