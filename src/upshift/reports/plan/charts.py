"""Draw the figures of a planning's page: memory and time of a step, all plans, and the pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from upshift.planning.cost.pipeline_schedule import Kind, Pass, simulate
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate
from upshift.reports import plots
from upshift.reports.plan.words import (
    SMALL_SHARE,
    held_gib,
    layout_kind,
    limit_gib,
    limit_of_candidate,
    memory_by_phase,
    memory_words,
    parts_of,
    speed_words,
    time_words,
)
from upshift.reports.plots import (
    BLUE,
    FRONTIER_LINE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    READABLE_TEXT,
    RED,
    SKY,
    STAR,
    VIOLET,
    YELLOW,
    Figure,
    PlacedCandidate,
    all_peaks,
    axis,
    frontier,
    layout,
    limit_line,
    log_axis_if_wide,
    marker_trace,
    part_colours,
    placed_candidates,
    plot_text,
    round_value,
    rounded_values,
    thin_out,
)
from upshift.units import format_seconds, gib

TERM_COLOURS = {
    "matrix products": BLUE,
    "attention": SKY,
    "memory traffic": ORANGE,
    "update": GREEN,
    "dispatch": PINK,
    "page faults": GREY,
    "pipeline idle": YELLOW,
    "tensor parallel": RED,
    "gathering weights, reducing gradients": VIOLET,
}
FAR_LIMIT = 3.0  # times the held memory: the line of a limit beyond it would flatten the bars
TIME_HEIGHT = 250

MAX_DRAWN = 1600
MAX_TERMS = 4  # terms, and parts of memory, in the text of one dot
FARTHEST = 4.0  # times the limit: plans that need more are not drawn
GROUP_COLOURS = (BLUE, ORANGE, SKY, PINK, GREEN, YELLOW, VIOLET)
OTHERS = "others"

MAX_PASSES = 4000  # drawn
READABLE_TIME = 96  # forward passes: in a longer schedule the numbers in the bars cannot be read
KINDS: dict[Kind, tuple[str, str]] = {"F": ("forward", BLUE), "B": ("backward", ORANGE), "W": ("gradients of weights", GREEN)}
ROW_HEIGHT = 30
MAX_HEIGHT = 900

Selected = Callable[[Callable[[Candidate], Any]], Any]
"""Calls a function with the candidate that the page's controls select, and returns its result as page data."""


def memory_traces(memory: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """Return a trace for each part of memory, with a bar for each phase."""
    phases = [plot_text(phase) for phase in memory]
    return [
        {
            "type": "bar",
            "name": plot_text(name),
            "x": phases,
            "y": rounded_values(row.get(name, 0.0) for row in memory.values()),
            "marker": {"color": colour},
            "hovertemplate": "%{y:.2f} GiB",
        }
        for name, colour in part_colours(parts_of(memory)).items()
    ]


def memory_levels(planning: Planning, candidate: Candidate) -> list[tuple[str, float]]:
    """Return (name, GiB) of horizontal lines: the held memory of a process or device, and the limit unless it is far away."""
    held = gib(candidate.resident)
    limit = limit_of_candidate(planning, candidate)
    levels = [(f"held at most, {held:.2f} GiB", held)]
    if limit is not None and limit <= FAR_LIMIT * held:
        levels.append((f"limit, {limit:.2f} GiB", limit))
    return levels


def level_shapes(levels: Sequence[tuple[str, float]]) -> list[Figure]:
    lines = ({"color": "@muted", "width": 1.6, "dash": "dot"}, {"color": RED, "width": 1.6, "dash": "dash"})
    shapes = []
    for (name, level), line, position in zip(levels, lines, ("start", "middle"), strict=False):
        label = {"text": name, "textposition": position, "yanchor": "bottom", "font": {"color": "@muted", "size": 12}}
        height = round_value(level)
        shapes.append(
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "yref": "y",
                "y0": height,
                "y1": height,
                "line": line,
                "label": label,
            }
        )
    return shapes


def memory_figure(selected: Selected, planning: Planning) -> Figure:
    def heights(candidate: Candidate) -> list[float | None]:
        return [0, round_value(1.12 * max(level for _, level in memory_levels(planning, candidate)))]

    return {
        "data": selected(lambda candidate: memory_traces(memory_by_phase(planning, candidate))),
        "layout": layout(
            x=axis("phase of the job", showgrid=False),
            y=axis("GiB", range=selected(heights)),
            height=440,
            barmode="stack",
            bargap=0.45,
            hovermode="x unified",
            shapes=selected(lambda candidate: level_shapes(memory_levels(planning, candidate))),
        ),
    }


