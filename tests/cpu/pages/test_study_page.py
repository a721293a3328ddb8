"""No text of a study's page becomes markup: names of objectives and hyper-parameters, reasons and values."""

from __future__ import annotations

import json
import re

import pytest
from hostile_pages import HARMLESS, HOSTILE, assert_is_text, texts_not_shown

from upshift.tuning.report import study_page_html
from upshift.tuning.tune import TrialRow, TuneResult


def study(objective: str = "loss", parameter: str = "learning_rate") -> TuneResult:
    rows = tuple(
        TrialRow(number=number, state="complete" if number else "pruned", values={objective: 3.0 - number} if number else None,
            parameters={parameter: 0.1 * (number + 1), "optim": "adamw" if number % 2 else "muon"}, seconds=1.0, steps=4,
            reason="" if number else "stopped early")
        for number in range(4)
    )  # fmt: skip
    return TuneResult(
        study="study", storage="sqlite", objectives={objective: "minimize"}, best=rows[1:2], trials=rows, seconds=4.0,
        price_per_hour=2.0,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_plotting_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out 5 MB of script that no text gets into."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")


def test_no_text_of_a_study_becomes_markup() -> None:
    count, hidden = texts_not_shown(study(), study_page_html)
    # A trial with results shows these and no reason; the best trial's other texts stand in its row.
    assert count >= 10 and hidden <= {"storage", "reason", "state", "optim"}
    for name in ("objective", "parameter"):
        hostile, harmless = (study_page_html(study(**{name: words})) for words in (HOSTILE, HARMLESS))
        assert assert_is_text(hostile, harmless, name)


def test_the_history_has_the_trials_own_numbers() -> None:
    """Trial 0 has no result, so the dots are those of trials 1, 2 and 3."""
    page = study_page_html(study()).replace(" ", "")
    assert '"x":[1,2,3],"y":[2.0,1.0,0.0]' in page


def test_the_front_names_its_objectives() -> None:
    one = study()
    for count, words in ((2, "loss and o1"), (3, "loss and o1 and o2"), (4, "Two or three objectives can be drawn")):
        extra = [f"o{number}" for number in range(1, count)]
        rows = tuple(
            row.changed(values=row.values and row.values | {name: 1.0 + row.number for name in extra}) for row in one.trials
        )
        several = one.changed(objectives=one.objectives | dict.fromkeys(extra, "minimize"), trials=rows, best=rows[1:2])
        front = study_page_html(several).split('id="front"')[1].split("</section>")[0]
        assert words in front and "unknown" not in front


def test_parallel_axes_hold_every_trial_where_its_value_stands() -> None:
    """The heights are those of the values by their ticks, on a logarithmic axis, on an even one, and on one of names."""
    values = {"learning_rate": [1e-5, 1e-3, 1e-4], "dropout": [0.1, 0.3, 0.2], "optim": ["adamw", "muon", "adamw"]}
    expected = {"learning_rate": [0.0, 1.0, 0.5], "dropout": [0.0, 1.0, 0.5], "optim": [0.0, 1.0, 0.0]}
    rows = tuple(
        TrialRow(number=number, state="complete", values={"loss": 3.0 - number}, seconds=1.0, steps=4, reason="",
            parameters={name: column[number] for name, column in values.items()})
        for number in range(3)
    )  # fmt: skip
    page = study_page_html(study().changed(trials=rows, best=rows[2:]))
    figures = json.loads(re.search(r'<script[^>]*id="figures"[^>]*>(.*?)</script>', page, flags=re.S)[1])
    figure = figures["parallel-plot-0"]
    lines = [trace for trace in figure["data"] if trace["mode"] == "lines"]
    assert figure["layout"]["xaxis"]["ticktext"] == ["loss", *values]
    for place, name in enumerate(values, start=1):
        assert [line["y"][place] for line in lines] == expected[name]
        ticks = {note["text"]: note["y"] for note in figure["layout"]["annotations"] if note["x"] == place}
        assert {0.0, 1.0} <= {*ticks.values()}
    assert [line["y"][0] for line in lines] == [1.0, 0.5, 0.0]
    assert ticks == {"adamw": 0.0, "muon": 1.0}
