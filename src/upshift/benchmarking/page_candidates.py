"""The plot of all plans that were considered, predicted speed over predicted memory, and which it leaves out.

Thousands of plans lie on top of each other: beyond a few thousand, the plot shows one of those that share a small cell
of the picture. The chosen plan, the tried ones and the frontier are never left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from upshift.benchmarking.page_content import Candidate
from upshift.benchmarking.page_plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SKY,
    Figure,
    axis,
    column,
    layout,
    log_axis_if_wide,
    shown,
)

MAX_DRAWN = 2500
CELLS_PER_AXIS = (96, 64, 48, 32, 24, 16, 12, 8)
KINDS = (("rejected", GREY, "x-thin"), ("possible", SKY, "circle"), ("other mathematics", ORANGE, "diamond-open"))


class Placed(NamedTuple):
    """A candidate whose two predictions are known and can be drawn."""

    candidate: Candidate
    speed: float
    peak: float


class CandidatePlot(NamedTuple):
    figure: Figure | None
    num_drawn: int
    num_known: int


def placed(candidates: Sequence[Candidate]) -> list[Placed]:
    return [
        Placed(one, one.tokens_per_second, one.peak_gib)
        for one in candidates
        if one.tokens_per_second is not None and one.peak_gib is not None
    ]


def frontier(points: Sequence[Placed]) -> list[Placed]:
    """Plans, not rejected, that no other beats in both speed and memory; by growing memory."""
    best: list[Placed] = []
    for point in sorted(points, key=lambda one: (one.peak, -one.speed)):
        if point.candidate.status != "rejected" and (not best or point.speed > best[-1].speed):
            best.append(point)
    return best


def cells(values: Sequence[float], count: int) -> list[int]:
    """In which of ``count`` equal stretches each value lies."""
    low, high = min(values), max(values)
    return [0 if high == low else int((value - low) / (high - low) * count) for value in values]


def thinned(points: Sequence[Placed], *, keep: Sequence[Placed], at_most: int = MAX_DRAWN) -> list[Placed]:
    """One point per cell of the picture and kind, the fastest; those to keep, and the chosen and tried, always."""
    left = list(points)
    kept_ids = {id(one.candidate) for one in keep}
    for count in CELLS_PER_AXIS:
        if len(left) <= at_most:
            break
        places = zip(
            cells([one.speed for one in points], count),
            cells([math.log1p(one.peak) for one in points], count),
            (one.candidate for one in points),
            strict=True,
        )
        fastest: dict[tuple[int, int, str, str, bool], Placed] = {}
        for point, (row, col, one) in zip(points, places, strict=True):
            place = (row, col, one.status, one.group, one.changes_mathematics)
            if place not in fastest or fastest[place].speed < point.speed:
                fastest[place] = point
        left_ids = kept_ids | {id(point.candidate) for point in fastest.values()}
        left = [p for p in points if id(p.candidate) in left_ids or p.candidate.status in ("chosen", "tried")]
    return left


def kind(one: Candidate) -> str:
    """The name of the kind of mark; the chosen and the tried have their own."""
    if one.status != "candidate":
        return one.status
    return "other mathematics" if one.changes_mathematics else "possible"


def hover(one: Candidate) -> str:
    notes = [f"<b>{shown(one.label)}</b>"]
    if one.changes_mathematics:
        notes.append("changes the mathematics")
    if one.reason:
        notes.append(shown(one.reason))
    return "<br>".join(notes)


def marks(name: str, points: Sequence[tuple[Candidate, float, float]], verb: str, **more: Any) -> Figure:
    """One trace of points (candidate, speed, peak)."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": column([peak for _, _, peak in points]),
        "y": column([speed for _, speed, _ in points]),
        "text": [hover(one) for one, _, _ in points],
        "hovertemplate": f"%{{text}}<br>{verb} %{{y:,.0f}} tokens/s, %{{x:.2f}} GiB<extra></extra>",
        **more,
    }


