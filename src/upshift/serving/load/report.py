"""A load test, drawn, as one HTML file."""

from __future__ import annotations

from pathlib import Path

from upshift.benchmarking.page_document import PageSection, page_html, write_page
from upshift.benchmarking.page_html import number, plot, table, text, tile_list
from upshift.benchmarking.page_plots import Figure, axis, layout
from upshift.serving.load.run import LoadTest, Phase

HEADS = (
    ("Requests/s", "number"), ("Asked", "number"), ("Statuses", "long"), ("Answered/s", "number"), ("Tokens/s", "number"),
    ("First token p50 ms", "number"), ("p95", "number"), ("p99", "number"), ("Token p50 ms", "number"), ("p95", "number"),
    ("Within promise", "number"),
)  # fmt: skip


def write_load_page(path: Path, found: LoadTest) -> None:
    """Raises RequestError when the file cannot be written."""
    write_page(path, load_page_html(found))


def load_page_html(found: LoadTest) -> str:
    rates = [phase.rate for phase in found.phases]
    figures = {
        "answered-plot": _lines("Requests a second", rates, {
            "answered": [phase.answered_per_second for phase in found.phases],
            "within the promise": [phase.goodput for phase in found.phases],
            "asked": rates,
        }),
        "first-plot": _lines("First token, ms", rates, {
            name: [1e3 * phase.first_token.get(name, 0.0) for phase in found.phases] for name in ("p50", "p95", "p99")
        }),
    }  # fmt: skip
    limit = found.promised_ttft_ms
    promised = "nothing promised" if limit is None else f"first token within {limit:g} ms promised"
    best = max(found.phases, key=lambda phase: phase.goodput)
    tiles = [("Best goodput", f"{best.goodput:.2f}/s", f"at {best.rate:g} requests/s asked")]
    if found.capacity is not None:
        predicted = "" if found.predicted_capacity is None else f"predicted {found.predicted_capacity:.2f}"
        tiles.append(("Capacity, as proven at start", f"{found.capacity:.2f}/s", predicted))
    label = "{} by requests asked; the table has the figures."
    sections = [
        PageSection("answered", "Asked and answered", "Rates", [
            plot("answered-plot", label=label.format("Requests answered a second"), caption="")
        ]),
        PageSection("first", "Time to first token", "First token", [
            plot("first-plot", label=label.format("Time to first token"), caption="")
        ]),
        PageSection("phases", "Every rate", "Figures", [
            table(HEADS, [_row(phase) for phase in found.phases], label="Every rate")
        ]),
    ]  # fmt: skip
    return page_html(
        title=f"Load test of {found.model}",
        summary=f"{found.url}, {found.traffic.seconds:g} s a rate, {found.traffic.max_tokens} tokens an answer; {promised}.",
        tiles=tile_list(tiles),
        sections=sections,
        figures=figures,
    )


def _row(phase: Phase) -> list[str]:
    said = ", ".join(f"{status}: {count}" for status, count in sorted(phase.statuses.items()))
    kept = "" if phase.within_promise is None else f"{phase.within_promise:.1%}"
    first = [number(1e3 * phase.first_token.get(name, 0.0)) for name in ("p50", "p95", "p99")]
    token = [number(1e3 * phase.token.get(name, 0.0)) for name in ("p50", "p95")]
    return [
        number(phase.rate), number(phase.asked), text(said), number(phase.answered_per_second), number(phase.tokens_per_second),
        *first, *token, kept,
    ]  # fmt: skip


def _lines(title: str, rates: list[float], curves: dict[str, list[float]]) -> Figure:
    line = {"type": "scatter", "mode": "lines+markers", "x": rates}
    data = [{**line, "name": name, "y": values} for name, values in curves.items()]
    return {"data": data, "layout": layout(x=axis("Requests a second, asked"), y=axis(title, rangemode="tozero"))}
