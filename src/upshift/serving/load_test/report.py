"""Draw a load test as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from upshift.reports.blocks import Plot, Table, Tile, number
from upshift.reports.document import Page, Section, page_html, write_page
from upshift.reports.plots import Figure, axis, layout
from upshift.serving.load_test.run import LoadTest, Phase

COLUMNS = (
    ("Requests/s", "number"), ("Asked", "number"), ("Statuses", "long"), ("Answered/s", "number"), ("Tokens/s", "number"),
    ("First token p50 ms", "number"), ("p95", "number"), ("p99", "number"), ("Token p50 ms", "number"), ("p95", "number"),
    ("Within promise", "number"),
)  # fmt: skip


def write_load_page(path: Path, test: LoadTest) -> None:
    """Write the page. Raise RequestError if the file cannot be written."""
    write_page(path, load_page_html(test))


def load_page_html(test: LoadTest) -> str:
    """Return the page of a load test."""
    rates = [phase.rate for phase in test.phases]
    answered = {
        "answered": [phase.answered_per_second for phase in test.phases],
        "within the promise": [phase.goodput for phase in test.phases],
        "asked": rates,
    }
    first_token = {name: [_milliseconds(phase.first_token, name) for phase in test.phases] for name in ("p50", "p95", "p99")}
    figures = {
        "answered-plot": _line_figure("Requests a second", rates, answered),
        "first-plot": _line_figure("First token, ms", rates, first_token),
    }
    label = "{} by requests asked; the table has the figures."
    table = Table("Every rate", COLUMNS, [_table_row(phase) for phase in test.phases])
    sections = [
        Section("answered", "Asked and answered", "Rates", [Plot("answered-plot", label.format("Requests answered a second"))]),
        Section("first", "Time to first token", "First token", [Plot("first-plot", label.format("Time to first token"))]),
        Section("phases", "Every rate", "Figures", [table]),
    ]
    promise = "nothing promised"
    if test.promised_ttft_ms is not None:
        promise = f"first token within {test.promised_ttft_ms:g} ms promised"
    summary = f"{test.url}, {test.traffic.seconds:g} s a rate, {test.traffic.max_tokens} tokens an answer; {promise}."
    return page_html(Page(f"Load test of {test.model}", summary, _make_tiles(test), sections, figures))


def _make_tiles(test: LoadTest) -> list[Tile]:
    best = max(test.phases, key=lambda phase: phase.goodput)
    capacity = None if test.capacity is None else f"{test.capacity:.2f}/s"
    predicted = None if test.predicted_capacity is None else f"predicted {test.predicted_capacity:.2f}"
    return [
        Tile("Best goodput", f"{best.goodput:.2f}/s", f"at {best.rate:g} requests/s asked"),
        Tile("Capacity, as proven at start", capacity, predicted),
    ]


def _milliseconds(seconds: dict[str, float], name: str) -> float | None:
    """Return a quantile in milliseconds, or None if no answer came."""
    return 1e3 * seconds[name] if name in seconds else None


def _table_row(phase: Phase) -> list[str | None]:
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(phase.statuses.items()))
    return [
        number(phase.rate),
        number(phase.asked),
        statuses,
        number(phase.answered_per_second),
        number(phase.tokens_per_second),
        *(number(_milliseconds(phase.first_token, name)) for name in ("p50", "p95", "p99")),
        *(number(_milliseconds(phase.token, name)) for name in ("p50", "p95")),
        None if phase.within_promise is None else f"{phase.within_promise:.1%}",
    ]


def _line_figure(title: str, rates: list[float], curves: Mapping[str, Sequence[float | None]]) -> Figure:
    line = {"type": "scatter", "mode": "lines+markers", "x": rates}
    data = [{**line, "name": name, "y": values} for name, values in curves.items()]
    return {"data": data, "layout": layout(x=axis("Requests a second, asked"), y=axis(title, rangemode="tozero"))}
