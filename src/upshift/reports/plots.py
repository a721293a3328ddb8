"""Pieces of Plotly figures as plain data, made without any library.

A colour that starts with "@" is a colour of the page and follows its colour scheme. The others are Okabe and Ito's,
which people with any colour vision can tell apart, and which stand out on white and on black.

Scatter plots of plans: predicted speed over predicted memory, the frontier, and which plans are left out.

Thousands of plans lie on top of each other: beyond a few thousand, the plot shows one of those that share a small cell
of the picture. The chosen plan, the tried ones and the frontier are never left out.
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
PART_COLOURS = {
    "process base": GREY, "weights": BLUE, "gradients": SKY, "optimizer": GREEN, "activations": ORANGE, "loss": RED,
    "workspace": PINK, "communication": YELLOW, "batch": VIOLET,
}  # fmt: skip
CURVE_COLOURS = (GREY, BLUE, RED, GREEN, PINK, ORANGE, SKY)
FONTS = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
READABLE_TEXT = {"minsize": 9, "mode": "hide"}  # in bars: smaller texts are left out


def plot_text(text: str) -> str:
    """Return text for a label of a plot. Plotly reads some HTML there, so that it is escaped once more."""
    return html.escape(text, quote=False)


def axis(title: str, **more: Any) -> Figure:
    return {
        "title": {"text": title, "standoff": 10, "font": {"size": 13}},
        "gridcolor": "@line",
        "zerolinecolor": "@line",
        "linecolor": "@line",
        "automargin": True,
        **more,
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


def layout(*, x: Figure, y: Figure, height: int = 460, **more: Any) -> Figure:
    return {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 28, "b": 8},
        "paper_bgcolor": "@surface",
        "plot_bgcolor": "@surface",
        "font": {"color": "@text", "size": 13, "family": FONTS},
        "legend": {"orientation": "h", "x": 0, "y": 1.04, "yanchor": "bottom", "bgcolor": "@surface"},
        "hoverlabel": {
            "font": {"color": "@text", "family": FONTS}, "bgcolor": "@panel", "bordercolor": "@line", "align": "left",
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "@muted", "activecolor": "@text", "orientation": "v"},
        "uirevision": "keep",
        "xaxis": x,
        "yaxis": y,
        **more,
    }  # fmt: skip


def rounded(value: float | None) -> float | None:
    """Return six digits of a number, and None, which is a gap in the drawing, for what is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def column(values: Iterable[float | None]) -> list[float | None]:
    return [rounded(value) for value in values]


def part_colours(parts: Iterable[str]) -> dict[str, str]:
    """Return a colour for each part of memory: usual parts from the ground up, then the others as they appear."""
    names = dict.fromkeys(parts)
    spare = cycle((YELLOW, RED, GREEN, PINK))
    usual = {part: colour for part, colour in PART_COLOURS.items() if part in names}
    return usual | {part: next(spare) for part in names if part not in usual}


def chosen_by(control: str, choices: Iterable[Any]) -> Figure:
    """Return, for a figure or for words, the one of ``choices`` that the control of this id selects."""
    return {"by": control, "choices": list(choices)}


MAX_DRAWN = 2500
CELLS_PER_AXIS = (96, 64, 48, 32, 24, 16, 12, 8)
STAR = {"size": 17, "symbol": "star", "line": {"color": "@text", "width": 1.2}}
FRONTIER_LINE = {"color": "@text", "width": 1.6, "shape": "hv"}
Status = Literal["chosen", "tried", "candidate", "rejected"]


