"""Stacked bars of one plan: memory by part over the phases, and the terms of a step's time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

from upshift.benchmarking.page_plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    READABLE_TEXT,
    RED,
    SKY,
    VIOLET,
    YELLOW,
    Figure,
    axis,
    column,
    layout,
    part_colours,
    rounded,
    shown,
)
from upshift.cli.plan_page.words import SMALL_SHARE, limit_of_one, memory_by_phase, parts_of
from upshift.planning.planner import Planning
from upshift.planning.rank import Candidate
from upshift.units import gib

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
Selected = Callable[[Callable[[Candidate], Any]], Any]
"""What a function says of the candidate that the page's controls select."""

FAR_LIMIT = 3.0  # times what is held: a line so far away would flatten the bars
TIME_HEIGHT = 250


def memory_traces(memory: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """One trace a part, one bar a phase."""
    return [
        {"type": "bar", "name": shown(part), "x": [shown(phase) for phase in memory], "marker": {"color": colour},
         "y": column([row.get(part, 0.0) for row in memory.values()]), "hovertemplate": "%{y:.2f} GiB"}
        for part, colour in part_colours(parts_of(memory)).items()
    ]  # fmt: skip


def levels(planning: Planning, candidate: Candidate) -> list[tuple[str, float]]:
    """Horizontal lines: what the process or device holds, and what it may hold."""
    held, limit = gib(candidate.resident), limit_of_one(planning, candidate)
    found = [(f"held at most, {held:.2f} GiB", held)]
    if limit is not None and limit <= FAR_LIMIT * held:
        found.append((f"limit, {limit:.2f} GiB", limit))
    return found


def level_shapes(lines: Sequence[tuple[str, float]]) -> list[Figure]:
    return [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": rounded(level), "y1": rounded(level),
         "line": {"color": RED if index else "@muted", "width": 1.6, "dash": "dash" if index else "dot"},
         "label": {"text": name, "textposition": "middle" if index else "start", "yanchor": "bottom",
                   "font": {"color": "@muted", "size": 12}}}
        for index, (name, level) in enumerate(lines)
    ]  # fmt: skip


def memory_figure(selected: Selected, planning: Planning) -> Figure:
    return {
        "data": selected(lambda one: memory_traces(memory_by_phase(planning, one))),
        "layout": layout(
            x=axis("phase of the job", showgrid=False),
            y=axis("GiB", range=selected(lambda one: [0, rounded(1.12 * max(level for _, level in levels(planning, one)))])),
            height=440, barmode="stack", bargap=0.45, hovermode="x unified",
            shapes=selected(lambda one: level_shapes(levels(planning, one))),
        ),
    }  # fmt: skip


def time_traces(candidate: Candidate) -> list[Figure]:
    """One trace a term, the binding one first."""
    total, spare = candidate.time.total, cycle((RED, VIOLET, YELLOW, PINK, GREY))
    terms = sorted(candidate.time.terms.items(), key=lambda item: -item[1])
    return [
        {"type": "bar", "orientation": "h", "y": [""], "x": column([seconds]),
         "name": shown(name) + (" (binding)" if name == candidate.time.binding_term else ""),
         "marker": {"color": TERM_COLOURS.get(name) or next(spare), "line": {"color": "@surface", "width": 1}},
         "text": [f"{seconds / total:.0%}"], "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
         "hovertemplate": f"%{{x:.4g}} s, {seconds / total:.1%}"}
        for name, seconds in terms
        if seconds > SMALL_SHARE * total
    ]  # fmt: skip


def time_figure(selected: Selected) -> Figure:
    x = axis("seconds of an optimizer step", rangemode="tozero")
    y = axis("", showticklabels=False)
    return {
        "data": selected(time_traces),
        "layout": layout(x=x, y=y, height=TIME_HEIGHT, barmode="stack", uniformtext=READABLE_TEXT),
    }
