"""The best plan's family as the sliders show it: its plans at a sequence length, the memory at one micro-batch, the words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from upshift.benchmarking import page_content
from upshift.benchmarking.page_candidates import Placed, all_peaks, frontier, limit_marks, marks, placed
from upshift.benchmarking.page_html import empty, paragraph, plot, slider, spoken, text
from upshift.benchmarking.page_plots import BLUE, GREY, RED, Figure, axis, chosen_by, layout, log_axis_if_wide
from upshift.cli.plan_page.bars import Selected, memory_figure
from upshift.cli.plan_page.candidates import FARTHEST
from upshift.cli.plan_page.grid import Cell, Grid, family_grid, fits
from upshift.cli.plan_page.words import costs, full_memory_words, held_gib, limit_gib, speed_words
from upshift.planning.cost.time import takes
from upshift.planning.planner import Planning
from upshift.planning.rank import Candidate

LENGTH, SIZE, WORDS = "sequence-length", "micro-batch", "family-words"
PLOT, MEMORY_PLOT = "plot-family", "plot-family-memory"


def selected_in(grid: Grid) -> Selected:
    return lambda of: chosen_by(LENGTH, [chosen_by(SIZE, [of(cell.shown) for cell in row]) for row in grid.cells])


def dots(candidates: Sequence[Candidate], planning: Planning) -> list[Placed]:
    limit = limit_gib(planning)
    near = [one for one in candidates if limit is None or held_gib(one) <= FARTHEST * limit]
    return placed([
        page_content.Candidate(
            label=one.plan.label(), status="candidate" if fits(one, planning) else "rejected",
            tokens_per_second=one.tokens_per_second, peak_gib=held_gib(one),
        )
        for one in near
    ])  # fmt: skip


def family_figure(grid: Grid, planning: Planning) -> Figure:
    """The same axes for every state, so that a move of a slider can be seen."""
    rows = [dots([one for cell in row for one in cell.plans], planning) for row in grid.cells]
    every, limit = [dot for row in rows for dot in row], limit_gib(planning)
    peaks = all_peaks(every, limit)
    scale = log_axis_if_wide(peaks)
    low, high = min(peaks, default=1.0), max(peaks, default=1.0)
    ends = [math.log10(low / 1.1), math.log10(high * 1.1)] if "type" in scale else [0.0, high * 1.05]
    x = axis("held memory per device, GiB", **scale, range=ends)
    fastest = max((dot.speed for dot in every), default=1.0)
    y = axis(speed_words(planning), range=[0.0, 1.05 * fastest], tickformat=",~r")

    def every_length(of: Any) -> Figure:
        return chosen_by(LENGTH, [of(row) for row in rows])

    def every_cell(of: Any) -> Figure:
        return chosen_by(LENGTH, [chosen_by(SIZE, [of(cell) for cell in row]) for row in grid.cells])

    def group(name: str, status: str, marker: Figure) -> Figure:
        return every_length(lambda row: marks(name, [d for d in row if d.candidate.status == status], "predicted", marker=marker))

    star = {"color": RED, "size": 17, "symbol": "star", "line": {"color": "@text", "width": 1.2}}
    ring = {"color": "@text", "size": 12, "symbol": "circle-open", "line": {"width": 1.6}}
    data = [
        group("fits", "candidate", {"color": BLUE, "size": 7, "opacity": 0.75}),
        group("too big", "rejected", {"color": GREY, "size": 7, "symbol": "circle-open"}),
        every_length(lambda row: marks("fastest for its memory", frontier(row), "predicted", mode="lines",
                                       line={"color": "@text", "width": 1.6, "shape": "hv"})),
        every_cell(lambda cell: marks("this micro-batch", dots(cell.plans, planning), "predicted", marker=ring)),
        every_cell(lambda cell: marks("shown below", dots([cell.shown], planning), "predicted", marker=star)),
    ]  # fmt: skip
    more = limit_marks(limit, is_log="type" in scale)
    return {"data": data, "layout": layout(x=x, y=y, hovermode="closest", **more)}


def length_words(grid: Grid) -> list[str]:
    low, high = grid.traced
    return [f"{one:,} tokens" + ("" if low <= one <= high else ", extrapolated") for one in grid.sequence_lengths]


def size_words(grid: Grid) -> list[str]:
    accumulated = [cell.shown.plan.gradient_accumulation_steps for cell in grid.cells[0]]
    return [f"{size:,} at once, {count:,} to a step" for size, count in zip(grid.micro_batches, accumulated, strict=True)]


def cell_words(cell: Cell, planning: Planning) -> str:
    limit, plan = limit_gib(planning), cell.shown.plan
    ending = "fits" if cell.fits else f"does not fit in the {limit:.2f} GiB that may be held, nor does any other of the family"
    return (
        f"{plan.activation_checkpointing} of {planning.profile.num_layers} layers recomputed: {costs(planning, cell.shown)}. "
        f"It {ending}. Memory by phase: {full_memory_words(planning, cell.shown)}."
    )


def family_parts(planning: Planning) -> tuple[list[str], dict[str, Figure], dict[str, Any]]:
    """The section, its figures and its words."""
    if takes(planning.profile) == "images":
        return [empty(f"{text(planning.profile.architecture)} takes images: there is no sequence length to vary.")], {}, {}
    grid = family_grid(planning)
    if grid is None:
        return [empty("The best plan's family cannot be predicted for full sequences.")], {}, {}
    said = [[cell_words(cell, planning) for cell in row] for row in grid.cells]
    lengths, sizes = length_words(grid), size_words(grid)
    words = {
        f"{LENGTH}-value": chosen_by(LENGTH, lengths),
        f"{SIZE}-value": chosen_by(SIZE, sizes),
        WORDS: chosen_by(LENGTH, [chosen_by(SIZE, row) for row in said]),
    }
    figures = {PLOT: family_figure(grid, planning), MEMORY_PLOT: memory_figure(selected_in(grid), planning)}
    low, high = grid.traced
    above = (
        "Move a slider to see the plans that share every other choice with the best one, at another sequence length or "
        "micro-batch, and with every amount of recomputation that was considered. The global batch stays; every sequence is "
        f"full. Tensors were traced from {low:,} to {high:,} tokens; other lengths are extrapolated."
    )
    controls = slider(LENGTH, label="Sequence length", values=lengths, at=grid.own[0])
    controls += slider(SIZE, label="Micro-batch", values=sizes, at=grid.own[1])
    caption = "Rings: the selected micro-batch. The star: of these the fastest that fits, or else the smallest."
    below = "Memory of the plan under the star, by part, at the highest moment of each phase."
    parts = [
        paragraph(above),
        f'<div class="controls" role="group" aria-label="What to show">{controls}</div>',
        spoken(WORDS, said[grid.own[0]][grid.own[1]]),
        plot(PLOT, label="Scatter plot of the best plan's family; the text above says where it stands.", caption=caption),
        plot(MEMORY_PLOT, label="Stacked bars of memory by phase and part; the text above says it.", caption=below),
    ]
    return parts, figures, words
