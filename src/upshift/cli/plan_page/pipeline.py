"""The pipeline schedule drawn: which rank runs which pass when, as bars, and in words for who does not see them."""

from __future__ import annotations

from collections.abc import Sequence

from upshift.benchmarking.page_html import empty, number, paragraph, plot, table, text
from upshift.benchmarking.page_plots import BLUE, GREEN, ORANGE, READABLE_TEXT, Figure, axis, layout
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.rank import Candidate
from upshift.planning.schedule import Kind, Pass, idle_share, most_waiting, simulate

PLOT = "plot-schedule"
MAX_PASSES = 4000  # drawn
READABLE_TIME = 96  # units: beyond it the numbers in the bars cannot be read
MAX_RANKS_LISTED = 16
MAX_PASSES_LISTED = 24
KINDS: dict[Kind, tuple[str, str]] = {"F": ("forward", BLUE), "B": ("backward", ORANGE), "W": ("gradients of weights", GREEN)}
ROW_HEIGHT, MAX_HEIGHT = 30, 900


def pipelined(planning: Planning) -> Candidate | None:
    """The best plan, or the fastest that has a pipeline."""
    return next((one for one in planning.ranking.candidates if one.plan.layout.pipeline_parallel > 1), None)


def passes_of(plan: Plan, micro_batches: int) -> tuple[Pass, ...]:
    shape = plan.layout
    return simulate(
        shape.pipeline_schedule, ranks=shape.pipeline_parallel, micro_batches=micro_batches, virtual_stages=shape.virtual_stages
    )


def num_drawn(plan: Plan) -> int:
    """Micro-batches: as many as can be read, but enough to fill the pipeline twice where so many passes can be drawn at all;
    interleaved stages take them in groups of as many as there are ranks."""
    ranks, stages = plan.layout.pipeline_parallel, plan.layout.virtual_stages
    readable = READABLE_TIME // (3 * stages) - ranks
    if stages > 1:
        readable -= readable % ranks
    possible = MAX_PASSES // (ranks * stages * (3 if plan.layout.pipeline_schedule == "zero_bubble" else 2))
    return min(plan.gradient_accumulation_steps, max(ranks, min(possible, max(2 * ranks, readable))))


def name_of(one: Pass, virtual_stages: int) -> str:
    return f"{one.micro_batch + 1}" + (f".{one.chunk + 1}" if virtual_stages > 1 else "")


def schedule_figure(plan: Plan) -> Figure:
    passes, stages = passes_of(plan, num_drawn(plan)), plan.layout.virtual_stages
    traces = []
    for kind, (words, colour) in KINDS.items():
        for chunk in range(stages):
            mine = [one for one in passes if (one.kind, one.chunk) == (kind, chunk)]
            if mine:
                traces.append({
                    "type": "bar", "orientation": "h", "name": words + (f", stage {chunk + 1} of its rank" if stages > 1 else ""),
                    "y": [one.rank for one in mine], "x": [one.duration for one in mine], "base": [one.start for one in mine],
                    "width": 0.92, "text": [name_of(one, stages) for one in mine],
                    "textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "opacity": 1.0 - 0.6 * chunk / stages,
                    "marker": {"color": colour, "line": {"color": "@surface", "width": 1}},
                    "hovertemplate": f"rank %{{y}}, {words} of micro-batch %{{text}}, from %{{base}} on<extra></extra>",
                })  # fmt: skip
    ranks = plan.layout.pipeline_parallel
    y = axis("pipeline rank", autorange="reversed", showgrid=False, zeroline=False, **({"dtick": 1} if ranks <= 24 else {}))
    x = axis("time, in forward passes of one stage", zeroline=False)
    height = min(150 + ROW_HEIGHT * ranks, MAX_HEIGHT)
    return {"data": traces, "layout": layout(x=x, y=y, height=height, barmode="overlay", uniformtext=READABLE_TEXT)}


def pipeline_parts(planning: Planning) -> tuple[list[str], Figure | None]:
    """The section, and its figure."""
    candidate = pipelined(planning)
    if candidate is None:
        return [empty("No plan that fits divides the layers among pipeline ranks, so there is no schedule to draw.")], None
    plan, is_best = candidate.plan, candidate.plan is planning.best
    of = "The best plan" if is_best else f"The best plan has no pipeline. The fastest that has one ({plan.label()})"
    shape, count = plan.layout, plan.gradient_accumulation_steps
    every = passes_of(plan, count)
    stages = f" with {shape.virtual_stages} stages a rank" if shape.virtual_stages > 1 else ""
    words = (
        f"{of} runs its {count:,} micro-batch{'es' * (count > 1)} through {shape.pipeline_parallel} ranks in the order "
        f"{shape.pipeline_schedule}{stages}: ranks are idle for {idle_share(every):.1%} of the time, where stages are equal and "
        "transfers take no time."
    )
    drawn = num_drawn(plan)
    caption = "Each bar is one pass of a micro-batch through a rank's layers, with its number; gaps are idle time. "
    caption += "A backward pass takes as long as two forward passes" + (", half of it for the gradients of weights." if
               shape.pipeline_schedule == "zero_bubble" else ".")  # fmt: skip
    if drawn < count:
        caption += f" Drawn with {drawn:,} of the {count:,} micro-batches."
    label = f"Bars over time for {shape.pipeline_parallel} pipeline ranks; the table below gives the same order."
    figure = schedule_figure(plan)
    drawing = plot(PLOT, label=label, caption=caption, height=figure["layout"]["height"])
    return [paragraph(text(words)), drawing, ranks_table(every, plan)], figure


def ranks_table(passes: Sequence[Pass], plan: Plan) -> str:
    ranks, stages = plan.layout.pipeline_parallel, plan.layout.virtual_stages
    rows = []
    for rank in range(min(ranks, MAX_RANKS_LISTED)):
        mine = [one for one in passes if one.rank == rank]
        order = " ".join(f"{one.kind}{name_of(one, stages)}" for one in mine[:MAX_PASSES_LISTED])
        more = f" and {len(mine) - MAX_PASSES_LISTED:,} more" if len(mine) > MAX_PASSES_LISTED else ""
        rows.append([str(rank), number(most_waiting(mine, rank, virtual_stages=stages), digits=2), text(order + more)])
    heads = [("Rank", ""), ("Micro-batches held at most", "number"), ("Order of its passes", "long")]
    rest = paragraph(f"and {ranks - MAX_RANKS_LISTED:,} more ranks") if ranks > MAX_RANKS_LISTED else ""
    return table(heads, rows, label="Order of passes by pipeline rank") + rest