def tried_marks(points: Sequence[Placed]) -> list[Figure]:
    """Tried plans where they were predicted and where they were measured, joined; the chosen one stands out."""
    tried = [one for one in points if one.candidate.status in ("chosen", "tried")]
    both = [
        (one, one.candidate.measured_tokens_per_second, one.candidate.measured_peak_gib)
        for one in tried
        if one.candidate.measured_tokens_per_second is not None and one.candidate.measured_peak_gib is not None
    ]
    join_x: list[float | None] = [x for one, _, peak in both for x in (one.peak, peak, None)]
    join_y: list[float | None] = [y for one, speed, _ in both for y in (one.speed, speed, None)]
    edge = {"color": "@text", "width": 1.2}
    traces: list[Figure] = []
    if both:
        traces.append({"type": "scatter", "mode": "lines", "x": column(join_x), "y": column(join_y),
                       "line": {"color": "@text", "width": 1}, "hoverinfo": "skip", "showlegend": False})  # fmt: skip
    for status, colour, symbol, size in (("tried", BLUE, "circle", 10), ("chosen", RED, "star", 17)):
        here = [one for one in tried if one.candidate.status == status]
        there = [(one.candidate, speed, peak) for one, speed, peak in both if one.candidate.status == status]
        if here:
            traces.append(marks(f"{status}, predicted", here, "predicted",
                                marker={"color": "@surface", "size": size, "symbol": symbol,
                                        "line": {"color": colour, "width": 2}}))  # fmt: skip
        if there:
            traces.append(marks(f"{status}, measured", there, "measured",
                                marker={"color": colour, "size": size, "symbol": symbol, "line": edge}))  # fmt: skip
    return traces


def all_peaks(points: Sequence[Placed], limit_gib: float | None) -> list[float]:
    measured = [one.candidate.measured_peak_gib for one in points]
    return [one.peak for one in points] + [peak for peak in (*measured, limit_gib) if peak is not None]


def limit_marks(limit_gib: float | None, *, is_log: bool) -> Figure:
    if limit_gib is None or (is_log and limit_gib <= 0):
        return {}
    line = {"type": "line", "xref": "x", "yref": "paper", "x0": limit_gib, "x1": limit_gib, "y0": 0, "y1": 1,
            "line": {"color": "@muted", "width": 1.5, "dash": "dash"}}  # fmt: skip
    # A shape takes the value on a logarithmic axis, an annotation its logarithm.
    note = {"x": math.log10(limit_gib) if is_log else limit_gib, "y": 0, "xref": "x", "yref": "paper",
            "xanchor": "right", "xshift": -5, "yanchor": "bottom", "textangle": -90,
            "bgcolor": "@surface", "showarrow": False, "text": f"memory limit, {limit_gib:.2f} GiB",
            "font": {"color": "@muted", "size": 12}}  # fmt: skip
    return {"shapes": [line], "annotations": [note]}


def candidate_plot(candidates: Sequence[Candidate], *, limit_gib: float | None) -> CandidatePlot:
    known = placed(candidates)
    if not known:
        return CandidatePlot(figure=None, num_drawn=0, num_known=0)
    edge = frontier(known)
    drawn = thinned(known, keep=edge)
    traces: list[Figure] = []
    for name, colour, symbol in KINDS:
        points = [point for point in drawn if kind(point.candidate) == name]
        if points:
            line = {"color": colour, "width": 1.2 if symbol == "x-thin" else 0}
            marker = {"color": colour, "size": 6, "symbol": symbol, "opacity": 0.6, "line": line}
            traces.append(marks(name, points, "predicted", marker=marker))
    if edge:
        line = {"color": GREEN, "width": 2, "shape": "hv"}
        traces.append(marks("best by memory", edge, "predicted", mode="lines", line=line))
    traces += tried_marks(drawn)
    peaks = all_peaks(known, limit_gib)
    x = axis("peak memory, GiB (further left is smaller)", **log_axis_if_wide(peaks))
    y = axis("tokens per second (further up is faster)", rangemode="tozero", tickformat=",~r")
    more = limit_marks(limit_gib, is_log=x.get("type") == "log")
    figure = {"data": traces, "layout": layout(x=x, y=y, height=560, hovermode="closest", **more)}
    return CandidatePlot(figure=figure, num_drawn=len(drawn), num_known=len(known))
