"""One page of all claims: how far each is from its goal, the worst first, and what its rows said over time."""

from __future__ import annotations

from collections.abc import Sequence

from upshift.benchmarking.page_document import PageSection, page_html
from upshift.benchmarking.page_html import UNKNOWN, number, paragraph, plot, table, text, tile_list
from upshift.benchmarking.page_plots import CURVE_COLOURS, GREEN, RED, Figure, axis, layout, log_axis_if_wide, shown
from upshift.benchmarking.standing import Standing

ROW_HEIGHT = 26  # pixels of a bar
HEADS = (
    ("claim", ""), ("number", "number"), ("goal", "number"), ("of the goal", "number"), ("rows", "number"), ("newest", ""),
    ("command", "long"),
)  # fmt: skip


def claims_page(standings: Sequence[Standing]) -> str:
    """``standings``: the worst first."""
    measured = [one for one in standings if one.readings]
    with_goal = [one for one in measured if one.share is not None]
    reached = [one for one in with_goal if one.is_reached]
    figures = {name: figure for name, figure in (("distances", _distances(with_goal)), ("times", _times(measured))) if figure}
    tiles = tile_list(
        (
            ("Goals reached", f"{len(reached)} of {len(with_goal)}", "with rows and a goal"),
            ("Furthest from its goal", _share(with_goal[0]) if with_goal else "", text(with_goal[0].name) if with_goal else ""),
            ("Without rows", str(len(standings) - len(measured)), "claims that nobody has measured"),
        )
    )
    label = "Share of the goal that each claim reaches"
    height = 120 + ROW_HEIGHT * len(with_goal)
    distance = plot("distances", label=label, caption="1 is the goal; above it, it is passed.", height=height)
    over = "Each number over its first, turned so that up is better; of claims with several rows. Machines differ between rows."
    times = plot("times", label="The numbers of claims over time", caption=over)
    sections = [
        PageSection("distance", "How far from the goal", "Distance", [distance if with_goal else paragraph("No rows.")]),
        PageSection("claims", "Every claim, the worst first", "Claims", [_table(standings)]),
        PageSection("history", "Over time", "Over time", [times if "times" in figures else "", _history(measured)]),
    ]
    summary = "What Upshift claims, against what, and what the rows of benchmarks/results say. --quick runs are left out."
    return page_html(title="Upshift's claims", summary=summary, tiles=tiles, sections=sections, figures=figures)


def _share(one: Standing) -> str:
    return UNKNOWN if one.share is None else f"{one.share:.2f}"


def _whole(words: str) -> str:
    """Lines break between words alone, not behind a hyphen: an option is read, and typed, as one."""
    return " ".join(f'<span class="word">{text(word)}</span>' for word in words.split())


def _table(standings: Sequence[Standing]) -> str:
    rows = []
    for one in standings:
        claim = one.claim
        words = f"{text(one.name)}<small>{text(f'{claim.text}: {claim.ours} against {claim.baseline}')}</small>"
        newest = one.readings[-1] if one.readings else None
        rows.append(
            (
                words, number(one.value, small=text(claim.unit)), number(claim.goal), _share(one), str(len(one.readings)),
                UNKNOWN if newest is None else f"{_whole(newest.time[:10])}<small>{text(newest.commit or 'no commit')}</small>",
                f"<code>{_whole(one.command)}</code>",
            )
        )  # fmt: skip
    return table(HEADS, rows, label="Claims", marked=frozenset(at for at, one in enumerate(standings) if one.is_reached is False))


def _history(measured: Sequence[Standing]) -> str:
    rows = [
        (text(one.name), text(reading.time[:16].replace("T", " ")), number(reading.value), text(reading.commit or ""))
        for one in measured
        for reading in one.readings
    ]
    return table((("claim", ""), ("time", ""), ("number", "number"), ("commit", "")), rows, label="Rows over time")


def _distances(with_goal: Sequence[Standing]) -> Figure | None:
    """Bars from the top, the worst first."""
    if not with_goal:
        return None
    shares = [one.share or 0.0 for one in with_goal]
    bars: Figure = {
        "type": "bar", "orientation": "h", "x": [round(share, 4) for share in shares],
        "y": [shown(one.name) for one in with_goal],
        "marker": {"color": [GREEN if one.is_reached else RED for one in with_goal]},
        "hovertemplate": "%{y}: %{x:.2f} of the goal<extra></extra>",
    }  # fmt: skip
    goal = {
        "type": "line",
        "x0": 1,
        "x1": 1,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": "@text", "dash": "dot", "width": 1},
    }
    x = axis("of the goal", **log_axis_if_wide(shares))
    height = 120 + ROW_HEIGHT * len(with_goal)
    return {
        "data": [bars],
        "layout": layout(x=x, y=axis("", autorange="reversed"), height=height, shapes=[goal], showlegend=False),
    }


def _times(measured: Sequence[Standing]) -> Figure | None:
    several = [one for one in measured if len(one.readings) > 1 and min(reading.value for reading in one.readings) > 0]
    traces: list[Figure] = []
    for place, one in enumerate(several):
        first, times = one.readings[0].value, [reading.time for reading in one.readings]
        ratios = [reading.value / first for reading in one.readings]
        better = ratios if one.claim.better == "higher" else [1 / ratio for ratio in ratios]
        colour = CURVE_COLOURS[place % len(CURVE_COLOURS)]
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": shown(one.name), "x": times,
                "y": [round(y, 4) for y in better],
                "line": {"color": colour, "width": 1.5}, "hovertemplate": "%{x}: %{y:.2f} of the first<extra></extra>",
            }
        )  # fmt: skip
    return {"data": traces, "layout": layout(x=axis("", type="date"), y=axis("over the first row"))} if traces else None
