"""Pieces of Plotly figures as plain data, made without any library: axes, colours, and scatter plots of plans.

A colour that starts with "@" is a colour of the page and follows its colour scheme. The others are Okabe and Ito's,
which people with any colour vision can distinguish, and which stand out on white and on black.

A scatter plot shows plans by predicted speed and memory. Thousands of plans would cover each other: beyond MAX_DRAWN, one plan
stands for all that share a small cell of the picture. The chosen plan, the tried ones and the frontier are always drawn.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any, Literal, NamedTuple

from pydantic import NonNegativeFloat

from upshift.value import Value

Figure = dict[str, Any]

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PINK = "#CC79A7"
RED = "#D55E00"
SKY = "#56B4E9"
GREY = "#8A929E"
YELLOW = "#C9B800"
VIOLET = "#7A5EA8"
BROWN = "#8C5A3C"
PART_COLOURS = {
    "process base": GREY,
    "weights": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "activations": ORANGE,
    "loss": RED,
    "workspace": PINK,
    "communication": YELLOW,
    "batch": VIOLET,
    "libraries": BROWN,
}
CURVE_COLOURS = (GREY, BLUE, RED, GREEN, PINK, ORANGE, SKY)
FONTS = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
READABLE_TEXT = {"minsize": 9, "mode": "hide"}  # Plotly leaves out smaller texts in bars


def plot_text(text: str) -> str:
    """Return text for a label of a plot. Plotly reads some HTML in labels, so the text is escaped here, too."""
    return html.escape(text, quote=False)


def axis(title: str, **properties: Any) -> Figure:
    return {
        "title": {"text": title, "standoff": 10, "font": {"size": 13}},
        "gridcolor": "@line",
        "zerolinecolor": "@line",
        "linecolor": "@line",
        "automargin": True,
        **properties,
    }


def log_axis_if_wide(values: Sequence[float]) -> Figure:
    """Return a logarithmic axis with ticks at 1, 2, 5 if the values span more than a factor of 12, else one from zero."""
    if not values or min(values) <= 0 or max(values) / min(values) <= 12:
        return {"rangemode": "tozero"}
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    steps = (1, 2, 5) if high - low <= 4 else (1,)
    ticks = [float(f"{step}e{power}") for power in range(low, high + 1) for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def layout(*, x: Figure, y: Figure, height: int = 460, **properties: Any) -> Figure:
    return {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 28, "b": 8},
        "paper_bgcolor": "@surface",
        "plot_bgcolor": "@surface",
        "font": {"color": "@text", "size": 13, "family": FONTS},
        "legend": {"orientation": "h", "x": 0, "y": 1.04, "yanchor": "bottom", "bgcolor": "@surface"},
        "hoverlabel": {
            "font": {"color": "@text", "family": FONTS},
            "bgcolor": "@panel",
            "bordercolor": "@line",
            "align": "left",
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "@muted", "activecolor": "@text", "orientation": "v"},
        "uirevision": "keep",
        "xaxis": x,
        "yaxis": y,
        **properties,
    }


def round_value(value: float | None) -> float | None:
    """Return a number with six digits, or None, which is a gap in the drawing, for one that is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def rounded_values(values: Iterable[float | None]) -> list[float | None]:
    return [round_value(value) for value in values]


