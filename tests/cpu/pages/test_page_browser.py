"""The report page in a real browser: every plot is drawn, nothing fails, and nothing is loaded."""

from __future__ import annotations

import math
from pathlib import Path

from headless import opened
from made_up_plans import made_up_planning
from web_driver import driven

from upshift.benchmarking.claims import claim_statuses, find_cases
from upshift.reports.claims import claims_page
from upshift.reports.plan.page import write_plan_page
from upshift.reports.plots import Candidate
from upshift.reports.run.content import ComparisonRow, LossCurve, MemoryHistory, MemorySample, RunPage, Sample
from upshift.reports.run.page import write_run_page

HOSTILE = "</script><script>document.title = 'broken'</script><b>%{x}"


def made_up_page() -> RunPage:
    memory = [
        MemorySample(seconds=at, phase="load" if at < 5 else "steady", parts={"weights": 0.4, HOSTILE: at % 7 / 7},
                     resident_gib=2.0)
        for at in range(60)
    ]  # fmt: skip
    plans = [
        Candidate(label=f"{HOSTILE} {index}", tokens_per_second=100.0 + index * 37 % 900,
                  peak_gib=0.5 + index * 13 % 97, status="candidate" if index % 5 else "rejected",
                  changes_mathematics=index % 3 == 0)
        for index in range(4000)
    ]  # fmt: skip
    chosen = Candidate(label="chosen", status="chosen", tokens_per_second=950.0, peak_gib=3.0,
                       measured_tokens_per_second=940.0, measured_peak_gib=3.1)  # fmt: skip
    losses = [(float(at), 3 + math.exp(-at / 9)) for at in range(90)]
    return RunPage(
        title="A made-up run",
        summary=HOSTILE,
        comparison=(ComparisonRow(plan=HOSTILE, role="default", tokens_per_second=3.0),),
        candidates=(*plans, chosen),
        memory_limit_gib=40.0,
        memory=MemoryHistory(samples=tuple(memory), predicted_peak_gib=1.5),
        loss_curves=(LossCurve(name=HOSTILE, training=tuple(losses), held_out=((0, 4), (90, 3))),),
        samples=(Sample(prompt="Once", text=HOSTILE),),
    )


# What reaches beyond the right edge, but for what scrolls by itself, and figures whose caption is under the plot.
FAULTS = """
const width = document.documentElement.clientWidth;
const outside = [...document.querySelectorAll("body *")].filter(element =>
  !element.closest(".scroll, pre, svg") && element.getBoundingClientRect().right > width + 1);
const covered = [...document.querySelectorAll("figure")].filter(figure =>
  figure.querySelector(".svg-container").getBoundingClientRect().bottom
    > figure.querySelector("figcaption").getBoundingClientRect().top + 1);
return [...outside, ...covered].map(element => element.outerHTML.slice(0, 80));
"""


def test_nothing_sticks_out_at_the_width_of_a_phone_or_a_desk(tmp_path: Path) -> None:
    write_run_page(tmp_path / "run.html", made_up_page())
    write_plan_page(tmp_path / "plan.html", made_up_planning(architecture=HOSTILE), model=HOSTILE)
    with driven(tmp_path / "profile") as page:
        for width in (390, 1280):
            page.resize(width, 900)
            for name in ("run", "plan"):
                page.open((tmp_path / f"{name}.html").as_uri())
                assert page.run("return document.documentElement.dataset.plots") is not None
                assert page.run(FAULTS) == [], (name, width)


def test_claims_are_drawn_on_a_phone_without_an_error(tmp_path: Path) -> None:
    page = tmp_path / "claims.html"
    page.write_text(claims_page(claim_statuses(find_cases(Path(__file__).parents[3] / "benchmarks" / "cases"))))
    document, said = opened(page, tmp_path / "profile", width=390)
    assert said == [] and 'data-plots="2"' in document


def test_plots_are_drawn_without_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_run_page(page, made_up_page())
    document, said = opened(page, tmp_path / "profile")
    assert said == []
    assert 'data-plots="3"' in document
    assert "<title>A made-up run</title>" in document
    drawn = document[document.index("<body") :].split('<figure><div class="plot')[1:]
    assert [part.count('class="main-svg"') >= 1 for part in drawn] == [True] * 3
    plans, memory, loss = drawn
    assert plans.count('class="point"') > 1000
    assert memory.count('class="fills"') >= 2 and 'class="js-line"' in memory
    assert loss.count('class="js-line"') >= 3


def test_page_without_plots_opens(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_run_page(page, RunPage(title="Empty", summary="Nothing was measured."))
    document, said = opened(page, tmp_path / "profile")
    assert said == []
    assert "Memory was not sampled in this run." in document
