"""Pieces of Plotly figures as plain data, made without any library.

A colour that starts with "@" is a colour of the page and follows its colour scheme. The others are Okabe and Ito's,
which people with any colour vision can tell apart, and which stand out on white and on black.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

Figure = dict[str, Any]

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
RED, SKY, GREY, YELLOW = "#D55E00", "#56B4E9", "#8A929E", "#C9B800"
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
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
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
