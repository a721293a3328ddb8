"""The report of one run as a page. Input: a RunPage. Ignored: everything it does not hold; nothing is measured or predicted."""

from __future__ import annotations

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
from upshift.benchmarking.page_document import PageSection, page_html, write_page
from upshift.benchmarking.page_plots import loss_figure, memory_figure

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


def write_run_page(path: Path, run: RunPage) -> None:
    """Write the report. Raises RequestError when the file cannot be written."""
    write_page(path, run_page_html(run))


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
        PageSection("run", "The run", "Run", page_sections.facts(run)),
        PageSection("comparison", "Plain default and chosen plan", "Comparison", page_sections.comparison(run)),
        PageSection("prediction", "Predicted and measured", "Prediction", page_sections.predictions(run)),
        PageSection("reasons", "Why this plan", "Reasons", page_sections.reasons(run.reasons)),
        PageSection("plans", "All plans that were considered", "Plans", page_sections.candidates(run, drawing)),
        PageSection("memory", "Memory over the run", "Memory", page_sections.memory(run)),
        PageSection("loss", "Loss", "Loss", page_sections.losses(run, is_drawn="plot-loss" in figures)),
        PageSection("text", "Text from the trained model", "Text", page_sections.samples(run)),
        PageSection("repeat", "Do it again", "Repeat", page_sections.repeat(run)),
    ]
    return page_html(title=run.title, summary=run.summary, tiles=page_sections.tiles(run), sections=sections, figures=figures)
