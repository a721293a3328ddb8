"""Draw the three figures of a run's page: its plans, its memory over time, its loss over tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from upshift.reports.plots import (
    BLUE,
    CURVE_COLOURS,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SKY,
    STAR,
    Candidate,
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
from upshift.reports.run.content import LossCurve, MemoryHistory, MemorySample, Point

MAX_POINTS = 1500
MIN_LABELLED_SHARE = 0.1
KINDS = (("rejected", GREY, "x-thin"), ("possible", SKY, "circle"), ("other mathematics", ORANGE, "diamond-open"))


class CandidatePlot(NamedTuple):
    """The plot of a run's plans. ``num_predicted`` plans have both predictions; ``num_drawn`` of them are drawn."""

    figure: Figure | None
    num_drawn: int
    num_predicted: int


def candidate_plot(candidates: Sequence[Candidate], *, limit_gib: float | None) -> CandidatePlot:
    """Return the plot of all plans that were considered."""
    predicted = placed_candidates(candidates)
    if not predicted:
        return CandidatePlot(figure=None, num_drawn=0, num_predicted=0)
    front = frontier(predicted)
    drawn = thin_out(predicted, keep=front)
    traces = []
    for name, colour, symbol in KINDS:
        points = [point for point in drawn if mark_kind(point.candidate) == name]
        if points:
            line = {"color": colour, "width": 1.2 if symbol == "x-thin" else 0}
            marker = {"color": colour, "size": 6, "symbol": symbol, "opacity": 0.6, "line": line}
            traces.append(marker_trace(name, points, marker=marker))
    if front:
        traces.append(marker_trace("best by memory", front, mode="lines", line={"color": GREEN, "width": 2, "shape": "hv"}))
    traces += tried_marks(drawn)
    peaks = all_peaks(predicted, limit_gib)
    x = axis("peak memory, GiB (further left is smaller)", **log_axis_if_wide(peaks))
    y = axis("tokens per second (further up is faster)", rangemode="tozero", tickformat=",~r")
    limit = limit_line(limit_gib, peaks, is_log=x.get("type") == "log")
    figure = {"data": traces, "layout": layout(x=x, y=y, height=560, hovermode="closest", **limit)}
    return CandidatePlot(figure=figure, num_drawn=len(drawn), num_predicted=len(predicted))


def mark_kind(candidate: Candidate) -> str:
    """Return the name of the kind of mark. The chosen and the tried plans have marks of their own."""
    if candidate.status != "candidate":
        return candidate.status
    return "other mathematics" if candidate.changes_mathematics else "possible"


def tried_marks(points: Sequence[PlacedCandidate]) -> list[Figure]:
    """Return markers of the tried plans at their predictions and at their measurements, joined by lines."""
    pairs = []
    for point in points:
        candidate = point.candidate
        speed = candidate.measured_tokens_per_second
        peak = candidate.measured_peak_gib
        if candidate.status in ("chosen", "tried") and speed is not None and peak is not None:
            pairs.append((point, PlacedCandidate(candidate, speed, peak)))
    traces: list[Figure] = []
    if pairs:
        join_x = [x for predicted_point, measured_point in pairs for x in (predicted_point.peak, measured_point.peak, None)]
        join_y = [y for predicted_point, measured_point in pairs for y in (predicted_point.speed, measured_point.speed, None)]
        line = {"color": "@text", "width": 1}
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": rounded_values(join_x),
                "y": rounded_values(join_y),
                "line": line,
                "hoverinfo": "skip",
                "showlegend": False,
            }
        )
    markers = {"tried": (BLUE, {**STAR, "symbol": "circle", "size": 10}), "chosen": (RED, STAR)}
    for status, (colour, marker) in markers.items():
        predicted = [point for point in points if point.candidate.status == status]
        measured = [measured_point for _, measured_point in pairs if measured_point.candidate.status == status]
        if predicted:
            hollow = {**marker, "color": "@surface", "line": {"color": colour, "width": 2}}
            traces.append(marker_trace(f"{status}, predicted", predicted, marker=hollow))
        if measured:
            traces.append(marker_trace(f"{status}, measured", measured, "measured", marker={**marker, "color": colour}))
    return traces


def moving_mean(points: Sequence[Point], share: float = 0.03) -> list[Point]:
    """Return the mean of the points within ``share`` of the curve around each. Unknown points are left out."""
    known_points = [(x, y) for x, y in points if y is not None]
    max_half_width = round(len(known_points) * share / 2)
    sums = [0.0]
    for _, y in known_points:
        sums.append(sums[-1] + y)
    smooth: list[Point] = []
    for index, (x, _) in enumerate(known_points):
        half_width = min(max_half_width, index, len(known_points) - 1 - index)
        low = index - half_width
        high = index + half_width + 1
        smooth.append((x, (sums[high] - sums[low]) / (high - low)))
    return smooth


