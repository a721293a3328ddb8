"""The report's three plots, as Plotly figures in plain data, built without any library. Inputs: a page's values.

A colour that starts with "@" is a colour of the page and follows its colour scheme. The others are Okabe and Ito's,
which people with any colour vision can tell apart, and which stand out on white and on black.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from itertools import cycle, groupby
from typing import Any

from upshift.benchmarking.page_content import LossCurve, MemoryLife, MemorySample, Point

Figure = dict[str, Any]

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
RED, SKY, GREY, YELLOW = "#D55E00", "#56B4E9", "#8A929E", "#C9B800"
VIOLET = "#7A5EA8"
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
}
CURVE_COLOURS = (GREY, BLUE, RED, GREEN, PINK, ORANGE, SKY)
FONTS = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
MAX_POINTS = 1500
MIN_LABELLED_SHARE = 0.1
READABLE_TEXT = {"minsize": 9, "mode": "hide"}  # in bars: smaller ones stay empty


def shown(text: str) -> str:
    """Text for a label of a plot: Plotly reads some HTML there."""
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
    """A logarithmic axis with ticks at 1, 2, 5 when the values span more than a factor of 12, else one from zero."""
    if not values or min(values) <= 0 or max(values) / min(values) <= 12:
        return {"rangemode": "tozero"}
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    steps = (1, 2, 5) if high - low <= 4 else (1,)
    ticks = [float(f"{step}e{power}") for power in range(low, high + 1) for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def layout(*, x: Figure, y: Figure, height: int = 460, **more: Any) -> Figure:
    hover = {"font": {"color": "@text", "family": FONTS}}
    return {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 28, "b": 8},
        "paper_bgcolor": "@surface",
        "plot_bgcolor": "@surface",
        "font": {"color": "@text", "size": 13, "family": FONTS},
        "legend": {"orientation": "h", "x": 0, "y": 1.04, "yanchor": "bottom", "bgcolor": "@surface"},
        "hoverlabel": {**hover, "bgcolor": "@panel", "bordercolor": "@line", "align": "left"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "@muted", "activecolor": "@text", "orientation": "v"},
        "uirevision": "keep",
        "xaxis": x,
        "yaxis": y,
        **more,
    }


def rounded(value: float | None) -> float | None:
    """Six digits; what is no finite number is a gap in the drawing."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def column(values: Sequence[float | None]) -> list[float | None]:
    return [rounded(value) for value in values]


def moving_mean(points: Sequence[Point], share: float = 0.03) -> list[Point]:
    """The mean of the points within ``share`` of the curve around each; unknown points are left out."""
    known = [(x, y) for x, y in points if y is not None]
    reach = round(len(known) * share / 2)
    sums = [0.0]
    for _, y in known:
        sums.append(sums[-1] + y)
    smooth: list[Point] = []
    for index, (x, _) in enumerate(known):
        near = min(reach, index, len(known) - 1 - index)
        low, high = index - near, index + near + 1
        smooth.append((x, (sums[high] - sums[low]) / (high - low)))
    return smooth


def strided(points: Sequence[Point]) -> list[Point]:
    step = math.ceil(len(points) / MAX_POINTS) or 1
    return [*points[:-1:step], *points[-1:]]


