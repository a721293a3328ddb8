"""Draw a load test as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from upshift.reports.blocks import Plot, Table, Tile, number
from upshift.reports.document import Page, Section, page_html, write_page
from upshift.reports.plots import BLUE, GREY, ORANGE, Figure, axis, layout
from upshift.serving.load_test.run import LoadTest, Phase

COLUMNS = (
    ("Requests/s", "number"), ("Sent", "number"), ("Statuses", "long"), ("Answered/s", "number"), ("Tokens/s", "number"),
    ("First token p50 ms", "number"), ("p95", "number"), ("p99", "number"), ("Token p50 ms", "number"), ("p95", "number"),
    ("Within promise", "number"),
)  # fmt: skip


def write_load_page(path: Path, test: LoadTest) -> None:
    """Write the page. Raise RequestError if the file cannot be written."""
    write_page(path, load_page_html(test))


def load_page_html(test: LoadTest) -> str:
    """Return the page of a load test."""
    rates = [phase.rate for phase in test.phases]
    answered: dict[str, Sequence[float | None]] = {
        "sent": rates,
        "answered": [phase.answered_per_second for phase in test.phases],
    }
    if test.promised_ttft_ms is not None:
        answered["answered within the promise"] = [phase.goodput for phase in test.phases]
    first_token = {name: [_milliseconds(phase.first_token, name) for phase in test.phases] for name in ("p50", "p95", "p99")}
    figures = {
        "answered-plot": _line_figure("Requests a second", rates, answered),
        "first-plot": _line_figure("First token, ms", rates, first_token),
    }
    label = "{} by requests sent; the table has the numbers."
    num_columns = len(COLUMNS) - (test.promised_ttft_ms is None)
    table = Table("Every rate", COLUMNS[:num_columns], [_table_row(phase)[:num_columns] for phase in test.phases])
    sections = [
        Section(
            "answered", "Requests sent and answered", "Rates", [Plot("answered-plot", label.format("Requests answered a second"))]
        ),
        Section("first", "Time to first token", "First token", [Plot("first-plot", label.format("Time to first token"))]),
        Section("phases", "Every rate", "Numbers", [table]),
    ]
    promise = "The server promises no time to the first token."
    if test.promised_ttft_ms is not None:
        promise = f"Each first token was to come within {test.promised_ttft_ms:g} ms."
    lengths = f"Each rate ran for {test.traffic.seconds:g} s. An answer had at most {test.traffic.max_tokens} tokens."
    summary = f"Server: {test.url}. {lengths} {promise}"
    return page_html(Page(f"Load test of {test.model}", summary, _make_tiles(test), sections, figures))


def _make_tiles(test: LoadTest) -> list[Tile]:
    best = max(test.phases, key=lambda phase: phase.goodput)
    capacity = None if test.capacity is None else f"{test.capacity:.2f}/s"
    predicted = None if test.predicted_capacity is None else f"predicted {test.predicted_capacity:.2f}"
    promised = "" if test.promised_ttft_ms is None else " within the promise"
    return [
        Tile(f"Most answers{promised}", f"{best.goodput:.2f}/s", f"at {best.rate:g} requests/s sent"),
        Tile("Capacity, measured when the server started", capacity, predicted),
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
    trace = {"type": "scatter", "mode": "lines+markers", "x": rates}
    styles = zip((GREY, BLUE, ORANGE), ("dot", "solid", "dash"), strict=True)  # a curve that lies on another shows both
    data = [
        {**trace, "name": name, "y": values, "line": {"color": colour, "dash": dash, "width": 2.5}}
        for (name, values), (colour, dash) in zip(curves.items(), styles, strict=False)
    ]
    return {"data": data, "layout": layout(x=axis("Requests a second, sent"), y=axis(title, rangemode="tozero"))}
