"""No text of a study's page becomes markup: names of objectives and hyper-parameters, reasons and values."""

from __future__ import annotations

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