class Candidate(Value):
    """One plan that was considered, with its prediction and, if it was tried, its measurement.

    Of plans of one ``group`` the plot may show one for several at nearly the same place.
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


class Placed(NamedTuple):
    """A candidate with two numbers that can be drawn."""

    candidate: Candidate
    speed: float
    peak: float


def placed(candidates: Sequence[Candidate]) -> list[Placed]:
    """Return the candidates with both predictions."""
    return [
        Placed(candidate, candidate.tokens_per_second, candidate.peak_gib)
        for candidate in candidates
        if candidate.tokens_per_second is not None and candidate.peak_gib is not None
    ]


def frontier(points: Sequence[Placed]) -> list[Placed]:
    """Return the plans, not rejected, that no other beats in both speed and memory, by growing memory."""
    best: list[Placed] = []
    for point in sorted(points, key=lambda point: (point.peak, -point.speed)):
        if point.candidate.status != "rejected" and (not best or point.speed > best[-1].speed):
            best.append(point)
    return best


def cells(values: Sequence[float], count: int) -> list[int]:
    """Return in which of ``count`` equal stretches each value lies."""
    low = min(values)
    high = max(values)
    return [0 if high == low else int((value - low) / (high - low) * count) for value in values]


def thinned(points: Sequence[Placed], *, keep: Sequence[Placed], at_most: int = MAX_DRAWN) -> list[Placed]:
    """Return the fastest point per cell of the picture and kind, and always those to keep, the chosen and the tried."""
    left = list(points)
    for count in CELLS_PER_AXIS:
        if len(left) <= at_most:
            break
        rows = cells([point.speed for point in points], count)
        columns = cells([math.log1p(point.peak) for point in points], count)
        fastest: dict[tuple[int, int, str, str, bool], Placed] = {}
        for point, row, col in zip(points, rows, columns, strict=True):
            place = (row, col, point.candidate.status, point.candidate.group, point.candidate.changes_mathematics)
            if place not in fastest or fastest[place].speed < point.speed:
                fastest[place] = point
        kept_ids = {id(point.candidate) for point in (*keep, *fastest.values())}
        left = [p for p in points if id(p.candidate) in kept_ids or p.candidate.status in ("chosen", "tried")]
    return left


def hover(candidate: Candidate) -> str:
    notes = [f"<b>{plot_text(candidate.label)}</b>"]
    if candidate.changes_mathematics:
        notes.append("changes the mathematics")
    if candidate.reason:
        notes.append(plot_text(candidate.reason))
    return "<br>".join(notes)


def marks(name: str, points: Sequence[Placed], verb: str = "predicted", **more: Any) -> Figure:
    """Return one trace of points."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": column(point.peak for point in points),
        "y": column(point.speed for point in points),
        "text": [hover(point.candidate) for point in points],
        "hovertemplate": f"%{{text}}<br>{verb} %{{y:,.0f}} tokens/s, %{{x:.2f}} GiB<extra></extra>",
        **more,
    }


def all_peaks(points: Sequence[Placed], limit_gib: float | None) -> list[float]:
    measured = [point.candidate.measured_peak_gib for point in points]
    return [point.peak for point in points] + [peak for peak in (*measured, limit_gib) if peak is not None]


def limit_marks(limit_gib: float | None, *, is_log: bool) -> Figure:
    """Return the shape and the annotation of the memory limit, for a layout."""
    if limit_gib is None or (is_log and limit_gib <= 0):
        return {}
    line = {"color": "@muted", "width": 1.5, "dash": "dash"}
    shape = {"type": "line", "xref": "x", "yref": "paper", "x0": limit_gib, "x1": limit_gib, "y0": 0, "y1": 1, "line": line}
    note = {
        "text": f"memory limit, {limit_gib:.2f} GiB", "font": {"color": "@muted", "size": 12}, "textangle": -90,
        # A shape takes the value on a logarithmic axis, an annotation its logarithm.
        "x": math.log10(limit_gib) if is_log else limit_gib, "xref": "x", "xanchor": "right", "xshift": -5,
        "y": 0, "yref": "paper", "yanchor": "bottom", "bgcolor": "@surface", "showarrow": False,
    }  # fmt: skip
    return {"shapes": [shape], "annotations": [note]}