def part_colours(part_names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each part of memory: the usual parts from the bottom up, then the others as they appear."""
    names = dict.fromkeys(part_names)
    spare = cycle((YELLOW, RED, GREEN, PINK))
    usual = {name: colour for name, colour in PART_COLOURS.items() if name in names}
    return usual | {name: next(spare) for name in names if name not in usual}


def choice(control: str, choices: Iterable[Any]) -> Figure:
    """Return data for a figure or words that stand for the item of ``choices`` that the control of this id selects."""
    return {"by": control, "choices": list(choices)}


MAX_DRAWN = 2500
FAR_LIMIT = 2.5  # times the memory of the largest plan: the axis does not reach to a limit beyond, and ends where plans end
CELLS_PER_AXIS = (96, 64, 48, 32, 24, 16, 12, 8)
STAR = {"size": 17, "symbol": "star", "line": {"color": "@text", "width": 1.2}}
FRONTIER_LINE = {"color": "@text", "width": 1.6, "shape": "hv"}
Status = Literal["chosen", "tried", "candidate", "rejected"]


class Candidate(Value):
    """One plan that was considered, with its prediction and, if it was tried, its measurement.

    The plot may show one plan for several of the same ``group`` at nearly the same place.
    """

    label: str
    status: Status = "candidate"
    tokens_per_second: NonNegativeFloat | None = None
    peak_gib: NonNegativeFloat | None = None
    measured_tokens_per_second: NonNegativeFloat | None = None
    measured_peak_gib: NonNegativeFloat | None = None
    changes_mathematics: bool = False
    group: str = ""
    reason: str = ""


class PlacedCandidate(NamedTuple):
    """A candidate with the two numbers that place it in the plot."""

    candidate: Candidate
    speed: float
    peak: float


def placed_candidates(candidates: Sequence[Candidate]) -> list[PlacedCandidate]:
    """Return the candidates with both predictions."""
    return [
        PlacedCandidate(candidate, candidate.tokens_per_second, candidate.peak_gib)
        for candidate in candidates
        if candidate.tokens_per_second is not None and candidate.peak_gib is not None
    ]


def frontier(points: Sequence[PlacedCandidate]) -> list[PlacedCandidate]:
    """Return the plans that no other beats in both speed and memory, by growing memory. Rejected plans do not count."""
    best: list[PlacedCandidate] = []
    for point in sorted(points, key=lambda point: (point.peak, -point.speed)):
        if point.candidate.status != "rejected" and (not best or point.speed > best[-1].speed):
            best.append(point)
    return best


def cell_indices(values: Sequence[float], count: int) -> list[int]:
    """Return for each value the index of its interval, of ``count`` equal intervals."""
    low = min(values)
    high = max(values)
    return [0 if high == low else int((value - low) / (high - low) * count) for value in values]


def thin_out(
    points: Sequence[PlacedCandidate], *, keep: Sequence[PlacedCandidate], at_most: int = MAX_DRAWN
) -> list[PlacedCandidate]:
    """Return the fastest point of each kind in each cell of the picture, and all that are in ``keep``, chosen or tried."""
    points_left = list(points)
    for count in CELLS_PER_AXIS:
        if len(points_left) <= at_most:
            break
        rows = cell_indices([point.speed for point in points], count)
        columns = cell_indices([math.log1p(point.peak) for point in points], count)
        fastest: dict[tuple[int, int, str, str, bool], PlacedCandidate] = {}
        for point, row, column in zip(points, rows, columns, strict=True):
            cell = (row, column, point.candidate.status, point.candidate.group, point.candidate.changes_mathematics)
            if cell not in fastest or fastest[cell].speed < point.speed:
                fastest[cell] = point
        retained_ids = {id(point.candidate) for point in (*keep, *fastest.values())}
        points_left = [
            point for point in points if id(point.candidate) in retained_ids or point.candidate.status in ("chosen", "tried")
        ]
    return points_left


def hover_text(candidate: Candidate) -> str:
    notes = [f"<b>{plot_text(candidate.label)}</b>"]
    if candidate.changes_mathematics:
        notes.append("changes the mathematics")
    if candidate.reason:
        notes.append(plot_text(candidate.reason))
    return "<br>".join(notes)


def marker_trace(name: str, points: Sequence[PlacedCandidate], verb: str = "predicted", **properties: Any) -> Figure:
    """Return a trace with a marker for each point. ``properties`` override its own."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": rounded_values(point.peak for point in points),
        "y": rounded_values(point.speed for point in points),
        "text": [hover_text(point.candidate) for point in points],
        "hovertemplate": f"%{{text}}<br>{verb} %{{y:,.0f}} tokens/s, %{{x:.2f}} GiB<extra></extra>",
        **properties,
    }


def all_peaks(points: Sequence[PlacedCandidate], limit_gib: float | None) -> list[float]:
    """Return the memory values that the axis shows: of every plan, and the limit if it is not far from all of them."""
    measured = [point.candidate.measured_peak_gib for point in points]
    peaks = [point.peak for point in points] + [peak for peak in measured if peak is not None]
    is_shown = limit_gib is not None and (not peaks or limit_gib <= FAR_LIMIT * max(peaks))
    return [*peaks, limit_gib] if limit_gib is not None and is_shown else peaks


def limit_line(limit_gib: float | None, peaks: Sequence[float], *, is_log: bool) -> Figure:
    """Return the shape and the annotation of the memory limit, for a layout.

    ``peaks``: of ``all_peaks``. If the limit is not among them, a note at the right edge names it."""
    if limit_gib is None or (is_log and limit_gib <= 0):
        return {}
    if limit_gib not in peaks:
        return {"annotations": [_far_limit_note(limit_gib)]}
    line = {"color": "@muted", "width": 1.5, "dash": "dash"}
    shape = {"type": "line", "xref": "x", "yref": "paper", "x0": limit_gib, "x1": limit_gib, "y0": 0, "y1": 1, "line": line}
    note = {
        "text": f"memory limit, {limit_gib:.2f} GiB",
        "font": {"color": "@muted", "size": 12},
        "textangle": -90,
        # A shape takes the value on a logarithmic axis, an annotation its logarithm.
        "x": math.log10(limit_gib) if is_log else limit_gib,
        "xref": "x",
        "xanchor": "right",
        "xshift": -5,
        "y": 0,
        "yref": "paper",
        "yanchor": "bottom",
        "bgcolor": "@surface",
        "showarrow": False,
    }
    return {"shapes": [shape], "annotations": [note]}


def _far_limit_note(limit_gib: float) -> Figure:
    return {
        "text": f"memory limit, {limit_gib:.2f} GiB, further right \N{RIGHTWARDS ARROW}",
        "font": {"color": "@muted", "size": 12},
        "x": 1,
        "xref": "paper",
        "xanchor": "right",
        "y": 0,
        "yref": "paper",
        "yanchor": "bottom",
        "bgcolor": "@surface",
        "showarrow": False,
    }
