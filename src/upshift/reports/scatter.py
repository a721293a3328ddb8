"""Scatter plots of plans: predicted speed over predicted memory, the frontier, and which plans are left out.

Thousands of plans lie on top of each other: beyond a few thousand, the plot shows one of those that share a small cell
of the picture. The chosen plan, the tried ones and the frontier are never left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import NonNegativeFloat

from upshift.reports.plots import Figure, column, plot_text
from upshift.value import Value

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
    low, high = min(values), max(values)
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