def time_traces(candidate: Candidate) -> list[Figure]:
    """Return a trace for each term of the step's time, the longest first."""
    total = candidate.time.total
    spare = cycle((RED, VIOLET, YELLOW, PINK, GREY))
    traces = []
    for name, seconds in sorted(candidate.time.terms.items(), key=lambda item: -item[1]):
        if seconds > SMALL_SHARE * total:
            colour = TERM_COLOURS.get(name) or next(spare)
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "y": [""],
                    "x": rounded_values([seconds]),
                    "name": plot_text(name) + (" (binding)" if name == candidate.time.binding_term else ""),
                    "marker": {"color": colour, "line": {"color": "@surface", "width": 1}},
                    "text": [f"{seconds / total:.0%}"],
                    "textposition": "inside",
                    "insidetextanchor": "middle",
                    "textangle": 0,
                    "hovertemplate": f"%{{x:.4g}} s, {seconds / total:.1%}",
                }
            )
    return traces


def time_figure(selected: Selected) -> Figure:
    x = axis("seconds of an optimizer step", rangemode="tozero")
    y = axis("", showticklabels=False)
    bars = layout(x=x, y=y, height=TIME_HEIGHT, barmode="stack", uniformtext=READABLE_TEXT)
    return {"data": selected(time_traces), "layout": bars}


class PlansFigure(NamedTuple):
    """The scatter plot of all plans. Its colours distinguish plans by ``grouping``. ``front`` is sorted by growing memory."""

    figure: Figure
    num_drawn: int
    num_known: int
    num_too_far: int
    grouping: str
    front: tuple[Candidate, ...]


def grouping(planning: Planning) -> tuple[str, Callable[[Plan], str]]:
    """Return the name and the function of the grouping: by layout if there are several, else by precision."""
    candidates = (*planning.ranking.candidates, *planning.ranking.too_big)
    if len({layout_kind(candidate.plan.layout) for candidate in candidates}) > 1:
        return "layout", lambda plan: layout_kind(plan.layout)
    return "precision", lambda plan: plan.precision


def hover(candidate: Candidate) -> str:
    phase = candidate.memory.peak_phase
    parts = {part: gib(size) for part, size in candidate.memory.phases[phase].parts.items()}
    lines = [
        f"<b>{plot_text(candidate.plan.label())}</b>",
        f"step {format_seconds(candidate.time.total)}: {time_words(candidate, at_most=MAX_TERMS)}",
        f"{phase}, GiB: {memory_words(parts, at_most=MAX_TERMS)}",
    ]
    return "<br>".join(lines)


def draw_plans(planning: Planning) -> PlansFigure:
    """Return the scatter plot. The groups of the fastest plans have a colour each; the remaining groups are "others"."""
    ranking = planning.ranking
    limit = limit_gib(planning)
    grouping_name, group_of = grouping(planning)
    names = dict.fromkeys(group_of(candidate.plan) for candidate in (*ranking.candidates, *ranking.too_big))
    colours = dict(zip(names, GROUP_COLOURS, strict=False))
    near_too_big = [candidate for candidate in ranking.too_big if limit is None or held_gib(candidate) <= FARTHEST * limit]
    candidate_of: dict[int, Candidate] = {}
    dots = []
    for index, candidate in enumerate((*ranking.candidates, *near_too_big)):
        group = group_of(candidate.plan)
        dots.append(
            plots.Candidate(
                label=candidate.plan.label(),
                tokens_per_second=candidate.tokens_per_second,
                peak_gib=held_gib(candidate),
                status="chosen" if index == 0 else "candidate" if index < len(ranking.candidates) else "rejected",
                group=group if group in colours else OTHERS,
            )
        )
        candidate_of[id(dots[-1])] = candidate
    points = placed_candidates(dots)
    front = frontier(points)
    drawn = thin_out(points, keep=front, at_most=MAX_DRAWN)

    def trace(name: str, points: Sequence[PlacedCandidate], **properties: Any) -> Figure:
        return marker_trace(name, points, text=[hover(candidate_of[id(point.candidate)]) for point in points], **properties)

    best = [point for point in drawn if point.candidate.status == "chosen"]
    traces = [
        *group_traces(drawn, colours | {OTHERS: GREY}, trace),
        trace("fastest for its memory", front, mode="lines", line=FRONTIER_LINE),
        trace("best", best, marker={"color": RED, **STAR}),
    ]
    peaks = all_peaks(drawn, limit)
    x = axis("held memory per device, GiB (further left is smaller)", **log_axis_if_wide(peaks))
    y = axis(f"{speed_words(planning)} (further up is faster)", rangemode="tozero", tickformat=",~r")
    limits = limit_line(limit, peaks, is_log=x.get("type") == "log")
    return PlansFigure(
        figure={"data": traces, "layout": layout(x=x, y=y, height=560, hovermode="closest", **limits)},
        num_drawn=len(drawn),
        num_known=len(points),
        num_too_far=len(ranking.too_big) - len(near_too_big),
        grouping=grouping_name,
        front=tuple(candidate_of[id(point.candidate)] for point in front),
    )


