"""Write the page of a planning as one file: the best plan, all plans that were considered, and the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from upshift.planning.cost.pipeline_schedule import Pass, idle_share, peak_in_flight
from upshift.planning.cost.process_memory import unknown_memory
from upshift.planning.cost.time import sample_unit
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate
from upshift.reports.blocks import (
    Block,
    Cell,
    Controls,
    Facts,
    Heading,
    Paragraph,
    Plot,
    Row,
    Selection,
    SpokenWords,
    Table,
    Tile,
    number,
)
from upshift.reports.document import Page, Section, page_html, write_page
from upshift.reports.plan.charts import (
    FARTHEST,
    TIME_HEIGHT,
    PlansFigure,
    draw_plans,
    memory_figure,
    num_drawn,
    pass_label,
    schedule_figure,
    simulate_passes,
    time_figure,
)
from upshift.reports.plan.what_if_grid import family_section
from upshift.reports.plan.words import (
    TIERS,
    basis_words,
    cost_words,
    full_memory_words,
    held_gib,
    limit_gib,
    memory_by_phase,
    parts_of,
    sentence,
    speed_words,
    time_words,
)
from upshift.reports.plots import Figure, choice, part_colours
from upshift.reports.run import page as run_page
from upshift.units import GIB, format_count, format_seconds, gib

PLAN = "plan-shown"
WORDS = "plan-words"
MEMORY_WORDS = "plan-memory-words"
LENGTHS = "Lengths and micro-batches"
NUM_BEST = 5
NUM_FRONT = 10
NUM_REJECTED = 12
MAX_RANKS_LISTED = 16
MAX_PASSES_LISTED = 24
Selectable = list[tuple[str, Candidate]]


def write_plan_page(path: Path, planning: Planning, *, model: str) -> None:
    """Write the page. ``model`` is as the user wrote it. Raise RequestError when the file cannot be written."""
    write_page(path, plan_page_html(planning, model=model))


def plan_page_html(planning: Planning, *, model: str) -> str:
    plans = draw_plans(planning)
    selectable = selectable_plans(planning, plans.front)
    step_figures, words = step_content(planning, selectable)
    schedule_blocks, schedule_figures = schedule_section(planning)
    family_blocks, family_figures, family_words = family_section(planning)
    sections = [
        Section("request", "What was asked for", "Request", [request_facts(planning, model)]),
        Section("plans", "All plans that were considered", "Plans", plans_section(planning, plans, selectable)),
        Section("step", "Memory and time of a step", "Memory and time", step_section(planning, selectable)),
        *([Section("schedule", "Pipeline schedule", "Schedule", schedule_blocks)] if schedule_blocks else []),
        *([Section("family", "Other sequence lengths and micro-batches", LENGTHS, family_blocks)] if family_blocks else []),
        Section("reasons", "Why this plan", "Reasons", reasons_section(planning)),
        *(
            [Section("rejected", "What was rejected", "Rejected", rejected_section(planning))]
            if planning.ranking.rejected
            else []
        ),
    ]
    return page_html(
        Page(
            title=f"Plan for {planning.profile.architecture} on {planning.host.name}",
            summary=summary(planning),
            tiles=tiles(planning),
            sections=sections,
            figures={"plot-plans": plans.figure, **step_figures, **schedule_figures, **family_figures},
            words=words | family_words,
        )
    )


def summary(planning: Planning) -> str:
    best = planning.ranking.candidates[0]
    numbers = planning.numbers(best)
    limit = limit_gib(planning)
    low, high = numbers.interval or (None, None)
    limit_words = f" of {limit:.2f} GiB that may be held" if limit is not None else ""
    interval_words = f" The step should take {low:.2f} to {high:.2f} times as long as predicted." if low and high else ""
    risk = numbers.out_of_memory_probability
    risk_words = f" The probability of running out of memory is {risk:.1%}." if risk is not None else ""
    return (
        f"The best plan: {sentence(best.plan, planning.profile.num_layers)}. "
        f"Predicted: {best.tokens_per_second:,.0f} {speed_words(planning)}, {format_seconds(best.time.total)} a step, "
        f"{held_gib(best):.2f} GiB{limit_words}; bound by {best.time.binding_term}. This is {TIERS[numbers.tier]}."
        f"{interval_words}{risk_words}"
    )


def tiles(planning: Planning) -> list[Tile]:
    best = planning.ranking.candidates[0]
    default = planning.default
    numbers = planning.numbers(best)
    limit = limit_gib(planning)
    total = best.time.total
    speed = "the plain default does not fit"
    if planning.job_memory.fits(default):
        speed = f"{best.tokens_per_second / default.tokens_per_second:,.1f} times the plain default"
    outcome = [
        Tile(speed_words(planning).capitalize(), number(best.tokens_per_second, 0), speed),
        Tile("Step", format_seconds(total), f"bound by {best.time.binding_term}"),
        Tile("Memory held", f"{held_gib(best):.2f} GiB", "limit unknown" if limit is None else f"of {limit:.2f} GiB"),
    ]
    if numbers.interval:
        low, high = numbers.interval
        seconds = f"{format_seconds(low * total)} to {format_seconds(high * total)}; {TIERS[numbers.tier]}"
        outcome.append(Tile("Step, range", f"{low:.1f} to {high:.1f} \N{MULTIPLICATION SIGN}", seconds))
    return outcome


def request_facts(planning: Planning, model: str) -> Facts:
    profile = planning.profile
    host = planning.host
    workload = planning.workload
    device = host.gpu.name if host.gpu else host.cpu.model_name if host.cpu else None
    lengths = f", {workload.lengths.mean:,.0f} on average" if workload.lengths else ""
    size = "images" if sample_unit(profile) == "images" else f"sequences of {workload.sequence_length:,} tokens"
    if workload.rows_together > 1:
        size = f"rated completions, each with a mismatched one, {size}" if workload.has_ratings else f"pairs of {size}"
    return Facts(
        [
            ("model", f"{model} ({profile.architecture}, {format_count(profile.parameters.total)} parameters)"),
            ("host", f"{host.name}: {host.num_devices:,} x {device or 'unknown'}"),
            (
                "workload",
                f"{workload.task}: global batch {workload.num_units:,} {size}{lengths}, {workload.total_steps:,} steps",
            ),
            ("allowed to change", ", ".join(workload.allow) or "nothing of the mathematics"),
            ("best plan", sentence(planning.best, profile.num_layers)),
            ("its label", planning.best.label()),
            ("versions", ", ".join(f"{name} {version}" for name, version in profile.versions.items())),
            ("counted as FLOPs", profile.flop_convention),
        ]
    )


def selectable_plans(planning: Planning, front: Sequence[Candidate]) -> Selectable:
    """Return (label, plan): the best plans, then the front from the fastest on, then the plain default.

    Plans with the same prediction are listed once."""
    distinct: dict[tuple[float, float], tuple[int, Candidate]] = {}
    for rank, candidate in enumerate(planning.ranking.candidates, start=1):
        distinct.setdefault((candidate.tokens_per_second, candidate.resident), (rank, candidate))
        if len(distinct) == NUM_BEST:
            break
    stride = max(-(-len(front) // NUM_FRONT), 1)
    smaller = [
        candidate for candidate in reversed(front[::stride]) if (candidate.tokens_per_second, candidate.resident) not in distinct
    ]
    default_name = "plain default" if planning.job_memory.fits(planning.default) else "plain default, which does not fit"
    return [
        *((f"{rank}: {candidate.plan.label()}", candidate) for rank, candidate in distinct.values()),
        *((f"{held_gib(candidate):.1f} GiB: {candidate.plan.label()}", candidate) for candidate in smaller),
        (f"{default_name}: {planning.default.plan.label()}", planning.default),
    ]


def plans_section(planning: Planning, drawing: PlansFigure, listed: Selectable) -> list[Block]:
    ranking = planning.ranking
    unknown_limit = unknown_memory(planning.host)
    verb = "plans fit" if unknown_limit is None else "plans are possible"
    above = f"{len(ranking.candidates):,} {verb}, {ranking.num_rejected:,} were rejected. "
    if unknown_limit:
        above += f"{unknown_limit}. "
    if planning.preference:
        above += f"{planning.preference}."
    caption = (
        f"Each dot is one plan, coloured by {drawing.grouping}; point at it to read it. Hollow dots do not fit. "
        "On the line are the fastest plans for their memory; the star is the best."
    )
    if drawing.num_too_far:
        caption += f" {drawing.num_too_far:,} plans that need more than {FARTHEST:.0f} times the limit are not drawn."
    if drawing.num_drawn < drawing.num_known:
        caption += (
            f" Of {drawing.num_known:,} plans {drawing.num_drawn:,} are drawn: of those of one colour at nearly the "
            "same place only the fastest, but all on the line."
        )
    label = f"Scatter plot of {drawing.num_drawn} plans: {speed_words(planning)} over held GiB; the table below lists the best."
    heading = Heading("The best plans, the fastest for less memory, and the plain default")
    return [Paragraph(above), Plot("plot-plans", label, caption), heading, plans_table(planning, listed)]


def plans_table(planning: Planning, listed: Selectable) -> Table:
    """Return the table of the listed plans. It has a column of reserved memory on devices whose allocator reserves segments."""
    predicted = [(label, candidate, planning.numbers(candidate)) for label, candidate in listed]
    is_reserved = any(numbers.reserved_gib is not None for _, _, numbers in predicted)
    heads = [
        ("Plan", "long"),
        (speed_words(planning).capitalize(), "number"),
        ("Step, ms", "number"),
        ("Allocated, GiB", "number"),
        *([("Reserved, GiB", "number")] if is_reserved else []),
        ("Held, GiB", "number"),
        ("Bound by", ""),
        ("Known from", "long"),
    ]
    rows = [
        [
            label,
            number(candidate.tokens_per_second, 0),
            number(1000 * candidate.time.total, 0),
            number(numbers.peak_gib, 2),
            *([number(numbers.reserved_gib, 2)] if is_reserved else []),
            number(held_gib(candidate), 2),
            candidate.time.binding_term,
            basis_words(candidate),
        ]
        for label, candidate, numbers in predicted
    ]
    return Table("Best plans", heads, rows, marked=frozenset([0]))


def step_content(planning: Planning, listed: Selectable) -> tuple[dict[str, Figure], dict[str, Any]]:
    """Return the figures and the words of the plan that is selected."""

    def selected(content: Callable[[Candidate], Any]) -> Any:
        return choice(PLAN, [content(candidate) for _, candidate in listed])

    figures = {"plot-memory": memory_figure(selected, planning), "plot-time": time_figure(selected)}
    return figures, {
        WORDS: selected(lambda candidate: step_words(planning, candidate)),
        MEMORY_WORDS: selected(lambda candidate: step_memory_words(planning, candidate)),
    }


def step_section(planning: Planning, listed: Selectable) -> list[Block]:
    best = planning.ranking.candidates[0]
    memory_label = "Stacked bars of memory by phase; the table below gives the best plan's."
    memory = "Allocated memory at the highest moment of each phase. Held beyond it: the allocator's slack and the context."
    time_label = "A stacked bar of a step's time by term; the table below gives the best plan's."
    time = "The terms of an optimizer step; what is computed while something else waits is not counted twice."
    return [
        Controls([Selection(PLAN, "Plan shown", [label for label, _ in listed])]),
        SpokenWords(WORDS, step_words(planning, best)),
        SpokenWords(MEMORY_WORDS, step_memory_words(planning, best), is_only_spoken=True),
        Heading("Memory"),
        Plot("plot-memory", memory_label, memory),
        memory_table(planning),
        Heading("Time"),
        Plot("plot-time", time_label, time, height=TIME_HEIGHT),
        time_table(best),
    ]


def step_words(planning: Planning, candidate: Candidate) -> str:
    one_time = f" Once, before the first step: {candidate.time.one_time:,.0f} s." if candidate.time.one_time >= 1 else ""
    excess = "".join(f" {words[0].upper()}{words[1:]}." for words in planning.job_memory.describe_problems(candidate))
    return f"{cost_words(planning, candidate)}. Bound by {time_words(candidate)}.{one_time}{excess}"


def step_memory_words(planning: Planning, candidate: Candidate) -> str:
    return f"Memory by phase: {full_memory_words(planning, candidate)}."


def memory_table(planning: Planning) -> Table:
    best = planning.ranking.candidates[0]
    job_memory = planning.job_memory
    memory = memory_by_phase(planning, best)
    names = list(part_colours(parts_of(memory)))
    sums = ["Allocated", "Reserved", "Held"] if best.plan.device == "cuda" else ["Allocated", "Held"]
    rows = []
    for phase, row in memory.items():
        total = sum(row.values())
        sums_gib = {
            "Allocated": total,
            "Reserved": gib(job_memory.reserved_bytes(best, total * GIB)),
            "Held": gib(job_memory.held_bytes(best, total * GIB)),
        }
        rows.append([phase, *(number(row.get(name, 0.0), 3) for name in names), *(number(sums_gib[name], 3) for name in sums)])
    heads = [("Phase", ""), *((name, "number") for name in (*names, *sums))]
    return Table("The best plan's memory in GiB by phase and part", heads, rows)


def time_table(best: Candidate) -> Table:
    heads = [("Term", ""), ("Milliseconds", "number"), ("Share", "number")]
    rows: list[Row] = [
        [
            Cell(name, "binding" if name == best.time.binding_term else None),
            number(1000 * seconds, 1),
            f"{seconds / best.time.total:.1%}",
        ]
        for name, seconds in sorted(best.time.terms.items(), key=lambda item: -item[1])
        if seconds > 0.0
    ]
    return Table("The best plan's time by term", heads, rows)


def fastest_pipelined(planning: Planning) -> Candidate | None:
    """Return the best plan, or the fastest that has a pipeline."""
    candidates = planning.ranking.candidates
    return next((candidate for candidate in candidates if candidate.plan.layout.pipeline_parallel > 1), None)


def schedule_section(planning: Planning) -> tuple[list[Block], dict[str, Figure]]:
    """Return the section on the pipeline schedule, drawn and in words, and its figure. It is empty if no plan has a pipeline."""
    candidate = fastest_pipelined(planning)
    if candidate is None:
        return [], {}
    plan = candidate.plan
    shape = plan.layout
    count = plan.gradient_accumulation_steps
    drawn = num_drawn(plan)
    passes = simulate_passes(plan, count)
    subject = "The best plan"
    if plan is not planning.best:
        subject = f"The best plan has no pipeline. The fastest that has one ({plan.label()})"
    stages = f" with {shape.virtual_stages} stages a rank" if shape.virtual_stages > 1 else ""
    above = (
        f"{subject} runs its {count:,} micro-batch{'es' if count > 1 else ''} through {shape.pipeline_parallel} ranks in the "
        f"order {shape.pipeline_schedule}{stages}: ranks are idle for {idle_share(passes):.1%} of the time, where stages are "
        "equal and transfers take no time."
    )
    weight_note = ", half of it for the gradients of weights" if shape.pipeline_schedule == "zero_bubble" else ""
    caption = (
        "Each bar is one pass of a micro-batch through a rank's layers, with its number; gaps are idle time. "
        f"A backward pass takes as long as two forward passes{weight_note}."
    )
    if drawn < count:
        caption += f" Drawn with {drawn:,} of the {count:,} micro-batches."
    label = f"Bars over time for {shape.pipeline_parallel} pipeline ranks; the table below gives the same order."
    figure = schedule_figure(plan)
    drawing = Plot("plot-schedule", label, caption, height=figure["layout"]["height"])
    num_hidden = shape.pipeline_parallel - MAX_RANKS_LISTED
    hidden_note = [Paragraph(f"and {num_hidden:,} more ranks")] if num_hidden > 0 else []
    return [Paragraph(above), drawing, ranks_table(passes, plan), *hidden_note], {"plot-schedule": figure}


def ranks_table(passes: Sequence[Pass], plan: Plan) -> Table:
    stages = plan.layout.virtual_stages
    rows = []
    for rank in range(min(plan.layout.pipeline_parallel, MAX_RANKS_LISTED)):
        steps = [step for step in passes if step.rank == rank]
        order = " ".join(f"{step.kind}{pass_label(step, stages)}" for step in steps[:MAX_PASSES_LISTED])
        remainder = f" and {len(steps) - MAX_PASSES_LISTED:,} more" if len(steps) > MAX_PASSES_LISTED else ""
        rows.append([str(rank), number(peak_in_flight(steps, rank, virtual_stages=stages), 2), order + remainder])
    heads = [("Rank", ""), ("Micro-batches held at most", "number"), ("Order of its passes", "long")]
    return Table("Order of passes by pipeline rank", heads, rows)


def reasons_section(planning: Planning) -> list[Block]:
    price = planning.shadow_price
    return [
        *run_page.reasons(planning.reasons),
        *([Paragraph(price[0].upper() + price[1:] + ".", css="")] if price else []),
    ]


def rejected_section(planning: Planning) -> list[Block]:
    ranking = planning.ranking
    too_big = {id(candidate.plan) for candidate in ranking.too_big}
    counts = Counter(f"too big, highest in the {candidate.memory.peak_phase} phase" for candidate in ranking.too_big)
    counts += Counter(rejection.reason for rejection in ranking.rejected if id(rejection.plan) not in too_big)
    count_rows = [[reason, number(count)] for reason, count in counts.most_common(NUM_REJECTED)]
    return [
        Table("Reasons", [("Reason", "long"), ("Plans", "number")], count_rows),
        Heading("The fastest for each reason"),
        Table(
            "Rejected plans",
            [("Plan", "long"), ("Speed, to the best plan", "number"), ("Why", "long")],
            [
                [lesson.plan.label(), "" if lesson.speed is None else f"{lesson.speed - 1:+.1%}", lesson.reason]
                for lesson in planning.lessons[:NUM_REJECTED]
            ],
        ),
    ]
