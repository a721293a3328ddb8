"""The report of one run as one HTML file that works offline, on a phone and in the dark.

Input: a RunPage. The plotting library's script is written into the file once, and the page forbids the browser to load
anything. Ignored: everything a RunPage does not hold; nothing is measured or predicted here.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path

from upshift.benchmarking import page_sections
from upshift.benchmarking.page_candidates import candidate_plot
from upshift.benchmarking.page_content import (
    Candidate,
    ComparisonRow,
    Fact,
    LossCurve,
    MemoryLife,
    MemorySample,
    PredictionRow,
    Reason,
    RunPage,
    Sample,
)
from upshift.benchmarking.page_html import section, text
from upshift.benchmarking.page_plots import Figure, loss_figure, memory_figure
from upshift.benchmarking.page_style import SCRIPT, STYLE
from upshift.errors import RequestError

__all__ = [
    "Candidate",
    "ComparisonRow",
    "Fact",
    "LossCurve",
    "MemoryLife",
    "MemorySample",
    "PredictionRow",
    "Reason",
    "RunPage",
    "Sample",
    "run_page_html",
    "write_run_page",
]

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_run_page(path: Path, run: RunPage) -> None:
    """Write the report. Raises RequestError when the file cannot be written."""
    content = run_page_html(run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; give a path that can be written") from None


def run_page_html(run: RunPage) -> str:
    """The whole report as text."""
    drawing = candidate_plot(run.candidates, limit_gib=run.memory_limit_gib)
    maybe = {
        "plot-candidates": drawing.figure,
        "plot-memory": memory_figure(run.memory, limit_gib=run.memory_limit_gib),
        "plot-loss": loss_figure(run.loss_curves),
    }
    figures = {place: figure for place, figure in maybe.items() if figure is not None}
    sections = [
        ("run", "The run", "Run", page_sections.facts(run)),
        ("comparison", "Plain default and chosen plan", "Comparison", page_sections.comparison(run)),
        ("prediction", "Predicted and measured", "Prediction", page_sections.predictions(run)),
        ("reasons", "Why this plan", "Reasons", page_sections.reasons(run)),
        ("plans", "All plans that were considered", "Plans", page_sections.candidates(run, drawing)),
        ("memory", "Memory over the run", "Memory", page_sections.memory(run)),
        ("loss", "Loss", "Loss", page_sections.losses(run, is_drawn="plot-loss" in figures)),
        ("text", "Text from the trained model", "Text", page_sections.samples(run)),
        ("repeat", "Do it again", "Repeat", page_sections.repeat(run)),
    ]
    links = "".join(f'<li><a href="#{place}">{short}</a></li>' for place, _, short, _ in sections)
    body = "".join(section(place, title=title, parts=parts) for place, title, _, parts in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(run.title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>\n<body>'
        f'<header><h1>{text(run.title)}</h1><p class="summary">{text(run.summary)}</p>{page_sections.tiles(run)}'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main>{body}</main>\n'
        "<footer>Written by Upshift. This file is complete: it loads nothing from the network."
        "<noscript> The plots need JavaScript; the tables do not.</noscript></footer>\n"
        f"{scripts(figures)}</body></html>\n"
    )


def scripts(figures: Mapping[str, Figure]) -> str:
    """Figures as JSON that no text in them can end early, the plotting library once, and the script that draws."""
    if not figures:
        return ""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # heavy

    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
    return (
        f'<script type="application/json" id="figures">{data}</script>\n'
        f"<script>{get_plotlyjs()}</script>\n<script>{SCRIPT}</script>\n"
    )