def loss_figure(curves: Sequence[LossCurve]) -> Figure | None:
    """Loss over tokens: training as it was, lightly, its moving mean, and the held-out points. None without points."""
    traces: list[Figure] = []
    smooth_losses: list[float] = []
    for index, curve in enumerate(curves):
        colour, name = CURVE_COLOURS[index % len(CURVE_COLOURS)], shown(curve.name)
        group: Figure = {"type": "scatter", "legendgroup": str(index)}
        smooth = moving_mean(curve.training)
        smooth_losses += [y for _, y in smooth[len(smooth) // 50 :] if y is not None]
        for points, more in (
            (curve.training, {"mode": "lines", "line": {"color": colour, "width": 1}, "opacity": 0.28,
                              "hoverinfo": "skip", "showlegend": False, "name": f"{name}, each step"}),
            (smooth, {"mode": "lines", "line": {"color": colour, "width": 2.4}, "name": f"{name}, training"}),
            (curve.held_out, {"mode": "lines+markers", "line": {"color": colour, "width": 1.6, "dash": "dot"},
                              "marker": {"size": 9, "symbol": "diamond", "line": {"color": "@surface", "width": 1}},
                              "name": f"{name}, held out"}),
        ):  # fmt: skip
            if points:
                thin = strided(points)
                hover = {} if "hoverinfo" in more else {"hovertemplate": "%{y:.4f}"}
                xs, ys = column([x for x, _ in thin]), column([y for _, y in thin])
                traces.append({**group, **more, **hover, "x": xs, "y": ys})
    if not traces:
        return None
    x = axis("tokens trained", rangemode="tozero", tickformat="~s", unifiedhovertitle={"text": "%{x:.4~s} tokens"})
    return {"data": traces, "layout": layout(x=x, y=axis("loss per token"), hovermode="x unified")}


def part_colours(parts: Iterable[str]) -> dict[str, str]:
    """Known parts from the ground up, then the others in the order they appear, each with its colour."""
    seen, spare = dict.fromkeys(parts), cycle((YELLOW, RED, GREEN, PINK))
    known = {part: colour for part, colour in PART_COLOURS.items() if part in seen}
    return known | {part: next(spare) for part in seen if part not in known}


def sample_height(sample: MemorySample) -> float:
    return max(sum(sample.parts.values()), sample.resident_gib or 0.0)


def peaks_kept(samples: Sequence[MemorySample]) -> list[MemorySample]:
    """At most MAX_POINTS samples: the highest of each stretch, so that no peak is lost."""
    stretch = math.ceil(len(samples) / MAX_POINTS) or 1
    groups = (samples[start : start + stretch] for start in range(0, len(samples), stretch))
    return [max(group, key=sample_height) for group in groups]


def phase_spans(samples: Sequence[MemorySample]) -> list[tuple[str, float, float]]:
    """(phase, start, end) in seconds; a phase lasts until the next one begins."""
    runs = [(phase, [sample.seconds for sample in group]) for phase, group in groupby(samples, lambda s: s.phase)]
    ends = [seconds[0] for _, seconds in runs[1:]] + [runs[-1][1][-1]] if runs else []
    return [(phase, seconds[0], end) for (phase, seconds), end in zip(runs, ends, strict=True)]


def phase_marks(samples: Sequence[MemorySample]) -> Figure:
    """Every second phase shaded; the name written where there is room for it."""
    spans = phase_spans(samples)
    length = spans[-1][2] - spans[0][1] or 1.0
    shapes = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 1, "layer": "below",
         "fillcolor": "@panel", "line": {"width": 0}}
        for _, start, end in spans[::2]
    ]  # fmt: skip
    notes = [
        {"x": (start + end) / 2, "y": 1, "xref": "x", "yref": "paper", "yanchor": "top", "showarrow": False,
         "text": shown(phase), "font": {"color": "@muted", "size": 12}}
        for phase, start, end in spans
        if (end - start) / length >= MIN_LABELLED_SHARE
    ]  # fmt: skip
    return {"shapes": shapes, "annotations": notes}


def memory_figure(life: MemoryLife, *, limit_gib: float | None) -> Figure | None:
    """Memory over the run, stacked by part, the resident memory and the predicted peak. None without samples."""
    if not life.samples:
        return None
    samples = peaks_kept(life.samples)
    seconds = column([sample.seconds for sample in samples])
    common = {"type": "scatter", "mode": "lines", "x": seconds, "hovertemplate": "%{y:.2f} GiB"}
    traces: list[Figure] = [
        {**common, "name": shown(part), "stackgroup": "parts", "line": {"width": 0},
         "fillcolor": colour,
         "y": column([sample.parts.get(part, 0.0) for sample in samples])}
        for part, colour in part_colours(part for sample in samples for part in sample.parts).items()
    ]  # fmt: skip
    if any(sample.resident_gib is not None for sample in samples):
        resident = column([sample.resident_gib for sample in samples])
        traces.append({**common, "name": "measured, resident", "y": resident, "line": {"color": "@text", "width": 2},
                       "text": [shown(sample.phase) for sample in samples],
                       "hovertemplate": "%{y:.2f} GiB (%{text})"})  # fmt: skip
    top = max(sample_height(sample) for sample in samples)
    ends = [seconds[0], seconds[-1]]
    for name, level, dash in (("predicted", life.predicted_peak_gib, "dash"), ("host limit", limit_gib, "dot")):
        if level is not None and (name != "host limit" or level <= 2 * top):
            line = {"color": "@muted" if dash == "dot" else RED, "width": 2, "dash": dash}
            traces.append({"type": "scatter", "mode": "lines", "x": ends, "y": column([level, level]), "line": line,
                           "name": f"{name}, {level:.2f} GiB", "hoverinfo": "skip"})  # fmt: skip
            top = max(top, level)
    y = axis("GiB", range=[0, rounded(top * 1.12) or 1])
    x = axis("seconds since the start", unifiedhovertitle={"text": "%{x:.1f} s"}, showgrid=False)
    return {"data": traces, "layout": layout(x=x, y=y, hovermode="x unified", **phase_marks(samples))}


def chosen_by(control: str, choices: Sequence[Any]) -> Figure:
    """In a figure or in words: the one of ``choices`` that the control of this id stands at."""
    return {"by": control, "choices": list(choices)}
