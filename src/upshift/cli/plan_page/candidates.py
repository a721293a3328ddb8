"""The picture of every plan that was considered: predicted speed over held memory, what does not fit, and the front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from upshift.benchmarking import page_content
from upshift.benchmarking.page_candidates import Placed, all_peaks, frontier, limit_marks, marks, placed, thinned
from upshift.benchmarking.page_plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    VIOLET,
    YELLOW,
    Figure,
    axis,
    layout,
    log_axis_if_wide,
    shown,
)
from upshift.cli.plan_page.words import held_gib, layout_kind, limit_gib, memory_words, speed_words, time_words
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.rank import Candidate
from upshift.units import format_seconds, gib

MAX_DRAWN = 1600
MOST_SAID = 4  # terms, and parts of memory, of one dot
FARTHEST = 4.0  # times the limit: what needs more is not drawn
GROUP_COLOURS = (BLUE, ORANGE, SKY, PINK, GREEN, YELLOW, VIOLET)
OTHERS = "others"


class Picture(NamedTuple):
    figure: Figure
    num_drawn: int
    num_known: int
    num_too_far: int
    grouping: str  # what the colours tell apart
    front: tuple[Candidate, ...]  # by growing memory


def grouping(planning: Planning) -> tuple[str, Callable[[Plan], str]]:
    """What tells the plans apart most: layouts, where there are several, else precisions."""
    plans = [one.plan for one in (*planning.ranking.candidates, *planning.ranking.too_big)]
    if len({layout_kind(plan.layout) for plan in plans}) > 1:
        return "layout", lambda plan: layout_kind(plan.layout)
    return "precision", lambda plan: plan.precision


def colours(planning: Planning, group_of: Callable[[Plan], str]) -> dict[str, str]:
    """By group, those of the fastest plans first; all groups beyond the colours are the others."""
    names = dict.fromkeys(group_of(one.plan) for one in (*planning.ranking.candidates, *planning.ranking.too_big))
    return dict(zip(names, GROUP_COLOURS, strict=False))


def hover(candidate: Candidate) -> str:
    step = f"step {format_seconds(candidate.time.total)}: {time_words(candidate, most=MOST_SAID)}"
    lines = [f"<b>{shown(candidate.plan.label())}</b>", step]
    phase = candidate.memory.peak_phase
    parts = {part: gib(size) for part, size in candidate.memory.phases[phase].parts.items()}
    lines.append(f"{phase}, GiB: {memory_words(parts, most=MOST_SAID)}")
    return "<br>".join(lines)


def picture(planning: Planning) -> Picture:
    what, group_of = grouping(planning)
    by_group, limit = colours(planning, group_of), limit_gib(planning)
    of_dot: dict[int, Candidate] = {}
    dots = []
    num_too_far = 0
    for status, some in (("candidate", planning.ranking.candidates), ("rejected", planning.ranking.too_big)):
        for one in some:
            held, group = held_gib(one), group_of(one.plan)
            if status == "rejected" and limit is not None and held > FARTHEST * limit:
                num_too_far += 1
                continue
            dots.append(page_content.Candidate(
                label=one.plan.label(), tokens_per_second=one.tokens_per_second, peak_gib=held,
                status="chosen" if one is planning.ranking.candidates[0] else status,
                group=group if group in by_group else OTHERS,
            ))  # fmt: skip
            of_dot[id(dots[-1])] = one
    known = placed(dots)
    front = frontier(known)
    drawn = thinned(known, keep=front, at_most=MAX_DRAWN)

    def texts(points: Sequence[Placed]) -> list[str]:
        return [hover(of_dot[id(point.candidate)]) for point in points]

    traces = group_traces(drawn, by_group | {OTHERS: GREY}, texts) + best_traces(drawn, front, texts)
    x = axis("held memory per device, GiB (further left is smaller)", **log_axis_if_wide(all_peaks(drawn, limit)))
    y = axis(f"{speed_words(planning)} (further up is faster)", rangemode="tozero", tickformat=",~r")
    more = limit_marks(limit, is_log=x.get("type") == "log")
    return Picture(
        figure={"data": traces, "layout": layout(x=x, y=y, height=560, hovermode="closest", **more)},
        num_drawn=len(drawn), num_known=len(known), num_too_far=num_too_far, grouping=what,
        front=tuple(of_dot[id(point.candidate)] for point in front),
    )  # fmt: skip


def group_traces(
    drawn: Sequence[Placed], by_group: dict[str, str], texts: Callable[[Sequence[Placed]], list[str]]
) -> list[Figure]:
    """Filled dots fit, hollow ones do not: one colour, and one line of the legend where there are both."""
    traces = []
    for group, colour in by_group.items():
        mine = [one for one in drawn if one.candidate.group == group]
        fitting = [one for one in mine if one.candidate.status == "candidate"]
        hollow = [one for one in mine if one.candidate.status == "rejected"]
        marker = {"color": colour, "size": 7, "opacity": 0.7}
        if hollow:
            traces.append(marks(
                shown(f"{group}, too big"), hollow, "predicted", text=texts(hollow), legendgroup=group, showlegend=not fitting,
                marker={**marker, "symbol": "circle-open", "opacity": 0.5},
            ))  # fmt: skip
        if fitting:
            traces.append(marks(shown(group), fitting, "predicted", text=texts(fitting), legendgroup=group, marker=marker))
    return traces


def best_traces(drawn: Sequence[Placed], front: Sequence[Placed], texts: Callable[[Sequence[Placed]], list[str]]) -> list[Figure]:
    line = {"color": "@text", "width": 1.6, "shape": "hv"}
    best = [one for one in drawn if one.candidate.status == "chosen"]
    star = {"color": RED, "size": 17, "symbol": "star", "line": {"color": "@text", "width": 1.2}}
    return [
        marks("fastest for its memory", front, "predicted", mode="lines", line=line, text=texts(front)),
        marks("best", best, "predicted", marker=star, text=texts(best)),
    ]
