"""The page of a planning as one file: what it found, every plan it considered, and why it chose the best."""

from __future__ import annotations

from pathlib import Path

from upshift.benchmarking.page_document import PageSection, page_html, write_page
from upshift.benchmarking.page_html import number, text, tile_list
from upshift.cli.plan_page import sections
from upshift.cli.plan_page.candidates import picture
from upshift.cli.plan_page.family import family_parts
from upshift.cli.plan_page.pipeline import PLOT as SCHEDULE_PLOT
from upshift.cli.plan_page.pipeline import pipeline_parts
from upshift.cli.plan_page.words import TIERS, held_gib, limit_gib, sentence, speed_words
from upshift.planning.planner import Planning
from upshift.units import format_seconds


def write_plan_page(path: Path, planning: Planning, *, model: str) -> None:
    """``model``: as the user wrote it. Raises RequestError when the file cannot be written."""
    write_page(path, plan_page_html(planning, model=model))


def plan_page_html(planning: Planning, *, model: str) -> str:
    """The whole page as text."""
    plans = picture(planning)
    selectable = sections.selectable(planning, plans.front)
    step_parts, step_figures, step_words = sections.step(planning, selectable)
    schedule_parts, schedule = pipeline_parts(planning)
    grid_parts, grid_figures, grid_words = family_parts(planning)
    return page_html(
        title=f"Plan for {planning.profile.architecture} on {planning.host.name}",
        summary=summary(planning),
        tiles=tiles(planning),
        sections=[
            PageSection("request", "What was asked for", "Request", sections.request(planning, model)),
            PageSection("plans", "All plans that were considered", "Plans", sections.plans(planning, plans, selectable)),
            PageSection("step", "Memory and time of a step", "Memory and time", step_parts),
            PageSection("schedule", "Pipeline schedule", "Schedule", schedule_parts),
            PageSection("family", "Other sequence lengths and micro-batches", "Lengths and micro-batches", grid_parts),
            PageSection("reasons", "Why this plan", "Reasons", sections.why(planning)),
            PageSection("rejected", "What was rejected", "Rejected", sections.rejected(planning)),
        ],
        figures={
            sections.PLANS_PLOT: plans.figure,
            **step_figures,
            **({} if schedule is None else {SCHEDULE_PLOT: schedule}),
            **grid_figures,
        },
        words=step_words | grid_words,
    )


def summary(planning: Planning) -> str:
    best = planning.ranking.candidates[0]
    numbers, limit = planning.numbers(best), limit_gib(planning)
    low, high = numbers.interval or (None, None)
    room = f" of {limit:.2f} GiB that may be held" if limit is not None else ""
    sure = f" The step should take {low:.1f} to {high:.1f} times as long as predicted." if low and high else ""
    risk = numbers.out_of_memory_probability
    short = f" The probability of running out of memory is {risk:.1%}." if risk is not None else ""
    return (
        f"The best plan: {sentence(best.plan, planning.profile.num_layers)}. "
        f"Predicted: {best.tokens_per_second:,.0f} {speed_words(planning)}, {format_seconds(best.time.total)} a step, "
        f"{held_gib(best):.2f} GiB{room}; bound by {best.time.binding_term}. This is {TIERS[numbers.tier]}.{sure}{short}"
    )


def tiles(planning: Planning) -> str:
    best, default = planning.ranking.candidates[0], planning.default
    numbers, total = planning.numbers(best), best.time.total
    speed = f"{best.tokens_per_second / default.tokens_per_second:,.1f} times the plain default"
    low, high = numbers.interval or (None, None)
    limit = limit_gib(planning)
    return tile_list([
        (speed_words(planning).capitalize(), number(best.tokens_per_second, digits=0), text(speed)),
        ("Step", text(format_seconds(total)), text(f"bound by {best.time.binding_term}")),
        ("Memory held", f"{held_gib(best):.2f} GiB", "limit unknown" if limit is None else f"of {limit:.2f} GiB"),
        ("Step, range", f"{low:.1f} to {high:.1f} \N{MULTIPLICATION SIGN}" if low and high else "",
         text(f"{format_seconds((low or 0) * total)} to {format_seconds((high or 0) * total)}; {numbers.tier}")),
    ])  # fmt: skip
