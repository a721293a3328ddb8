"""Cost the best plan's family at other sequence lengths and micro-batches, for a page, which cannot run the planner.

A family shares all choices but the micro-batch (accumulated to the same global batch) and the activation checkpointing. The
data's own length histogram is ignored: every sequence is taken to be full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from upshift.planning.cost.time import sample_unit
from upshift.planning.layout import divisors
from upshift.planning.planner import Planning
from upshift.planning.search.constraints import conflict
from upshift.planning.search.ranking import Candidate, Coster, limit_of
from upshift.planning.search.space import BLOCK_ATTENTION_LIMIT
from upshift.reports import plots
from upshift.reports.blocks import Block, Controls, Paragraph, Plot, Slider, SpokenWords, missing
from upshift.reports.plan.charts import FARTHEST, memory_figure
from upshift.reports.plan.words import cost_words, full_memory_words, held_gib, limit_gib, speed_words
from upshift.reports.plots import (
    BLUE,
    FRONTIER_LINE,
    GREY,
    RED,
    STAR,
    Figure,
    PlacedCandidate,
    all_peaks,
    axis,
    choice,
    frontier,
    layout,
    limit_line,
    log_axis_if_wide,
    marker_trace,
    placed_candidates,
)

LENGTH_FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)  # of the workload's sequence length
MAX_MICRO_BATCHES = 12
LENGTH = "sequence-length"
SIZE = "micro-batch"
WORDS = "family-words"
MEMORY_WORDS = "family-memory-words"
PLOT = "plot-family"
MEMORY_PLOT = "plot-family-memory"
Recomputation = tuple[int, str]  # number of layers, granularity


@dataclass(frozen=True)
class Cell:
    """The family's plans at one sequence length and micro-batch. ``shown`` is the fastest that fits, or else the smallest."""

    plans: tuple[Candidate, ...]
    shown: Candidate
    fits: bool


@dataclass(frozen=True)
class Grid:
    """The cells of a page. ``cells`` are by sequence length, then by micro-batch. The profile was traced at lengths
    from ``traced[0]`` to ``traced[1]``. ``best`` are the indices of the best plan's cell."""

    sequence_lengths: tuple[int, ...]
    micro_batches: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]
    traced: tuple[int, int]
    best: tuple[int, int]


def family_grid(planning: Planning) -> Grid | None:
    """Return the grid of lengths and micro-batches at which the family has plans, or None if it has none at the best plan's."""
    best_length = planning.best.sequence_length
    best_size = planning.best.per_device_train_batch_size
    lengths = sequence_lengths(planning)
    sizes = micro_batches(planning)
    costed = {(length, size): plans for length in lengths for size, plans in plans_by_size(planning, length, sizes)}
    if not costed[best_length, best_size]:
        return None
    lengths = tuple(length for length in lengths if costed[length, best_size])
    sizes = tuple(size for size in sizes if all(costed[length, size] for length in lengths))
    return Grid(
        sequence_lengths=lengths,
        micro_batches=sizes,
        cells=tuple(tuple(make_cell(costed[length, size], planning) for size in sizes) for length in lengths),
        traced=planning.profile.sequence_range,
        best=(lengths.index(best_length), sizes.index(best_size)),
    )


def sequence_lengths(planning: Planning) -> tuple[int, ...]:
    """Return lengths around the workload's, up to the model's positions and the limit of the attention kernel."""
    length = planning.best.sequence_length
    ranks = planning.best.layout.context_parallel
    longest = planning.profile.max_positions or length * int(LENGTH_FACTORS[-1])
    if planning.best.attention == "block":
        longest = min(longest, max(BLOCK_ATTENTION_LIMIT, length))
    candidates = {round(length * factor) for factor in LENGTH_FACTORS}
    return tuple(
        sorted({length} | {candidate for candidate in candidates if 2 <= candidate <= longest and candidate % ranks == 0})
    )


