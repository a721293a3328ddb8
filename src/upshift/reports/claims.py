"""Draw one page of all claims: the distance of each from its goal, the worst first, and its numbers over time."""

from __future__ import annotations

from collections.abc import Sequence

from upshift.benchmarking.claims import ClaimStatus
from upshift.reports.blocks import Cell, Paragraph, Plot, Row, Table, Tile, number, number_cell
from upshift.reports.document import Page, Section, page_html
from upshift.reports.plots import CURVE_COLOURS, GREEN, RED, Figure, axis, layout, log_axis_if_wide, plot_text

ROW_HEIGHT = 26  # pixels of a bar
HEADS = (
    ("claim", ""),
    ("number", "number"),
    ("goal", "number"),
    ("of the goal", "number"),
    ("rows", "number"),
    ("newest", ""),
    ("command", "long"),
)


def claims_page(statuses: Sequence[ClaimStatus]) -> str:
    """Return the page. ``standings`` are the worst first."""
    measured = [status for status in statuses if status.readings]
    with_goal = [status for status in measured if status.share is not None]
    reached = [status for status in with_goal if status.is_reached]
    worst = with_goal[0] if with_goal else None
    tiles = [
        Tile("Goals reached", f"{len(reached)} of {len(with_goal)}", "with rows and a goal"),
        Tile("Furthest from its goal", _share(worst) if worst else None, worst.name if worst else None),
        Tile("Without rows", str(len(statuses) - len(measured)), "claims that nobody has measured"),
    ]
    figures = {"distances": _distances(with_goal), "times": _times(measured)}
    label = "Share of the goal that each claim reaches"
    distance = Plot("distances", label, "1 is the goal. A claim above 1 exceeds its goal.", height=_height(with_goal))
    caption = (
        "Each number divided by the first one of its claim, so that up is better. Claims with one row are left out. "
        "The machines of the rows differ. Point at a line to read its claim."
    )
    times = [Plot("times", "The numbers of claims over time", caption)] if figures["times"] else []
    sections = [
        Section("distance", "How far from the goal", "Distance", [distance if with_goal else Paragraph("No rows.")]),
        Section("claims", "Every claim, the worst first", "Claims", [_claims_table(statuses)]),
        Section("history", "Over time", "Over time", [*times, _history(measured)]),
    ]
    summary = "What Upshift claims, what it is compared with, and what benchmarks/results say. Quick runs are left out."
    drawn = {name: figure for name, figure in figures.items() if figure}
    return page_html(Page("Upshift's claims", summary, tiles, sections, drawn))


def _share(status: ClaimStatus) -> str:
    return "" if status.share is None else f"{status.share:.2f}"


def _claims_table(statuses: Sequence[ClaimStatus]) -> Table:
    rows: list[Row] = []
    for status in statuses:
        claim = status.claim
        newest = Cell("")
        if status.readings:
            reading = status.readings[-1]
            newest = Cell(reading.time[:10], reading.commit or "no commit", whole_words=True)
        rows.append(
            [
                Cell(status.name, f"{claim.text}: {claim.ours} against {claim.baseline}"),
                number_cell(status.value, small=claim.unit),
                number(claim.goal),
                _share(status),
                str(len(status.readings)),
                newest,
                Cell(status.command, whole_words=True, is_code=True),
            ]
        )
    missed = frozenset(index for index, status in enumerate(statuses) if status.is_reached is False)
    return Table("Claims", HEADS, rows, missed)


def _history(measured: Sequence[ClaimStatus]) -> Table:
    rows = [
        [status.name, reading.time[:16].replace("T", " "), number(reading.value), reading.commit or ""]
        for status in measured
        for reading in status.readings
    ]
    return Table("Rows over time", (("claim", ""), ("time", ""), ("number", "number"), ("commit", "")), rows)


def _height(with_goal: Sequence[ClaimStatus]) -> int:
    return 120 + ROW_HEIGHT * len(with_goal)


def _distances(with_goal: Sequence[ClaimStatus]) -> Figure | None:
    """Return a bar for each claim, the worst at the top."""
    if not with_goal:
        return None
    shares = [status.share or 0.0 for status in with_goal]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [round(share, 4) for share in shares],
        "y": [plot_text(status.name) for status in with_goal],
        "marker": {"color": [GREEN if status.is_reached else RED for status in with_goal]},
        "hovertemplate": "%{y}: %{x:.2f} of the goal<extra></extra>",
    }
    line = {"color": "@text", "dash": "dot", "width": 1}
    goal = {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": line}
    x = axis("of the goal", **log_axis_if_wide(shares))
    y = axis("", autorange="reversed")
    return {"data": [bars], "layout": layout(x=x, y=y, height=_height(with_goal), shapes=[goal], showlegend=False)}


def _times(measured: Sequence[ClaimStatus]) -> Figure | None:
    """Return each claim's numbers over its first one, turned so that up is better."""
    traces: list[Figure] = []
    for status in measured:
        values = [reading.value for reading in status.readings]
        if len(values) < 2 or min(values) <= 0:
            continue
        is_higher_better = status.claim.better == "higher"
        ratios = [value / values[0] if is_higher_better else values[0] / value for value in values]
        colour = CURVE_COLOURS[len(traces) % len(CURVE_COLOURS)]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plot_text(status.name),
                "x": [reading.time for reading in status.readings],
                "y": [round(ratio, 4) for ratio in ratios],
                "line": {"color": colour, "width": 1.5},
                "hovertemplate": f"{plot_text(status.name)}<br>%{{x}}: %{{y:.2f}} of the first<extra></extra>",
            }
        )
    y = axis("times the first row")
    return {"data": traces, "layout": layout(x=axis("", type="date"), y=y, showlegend=False)} if traces else None
