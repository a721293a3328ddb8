"""The sections of the page of a planning that are not drawn from a grid or a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from upshift.benchmarking import page_sections
from upshift.benchmarking.page_content import Reason
from upshift.benchmarking.page_html import definitions, empty, number, paragraph, plot, selection, spoken, table, text
from upshift.benchmarking.page_plots import Figure, chosen_by, part_colours
from upshift.cli.plan_page.bars import TIME_HEIGHT, memory_figure, time_figure
from upshift.cli.plan_page.candidates import FARTHEST, Picture
from upshift.cli.plan_page.words import (
    costs,
    full_memory_words,
    held_gib,
    known_words,
    memory_by_phase,
    parts_of,
    sentence,
    speed_words,
    time_words,
)
from upshift.planning.cost.resident import unknown_memory
from upshift.planning.cost.time import takes
from upshift.planning.explain import representative
from upshift.planning.planner import Planning
from upshift.planning.rank import Candidate
from upshift.units import GIB, format_count, gib

PLANS_PLOT, MEMORY_PLOT, TIME_PLOT = "plot-plans", "plot-memory", "plot-time"
PLAN, WORDS = "plan-shown", "plan-words"
NUM_BEST, NUM_FRONT, NUM_REJECTED = 5, 10, 12
Selectable = list[tuple[str, Candidate]]


def request(planning: Planning, model: str) -> list[str]:
    profile, host, workload = planning.profile, planning.host, planning.workload
    device = host.gpu.name if host.gpu else host.cpu.model_name if host.cpu else None
    lengths = f", {workload.lengths.mean:,.0f} on average" if workload.lengths else ""
    size = "images" if takes(profile) == "images" else f"sequences of {workload.sequence_length:,} tokens"
    pairs = [
        ("model", f"{model} ({profile.architecture}, {format_count(profile.parameters.total)} parameters)"),
        ("host", f"{host.name}: {host.num_devices:,} x {device or 'unknown'}"),
        ("workload", f"{workload.task}: global batch {workload.global_batch:,} {size}{lengths}, {workload.total_steps:,} steps"),
        ("allowed to change", ", ".join(workload.allow) or "nothing of the mathematics"),
        ("best plan", sentence(planning.best, profile.num_layers)),
        ("its label", planning.best.label()),
        ("versions", ", ".join(f"{name} {version}" for name, version in profile.versions.items())),
        ("counted as FLOPs", profile.flop_convention),
    ]  # fmt: skip
    return [definitions(pairs)]


def selectable(planning: Planning, front: Sequence[Candidate]) -> Selectable:
    """The best plans, then those of the front from the fastest on, then the plain default; of plans with the same prediction
    the first."""
    distinct: dict[tuple[float, float], tuple[int, Candidate]] = {}
    for rank, one in enumerate(planning.ranking.candidates, start=1):
        distinct.setdefault((one.tokens_per_second, one.resident), (rank, one))
        if len(distinct) == NUM_BEST:
            break
    found = [(f"{rank}: {one.plan.label()}", one) for rank, one in distinct.values()]
    step = max(-(-len(front) // NUM_FRONT), 1)
    smaller = [one for one in reversed(front[::step]) if (one.tokens_per_second, one.resident) not in distinct]
    found += [(f"{held_gib(one):.1f} GiB: {one.plan.label()}", one) for one in smaller]
    return [*found, (f"plain default: {planning.default.plan.label()}", planning.default)]


def plans(planning: Planning, drawing: Picture, listed: Selectable) -> list[str]:
    ranking = planning.ranking
    unknown = unknown_memory(planning.host)
    fit = "plans fit" if unknown is None else "plans are possible"
    words = f"{len(ranking.candidates):,} {fit}, {ranking.num_rejected:,} were rejected. {text(unknown + '.') if unknown else ''}"
    caption = f"Each dot is one plan, coloured by {drawing.grouping}; point at it to read it. Hollow dots do not fit. "
    caption += "On the line are the fastest plans for their memory; the star is the best."
    if drawing.num_too_far:
        caption += f" {drawing.num_too_far:,} plans that need more than {FARTHEST:.0f} times the limit are not drawn."
    if drawing.num_drawn < drawing.num_known:
        caption += f" Of {drawing.num_known:,} plans {drawing.num_drawn:,} are drawn: of those of one colour at nearly the "
        caption += "same place only the fastest, but all on the line."
    label = f"Scatter plot of {drawing.num_drawn} plans: {speed_words(planning)} over held GiB; the table below lists the best."
    return [paragraph(words), plot(PLANS_PLOT, label=label, caption=caption), plans_table(planning, listed)]


def plans_table(planning: Planning, listed: Selectable) -> str:
    predicted = [(label, one, planning.numbers(one)) for label, one in listed]
    reserved = any(numbers.reserved_gib is not None for _, _, numbers in predicted)  # of devices: their allocator holds segments
    heads = [("Plan", "long"), (speed_words(planning).capitalize(), "number"), ("Step, ms", "number"),
             ("Allocated, GiB", "number"), *([("Reserved, GiB", "number")] if reserved else []), ("Held, GiB", "number"),
             ("Bound by", ""), ("Known from", "long")]  # fmt: skip
    rows = [
        [text(label), number(one.tokens_per_second, digits=0), number(1000 * one.time.total, digits=0),
         number(numbers.peak_gib, digits=2), *([number(numbers.reserved_gib, digits=2)] if reserved else []),
         number(held_gib(one), digits=2), text(one.time.binding_term), text(known_words(one))]
        for label, one, numbers in predicted
    ]  # fmt: skip
    return "<h3>The best, the front, and the plain default</h3>" + table(heads, rows, label="Best plans", marked=frozenset([0]))


def step(planning: Planning, shown: Selectable) -> tuple[list[str], dict[str, Figure], dict[str, Any]]:
    """The section, its figures and its words."""
    best = planning.ranking.candidates[0]

    def selected(of: Callable[[Candidate], Any]) -> Any:
        return chosen_by(PLAN, [of(one) for _, one in shown])

    figures = {MEMORY_PLOT: memory_figure(selected, planning), TIME_PLOT: time_figure(selected)}
    control = selection(PLAN, label="Plan shown", values=[label for label, _ in shown])
    memory = "Allocated memory at the highest moment of each phase. Held beyond it: the allocator's slack and the context."
    time = "The terms of an optimizer step; what is computed while something else waits is not counted twice."
    parts = [
        f'<div class="controls">{control}</div>',
        spoken(WORDS, step_words(planning, best)),
        "<h3>Memory</h3>",
        plot(MEMORY_PLOT, label="Stacked bars of memory by phase; the table below gives the best plan's.", caption=memory),
        memory_table(planning),
        "<h3>Time</h3>",
        plot(TIME_PLOT, label="A stacked bar of a step's time by term; the table below gives the best plan's.", caption=time,
             height=TIME_HEIGHT),
        time_table(best),
    ]  # fmt: skip
    return parts, figures, {WORDS: selected(lambda one: step_words(planning, one))}


def step_words(planning: Planning, candidate: Candidate) -> str:
    once = f" Once, before the first step: {candidate.time.one_time:,.0f} s." if candidate.time.one_time >= 1 else ""
    short = "".join(f" {words[0].upper()}{words[1:]}." for words in planning.life.does_not_fit(candidate))
    memory = full_memory_words(planning, candidate)
    return f"{costs(planning, candidate)}. Bound by {time_words(candidate)}.{once} Memory by phase: {memory}.{short}"


def memory_table(planning: Planning) -> str:
    memory = memory_by_phase(planning, planning.ranking.candidates[0])
    parts = list(part_colours(parts_of(memory)))
    best, life = planning.ranking.candidates[0], planning.life
    reserved = best.plan.device == "cuda"
    heads = [("Phase", ""), *((part, "number") for part in parts), ("Allocated", "number"),
             *([("Reserved", "number")] if reserved else []), ("Held", "number")]  # fmt: skip
    rows = []
    for phase, row in memory.items():
        total = sum(row.values())
        kept = [gib(life.reserved(best, total * GIB))] if reserved else []
        sizes = [total, *kept, gib(life.held(best, total * GIB))]
        rows.append([
            text(phase), *(number(row.get(part, 0.0), digits=3) for part in parts), *(number(size, digits=3) for size in sizes)
        ])  # fmt: skip
    return table(heads, rows, label="The best plan's memory in GiB by phase and part")


def time_table(best: Candidate) -> str:
    terms = sorted(best.time.terms.items(), key=lambda item: -item[1])
    rows = [
        [text(name) + ("<small>binding</small>" if name == best.time.binding_term else ""), number(1000 * seconds, digits=1),
         f"{seconds / best.time.total:.1%}"]
        for name, seconds in terms
        if seconds > 0.0
    ]  # fmt: skip
    return table([("Term", ""), ("Milliseconds", "number"), ("Share", "number")], rows, label="The best plan's time by term")


def why(planning: Planning) -> list[str]:
    rows = [Reason(**reason.model_dump()) for reason in planning.reasons]
    price = planning.shadow_price
    return [*page_sections.reasons(rows), *([paragraph(text(price[0].upper() + price[1:] + "."), css="")] if price else [])]


def rejected(planning: Planning) -> list[str]:
    ranking = planning.ranking
    if not ranking.rejected:
        return [empty("Every legal plan fits.")]
    too_big = {id(one.plan) for one in ranking.too_big}
    counts = Counter(f"too big, highest in the {one.memory.peak_phase} phase" for one in ranking.too_big)
    counts += Counter(one.reason for one in ranking.rejected if id(one.plan) not in too_big)
    few = representative(ranking.rejected)
    few = few[:: max(len(few) // NUM_REJECTED, 1)][:NUM_REJECTED]
    return [
        table([("Reason", "long"), ("Plans", "number")],
              [[text(reason), number(count)] for reason, count in counts.most_common(NUM_REJECTED)], label="Reasons"),
        "<h3>Some of them</h3>",
        table([("Plan", "long"), ("Why", "long")], [[text(one.plan.label()), text(one.reason)] for one in few],
              label="Some rejected plans"),
    ]  # fmt: skip