def group_traces(drawn: Sequence[PlacedCandidate], colours: Mapping[str, str], trace: Callable[..., Figure]) -> list[Figure]:
    """Return the traces of each group in its colour. Filled dots fit, hollow ones do not; the legend names a group once."""
    traces = []
    for group, colour in colours.items():
        fitting, hollow = (
            [point for point in drawn if point.candidate.group == group and point.candidate.status == status]
            for status in ("candidate", "rejected")
        )
        marker = {"color": colour, "size": 7, "opacity": 0.7}
        if hollow:
            ring = {**marker, "symbol": "circle-open", "opacity": 0.5}
            name = plot_text(f"{group}, too big")
            traces.append(trace(name, hollow, legendgroup=group, showlegend=not fitting, marker=ring))
        if fitting:
            traces.append(trace(plot_text(group), fitting, legendgroup=group, marker=marker))
    return traces


def simulate_passes(plan: Plan, micro_batches: int) -> tuple[Pass, ...]:
    shape = plan.layout
    return simulate(
        shape.pipeline_schedule, ranks=shape.pipeline_parallel, micro_batches=micro_batches, virtual_stages=shape.virtual_stages
    )


def num_drawn(plan: Plan) -> int:
    """Return how many micro-batches are drawn: as many as are readable, but enough to fill the pipeline twice, if MAX_PASSES
    allows that. Interleaved stages take micro-batches in groups, one for each rank."""
    ranks = plan.layout.pipeline_parallel
    stages = plan.layout.virtual_stages
    readable = READABLE_TIME // (3 * stages) - ranks
    if stages > 1:
        readable -= readable % ranks
    possible = MAX_PASSES // (ranks * stages * (3 if plan.layout.pipeline_schedule == "zero_bubble" else 2))
    return min(plan.gradient_accumulation_steps, max(ranks, min(possible, max(2 * ranks, readable))))


def pass_label(step: Pass, virtual_stages: int) -> str:
    return f"{step.micro_batch + 1}" + (f".{step.chunk + 1}" if virtual_stages > 1 else "")


def schedule_figure(plan: Plan) -> Figure:
    """Return a bar for each pass of each rank over time."""
    passes = simulate_passes(plan, num_drawn(plan))
    stages = plan.layout.virtual_stages
    traces = []
    for kind, (words, colour) in KINDS.items():
        for chunk in range(stages):
            bars = [step for step in passes if (step.kind, step.chunk) == (kind, chunk)]
            if bars:
                traces.append(
                    {
                        "type": "bar",
                        "orientation": "h",
                        "name": words + (f", stage {chunk + 1} of its rank" if stages > 1 else ""),
                        "y": [bar.rank for bar in bars],
                        "x": [bar.duration for bar in bars],
                        "base": [bar.start for bar in bars],
                        "width": 0.92,
                        "text": [pass_label(bar, stages) for bar in bars],
                        "textposition": "inside",
                        "insidetextanchor": "middle",
                        "textangle": 0,
                        "opacity": 1.0 - 0.6 * chunk / stages,
                        "marker": {"color": colour, "line": {"color": "@surface", "width": 1}},
                        "hovertemplate": f"rank %{{y}}, {words} of micro-batch %{{text}}, from %{{base}} on<extra></extra>",
                    }
                )
    ranks = plan.layout.pipeline_parallel
    y = axis("pipeline rank", autorange="reversed", showgrid=False, zeroline=False, **({"dtick": 1} if ranks <= 24 else {}))
    x = axis("time, in forward passes of one stage", zeroline=False)
    height = min(150 + ROW_HEIGHT * ranks, MAX_HEIGHT)
    return {"data": traces, "layout": layout(x=x, y=y, height=height, barmode="overlay", uniformtext=READABLE_TEXT)}