def loss_traces(index: int, curve: LossCurve) -> list[Figure]:
    """Return the traces that have points: the training loss, lightly, its moving mean, and the held-out loss."""
    colour = CURVE_COLOURS[index % len(CURVE_COLOURS)]
    name = plot_text(curve.name)
    each_step = {
        "name": f"{name}, each step",
        "mode": "lines",
        "line": {"color": colour, "width": 1},
        "opacity": 0.28,
        "hoverinfo": "skip",
        "showlegend": False,
    }
    mean = {
        "name": f"{name}, training",
        "mode": "lines",
        "line": {"color": colour, "width": 2.4},
        "hovertemplate": "%{y:.4f}",
    }
    held_out = {
        "name": f"{name}, held out",
        "mode": "lines+markers",
        "line": {"color": colour, "width": 1.6, "dash": "dot"},
        "marker": {"size": 9, "symbol": "diamond", "line": {"color": "@surface", "width": 1}},
        "hovertemplate": "%{y:.4f}",
    }
    series = ((curve.training, each_step), (moving_mean(curve.training), mean), (curve.held_out, held_out))
    traces = []
    for points, style in series:
        if points:
            step = math.ceil(len(points) / MAX_POINTS)
            drawn_points = [*points[:-1:step], points[-1]]
            xs = rounded_values(x for x, _ in drawn_points)
            ys = rounded_values(y for _, y in drawn_points)
            traces.append({"type": "scatter", "legendgroup": str(index), **style, "x": xs, "y": ys})
    return traces


def loss_figure(curves: Sequence[LossCurve]) -> Figure | None:
    """Return loss over tokens, or None without points."""
    traces = [trace for index, curve in enumerate(curves) for trace in loss_traces(index, curve)]
    if not traces:
        return None
    x = axis("tokens trained", rangemode="tozero", tickformat="~s", unifiedhovertitle={"text": "%{x:.4~s} tokens"})
    return {"data": traces, "layout": layout(x=x, y=axis("loss per token"), hovermode="x unified")}


def sample_height(sample: MemorySample) -> float:
    return max(sum(sample.parts.values()), sample.resident_gib or 0.0)


def thin_samples(samples: Sequence[MemorySample]) -> list[MemorySample]:
    """Return at most MAX_POINTS samples: the highest of each group of neighbors, so that no peak is lost."""
    stretch = math.ceil(len(samples) / MAX_POINTS) or 1
    groups = (samples[start : start + stretch] for start in range(0, len(samples), stretch))
    return [max(group, key=sample_height) for group in groups]


def phase_spans(samples: Sequence[MemorySample]) -> list[tuple[str, float, float]]:
    """Return (phase, start, end) in seconds. A phase lasts until the next one begins."""
    runs = [(phase, [sample.seconds for sample in group]) for phase, group in groupby(samples, lambda s: s.phase)]
    ends = [seconds[0] for _, seconds in runs[1:]] + [runs[-1][1][-1]] if runs else []
    return [(phase, seconds[0], end) for (phase, seconds), end in zip(runs, ends, strict=True)]


def phase_marks(samples: Sequence[MemorySample]) -> Figure:
    """Return, for a layout, the shade of every second phase, and the names of phases that have room for them."""
    spans = phase_spans(samples)
    length = spans[-1][2] - spans[0][1] or 1.0
    shapes = [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": start,
            "x1": end,
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "fillcolor": "@panel",
            "line": {"width": 0},
        }
        for _, start, end in spans[::2]
    ]
    annotations = [
        {
            "x": (start + end) / 2,
            "y": 1,
            "xref": "x",
            "yref": "paper",
            "yanchor": "top",
            "showarrow": False,
            "text": plot_text(phase),
            "font": {"color": "@muted", "size": 12},
        }
        for phase, start, end in spans
        if (end - start) / length >= MIN_LABELLED_SHARE
    ]
    return {"shapes": shapes, "annotations": annotations}


def memory_figure(history: MemoryHistory, *, limit_gib: float | None) -> Figure | None:
    """Return memory over the run: stacked parts, resident memory, the predicted peak, the limit. None without samples."""
    if not history.samples:
        return None
    samples = thin_samples(history.samples)
    seconds = rounded_values(sample.seconds for sample in samples)
    curve = {"type": "scatter", "mode": "lines", "x": seconds, "hovertemplate": "%{y:.2f} GiB"}
    traces: list[Figure] = []
    for name, colour in part_colours(name for sample in samples for name in sample.parts).items():
        heights = rounded_values(sample.parts.get(name, 0.0) for sample in samples)
        traces.append(
            {**curve, "name": plot_text(name), "stackgroup": "parts", "line": {"width": 0}, "fillcolor": colour, "y": heights}
        )
    if any(sample.resident_gib is not None for sample in samples):
        resident = rounded_values(sample.resident_gib for sample in samples)
        traces.append(
            {
                **curve,
                "name": "measured, resident",
                "y": resident,
                "line": {"color": "@text", "width": 2},
                "text": [plot_text(sample.phase) for sample in samples],
                "hovertemplate": "%{y:.2f} GiB (%{text})",
            }
        )
    top = max(sample_height(sample) for sample in samples)
    levels = [("predicted", history.predicted_peak_gib, {"color": RED, "width": 2, "dash": "dash"})]
    if limit_gib is not None and limit_gib <= 2 * max(top, history.predicted_peak_gib or 0.0):  # a far line flattens the curves
        levels.append(("host limit", limit_gib, {"color": "@muted", "width": 2, "dash": "dot"}))
    for name, level, line in levels:
        if level is not None:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [seconds[0], seconds[-1]],
                    "y": rounded_values([level, level]),
                    "line": line,
                    "name": f"{name}, {level:.2f} GiB",
                    "hoverinfo": "skip",
                }
            )
            top = max(top, level)
    y = axis("GiB", range=[0, round_value(top * 1.12) or 1])
    x = axis("seconds since the start", unifiedhovertitle={"text": "%{x:.1f} s"}, showgrid=False)
    return {"data": traces, "layout": layout(x=x, y=y, hovermode="x unified", **phase_marks(samples))}