def micro_batches(planning: Planning) -> tuple[int, ...]:
    """Return sizes that divide a data-parallel rank's share of the global batch: a few, the ends, and the best plan's size.

    They are numbers of sequences, and hold whole pairs.
    """
    together = planning.workload.rows_together
    sizes = [together * units for units in divisors(planning.workload.num_units // planning.best.data_parallel)]
    step = -(-len(sizes) // MAX_MICRO_BATCHES)
    return tuple(sorted({*sizes[::step], sizes[-1], planning.best.per_device_train_batch_size}))


def recomputations(planning: Planning) -> list[Recomputation]:
    """Return the choices of activation checkpointing that the planning considered. The user may have fixed one."""
    plans = [candidate.plan for candidate in (*planning.ranking.candidates, *planning.ranking.too_big)]
    return sorted({(plan.activation_checkpointing, plan.recompute_granularity) for plan in plans})


def plans_by_size(planning: Planning, length: int, sizes: Sequence[int]) -> Iterator[tuple[int, list[Candidate]]]:
    """Yield each micro-batch with the plans of the family that can be costed there."""
    workload = planning.workload.model_copy(update={"sequence_length": length, "lengths": None})
    coster = Coster(planning.host, planning.profile, workload)
    rank_batch = workload.global_batch // planning.best.data_parallel
    for size in sizes:
        plans = [
            planning.best.model_copy(
                update={
                    "sequence_length": length,
                    "per_device_train_batch_size": size,
                    "gradient_accumulation_steps": rank_batch // size,
                    "activation_checkpointing": layers,
                    "recompute_granularity": granularity,
                }
            )
            for layers, granularity in recomputations(planning)
        ]
        legal = [plan for plan in plans if conflict(plan, clips_gradients=workload.clips_gradients) is None]
        costed = [candidate for candidate in map(coster.cost, legal) if isinstance(candidate, Candidate)]
        yield size, [planning.calibration.of(candidate, workload) for candidate in costed]


def make_cell(plans: Sequence[Candidate], planning: Planning) -> Cell:
    fitting = [candidate for candidate in plans if is_fitting(candidate, planning)]
    if fitting:
        return Cell(tuple(plans), max(fitting, key=lambda candidate: candidate.tokens_per_second), True)
    return Cell(tuple(plans), min(plans, key=lambda candidate: candidate.resident), False)


def is_fitting(candidate: Candidate, planning: Planning) -> bool:
    limit = limit_of(candidate, planning.host, planning.workload)
    return limit is None or candidate.resident <= limit


def selected_cell(grid: Grid, content: Callable[[Cell], Any]) -> Figure:
    """Return page data: ``content`` of the cell that the two sliders select."""
    return choice(LENGTH, [choice(SIZE, map(content, row)) for row in grid.cells])


def place_dots(candidates: Sequence[Candidate], planning: Planning) -> list[PlacedCandidate]:
    limit = limit_gib(planning)
    return placed_candidates(
        [
            plots.Candidate(
                label=candidate.plan.label(),
                status="candidate" if is_fitting(candidate, planning) else "rejected",
                tokens_per_second=candidate.tokens_per_second,
                peak_gib=held_gib(candidate),
            )
            for candidate in candidates
            if limit is None or held_gib(candidate) <= FARTHEST * limit
        ]
    )


def family_figure(grid: Grid, planning: Planning) -> Figure:
    """Return the scatter plot. Its axes are the same for every state, so that a move of a slider can be seen."""
    rows = [place_dots([candidate for cell in row for candidate in cell.plans], planning) for row in grid.cells]
    every_dot = [dot for row in rows for dot in row]
    limit = limit_gib(planning)
    peaks = all_peaks(every_dot, limit)
    scale = log_axis_if_wide(peaks)
    low = min(peaks, default=1.0)
    high = max(peaks, default=1.0)
    ends = [math.log10(low / 1.1), math.log10(high * 1.1)] if "type" in scale else [0.0, high * 1.05]
    x = axis("held memory per device, GiB", **scale, range=ends)
    y = axis(speed_words(planning), range=[0.0, 1.05 * max((dot.speed for dot in every_dot), default=1.0)], tickformat=",~r")

    def group(name: str, status: str, marker: Figure) -> Figure:
        groups = ([dot for dot in row if dot.candidate.status == status] for row in rows)
        return choice(LENGTH, [marker_trace(name, dots, marker=marker) for dots in groups])

    ring = {"color": "@text", "size": 12, "symbol": "circle-open", "line": {"width": 1.6}}
    fronts = [marker_trace("fastest for its memory", frontier(row), mode="lines", line=FRONTIER_LINE) for row in rows]
    data = [
        group("fits", "candidate", {"color": BLUE, "size": 7, "opacity": 0.75}),
        group("too big", "rejected", {"color": GREY, "size": 7, "symbol": "circle-open"}),
        choice(LENGTH, fronts),
        selected_cell(grid, lambda cell: marker_trace("this micro-batch", place_dots(cell.plans, planning), marker=ring)),
        selected_cell(
            grid, lambda cell: marker_trace("shown below", place_dots([cell.shown], planning), marker={"color": RED, **STAR})
        ),
    ]
    limits = limit_line(limit, peaks, is_log="type" in scale)
    return {"data": data, "layout": layout(x=x, y=y, hovermode="closest", **limits)}


def length_words(grid: Grid) -> list[str]:
    low, high = grid.traced
    return [f"{length:,} tokens" + ("" if low <= length <= high else ", extrapolated") for length in grid.sequence_lengths]


def size_words(grid: Grid) -> list[str]:
    steps = [cell.shown.plan.gradient_accumulation_steps for cell in grid.cells[0]]
    return [f"{size:,} at once, {count:,} to a step" for size, count in zip(grid.micro_batches, steps, strict=True)]


def cell_words(cell: Cell, planning: Planning) -> str:
    limit = limit_gib(planning)
    plan = cell.shown.plan
    ending = "fits" if cell.fits else f"does not fit in the {limit:.2f} GiB that may be held, nor does any other of the family"
    return (
        f"{plan.activation_checkpointing} of {planning.profile.num_layers} layers recomputed: "
        f"{cost_words(planning, cell.shown)}. It {ending}."
    )


def cell_memory_words(cell: Cell, planning: Planning) -> str:
    return f"Memory by phase: {full_memory_words(planning, cell.shown)}."


def family_section(planning: Planning) -> tuple[list[Block], dict[str, Figure], dict[str, Any]]:
    """Return the section, its figures and its words. All are empty for a model of images: it has no sequence length."""
    if sample_unit(planning.profile) == "images":
        return [], {}, {}
    grid = family_grid(planning)
    if grid is None:
        return [missing("The best plan's family cannot be predicted for full sequences.")], {}, {}
    lengths = length_words(grid)
    sizes = size_words(grid)
    words = {
        f"{LENGTH}-value": choice(LENGTH, lengths),
        f"{SIZE}-value": choice(SIZE, sizes),
        WORDS: selected_cell(grid, lambda cell: cell_words(cell, planning)),
        MEMORY_WORDS: selected_cell(grid, lambda cell: cell_memory_words(cell, planning)),
    }
    memory = memory_figure(lambda content: selected_cell(grid, lambda cell: content(cell.shown)), planning)
    row, column = grid.best
    low, high = grid.traced
    above = (
        "Move a slider to see the plans that share every other choice with the best one, at another sequence length or "
        "micro-batch, and with every amount of recomputation that was considered. The global batch stays; every sequence is "
        f"full. Tensors were traced from {low:,} to {high:,} tokens; other lengths are extrapolated."
    )
    sliders = [Slider(LENGTH, "Sequence length", lengths, row), Slider(SIZE, "Micro-batch", sizes, column)]
    family_label = "Scatter plot of the best plan's family; the text above says where it stands."
    caption = "Rings: the selected micro-batch. The star: of these the fastest that fits, or else the smallest."
    memory_label = "Stacked bars of memory by phase and part; the text above says it."
    blocks = [
        Paragraph(above),
        Controls(sliders, label="What to show"),
        SpokenWords(WORDS, cell_words(grid.cells[row][column], planning)),
        SpokenWords(MEMORY_WORDS, cell_memory_words(grid.cells[row][column], planning), is_only_spoken=True),
        Plot(PLOT, family_label, caption),
        Plot(MEMORY_PLOT, memory_label, "Memory of the plan under the star, by part, at the highest moment of each phase."),
    ]
    return blocks, {PLOT: family_figure(grid, planning), MEMORY_PLOT: memory}, words
