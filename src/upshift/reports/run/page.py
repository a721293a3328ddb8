"""Write the report of one run as a page, from the content of a RunPage.

The captions are for a reader who does not know the internals. A section without data says why it is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from upshift.planning.analysis.explain import Reason
from upshift.reports.blocks import (
    Block,
    Cell,
    Command,
    Facts,
    Heading,
    Paragraph,
    Plot,
    Quote,
    Row,
    Table,
    Tile,
    difference,
    missing,
    number,
    number_cell,
    percent,
    times,
)
from upshift.reports.document import Page, Section, page_html, write_page
from upshift.reports.plots import Candidate
from upshift.reports.run.charts import (
    MIN_LABELLED_SHARE,
    CandidatePlot,
    candidate_plot,
    loss_figure,
    memory_figure,
    phase_spans,
)
from upshift.reports.run.content import ComparisonRow, Fact, MemorySample, RunPage

MAX_REASONS_LISTED = 8
MAX_TRIED_LISTED = 20
ROLE_WORDS = {"default": "plain default", "chosen": "chosen by Upshift", "other": None}


def write_run_page(path: Path, run: RunPage) -> None:
    """Write the report. Raise RequestError when the file cannot be written."""
    write_page(path, run_page_html(run))


def run_page_html(run: RunPage) -> str:
    plot = candidate_plot(run.candidates, limit_gib=run.memory_limit_gib)
    figures = {
        "plot-candidates": plot.figure,
        "plot-memory": memory_figure(run.memory, limit_gib=run.memory_limit_gib),
        "plot-loss": loss_figure(run.loss_curves),
    }
    sections = [
        Section("run", "The run", "Run", facts(run)),
        Section("comparison", "Plain default and chosen plan", "Comparison", comparison(run.comparison)),
        Section("prediction", "Predicted and measured", "Prediction", predictions(run)),
        Section("reasons", "Why this plan", "Reasons", reasons(run.reasons)),
        Section("plans", "All plans that were considered", "Plans", candidates(run.candidates, plot)),
        Section("memory", "Memory over the run", "Memory", memory(run.memory.samples)),
        Section("loss", "Loss", "Loss", losses(run, is_drawn=figures["plot-loss"] is not None)),
        Section("text", "Text from the trained model", "Text", samples(run)),
        Section("repeat", "Do it again", "Repeat", repeat(run)),
    ]
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    return page_html(Page(run.title, run.summary, tiles(run), sections, drawn))


def baseline(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    return next((row for row in rows if row.role == "default"), None)


def tiles(run: RunPage) -> list[Tile]:
    """Return the outcome in a few large numbers."""
    outcome = []
    base = baseline(run.comparison)
    chosen = next((row for row in run.comparison if row.role == "chosen"), None)
    if base and chosen:
        speed = chosen.tokens_per_second
        peak = chosen.peak_gib
        loss = chosen.held_out_loss
        outcome = [
            Tile("Speed", times(speed, base.tokens_per_second), f"{number(speed)} tokens per second"),
            Tile("Peak memory", times(peak, base.peak_gib), f"{number(peak, 2)} GiB allocated"),
            Tile("Held-out loss", difference(loss, base.held_out_loss), f"{number(loss, 3)}, after the same tokens"),
        ]
    errors = [(abs(row.error), row.quantity) for row in run.predictions if row.error is not None]
    if errors:
        worst, quantity = max(errors)
        outcome.append(Tile("Largest prediction error", f"{worst * 100:,.1f} %", quantity))
    return outcome


def fact_list(pairs: Iterable[Fact]) -> Facts:
    return Facts([(fact.label, fact.text) for fact in pairs])


def facts(run: RunPage) -> list[Block]:
    if not run.facts:
        return [missing("No facts about the machine, the model and the data were recorded.")]
    return [fact_list(run.facts)]


def comparison(plans: Sequence[ComparisonRow]) -> list[Block]:
    if not plans:
        return [missing("No comparison: the plain default was not measured in this run.")]
    base = baseline(plans)
    above = "All were measured on this machine, on the same data. The plain default is what a person gets without tuning. " + (
        "Small figures compare with the plain default." if base else "The plain default was not measured."
    )
    heads = [
        ("Plan", "long"),
        ("Tokens per second", "number"),
        ("Step, ms (median)", "number"),
        ("Peak allocated, GiB", "number"),
        ("Peak resident, GiB", "number"),
        ("Held-out loss", "number"),
    ]
    rows = [comparison_row(plan, base if base is not plan else None) for plan in plans]
    below = (
        "Allocated is what the job's tensors take at the highest moment; resident is all memory of the process. The "
        "held-out loss is taken on text that was not trained on, after the same number of tokens: lower is better."
    )
    chosen = frozenset(index for index, plan in enumerate(plans) if plan.role == "chosen")
    return [Paragraph(above), Table("Plans compared", heads, rows, chosen), Paragraph(below)]


def comparison_row(plan: ComparisonRow, base: ComparisonRow | None) -> list[Cell]:
    """Return the plan's numbers, each with a comparison with ``base`` beneath it."""
    reference = base or ComparisonRow(plan="")
    gap = difference(plan.held_out_loss, reference.held_out_loss)
    return [
        Cell(plan.plan, ROLE_WORDS[plan.role]),
        number_cell(plan.tokens_per_second, 0, small=times(plan.tokens_per_second, reference.tokens_per_second)),
        number_cell(plan.step_ms, small=times(plan.step_ms, reference.step_ms)),
        number_cell(plan.peak_gib, 2, small=times(plan.peak_gib, reference.peak_gib)),
        number_cell(plan.resident_gib, 2, small=times(plan.resident_gib, reference.resident_gib)),
        number_cell(plan.held_out_loss, 3, small=gap),
    ]


def predictions(run: RunPage) -> list[Block]:
    if not run.predictions:
        return [missing("Nothing to compare: this run has no predicted quantities.")]
    above = "Upshift predicted these before the job started. An error above zero means that it predicted too much."
    heads = [("Quantity", "long"), ("Predicted", "number"), ("Measured", "number"), ("Error", "number")]
    rows: list[Row] = [
        [Cell(row.quantity, row.unit or None), number(row.predicted), number(row.measured), percent(row.error)]
        for row in run.predictions
    ]
    return [Paragraph(above), Table("Predicted and measured", heads, rows)]


def reasons(choices: Sequence[Reason]) -> list[Block]:
    if not choices:
        return [missing("No reasons were recorded for this plan.")]
    above = "Each decision that a person would otherwise make by hand, and what the next best answer would have cost."
    heads = [("Choice", ""), ("Value", ""), ("Why", "long"), ("Runner-up, and what it would cost", "long")]
    rows = []
    for reason in choices:
        runner_up = [text for text in (reason.runner_up, reason.runner_up_cost) if text]
        rows.append([reason.choice, reason.value, reason.why, ": ".join(runner_up) if runner_up else "none"])
    return [Paragraph(above), Table("Choices and reasons", heads, rows)]


def candidates(plans: Sequence[Candidate], plot: CandidatePlot) -> list[Block]:
    if not plans:
        return [missing("No candidate plans were recorded for this run.")]
    counts = Counter(plan.status for plan in plans)
    above = (
        f"{len(plans):,} ways of running this job were considered; {counts['rejected']:,} were rejected, "
        f"{counts['tried'] + counts['chosen']:,} were tried for a few steps or run in full. "
    )
    label = f"Scatter plot of {plot.num_drawn} plans: predicted tokens per second over predicted peak GiB."
    drawing: Block = Plot("plot-candidates", label, candidates_caption(plans, plot))
    if plot.figure is None:
        drawing = missing("There is no plot: no plan has both a predicted speed and a predicted memory.")
    return [Paragraph(above), drawing, *tried(plans), *rejections(plans)]


def candidates_caption(plans: Sequence[Candidate], plot: CandidatePlot) -> str:
    caption = (
        "Each mark is one plan; point at it to read it. A thin line leads from where a tried plan was predicted to where "
        "it was measured. On the green line are the fastest plans for their memory."
    )
    if any(plan.changes_mathematics for plan in plans):
        caption += " Plans of other mathematics do not compute just what was asked for: a lower precision, say."
    if plot.num_predicted < len(plans):
        caption += f" {len(plans) - plot.num_predicted:,} plans without a prediction are not drawn."
    if plot.num_drawn < plot.num_predicted:
        caption += (
            f" Of {plot.num_predicted:,} plans {plot.num_drawn:,} are drawn: of plans of one kind at nearly the same place "
            "only the fastest, but every tried plan and all on the green line."
        )
    return caption


def tried(plans: Sequence[Candidate]) -> list[Block]:
    listed = [plan for plan in plans if plan.status in ("chosen", "tried")]
    listed.sort(key=lambda plan: (plan.status != "chosen", -(plan.measured_tokens_per_second or 0.0)))
    if not listed:
        return []
    heads = [
        ("Plan", "long"),
        ("Tokens per second, predicted", "number"),
        ("Tokens per second, measured", "number"),
        ("Peak GiB, predicted", "number"),
        ("Peak GiB, measured", "number"),
    ]
    rows: list[Row] = [
        [
            Cell(plan.label, "chosen" if plan.status == "chosen" else None),
            number(plan.tokens_per_second, 0),
            number(plan.measured_tokens_per_second, 0),
            number(plan.peak_gib, 2),
            number(plan.measured_peak_gib, 2),
        ]
        for plan in listed[:MAX_TRIED_LISTED]
    ]
    chosen = frozenset(index for index, plan in enumerate(listed) if plan.status == "chosen")
    remainder = [Paragraph(f"and {len(listed) - MAX_TRIED_LISTED:,} more")] if len(listed) > MAX_TRIED_LISTED else []
    return [Heading("Tried on this machine"), Table("Tried plans", heads, rows, chosen), *remainder]


def rejections(plans: Sequence[Candidate]) -> list[Block]:
    counts = Counter(plan.reason for plan in plans if plan.status == "rejected").most_common()
    if not counts:
        return []
    rows = [[reason, number(count)] for reason, count in counts[:MAX_REASONS_LISTED]]
    other_reasons = counts[MAX_REASONS_LISTED:]
    if other_reasons:
        rows.append([f"{len(other_reasons):,} other reasons", number(sum(count for _, count in other_reasons))])
    return [Heading("Rejected, and why"), Table("Rejections", [("Reason", "long"), ("Plans", "number")], rows)]


def memory(memory_samples: Sequence[MemorySample]) -> list[Block]:
    if not memory_samples:
        return [missing("Memory was not sampled in this run.")]
    above = (
        "What took the memory, from loading the model to saving it. The coloured areas are the known parts; the line "
        "is what the operating system counted for the process; the dashed line is the peak that was predicted."
    )
    caption = (
        "Shaded stretches are phases of the run; their names stand where they last "
        f"at least {MIN_LABELLED_SHARE * 100:.0f} % of the time."
    )
    label = f"Stacked area plot of memory in GiB over {memory_samples[-1].seconds:.0f} seconds, by part; see the table below."
    return [Paragraph(above), Plot("plot-memory", label, caption), memory_phases(memory_samples)]


def memory_phases(memory_samples: Sequence[MemorySample]) -> Table:
    seconds: dict[str, float] = {}
    for phase, start, end in phase_spans(memory_samples):
        seconds[phase] = seconds.get(phase, 0.0) + end - start
    heads = [
        ("Phase", ""),
        ("Seconds", "number"),
        ("Highest sum of parts, GiB", "number"),
        ("Largest part then", ""),
        ("Highest resident, GiB", "number"),
    ]
    rows = []
    for phase, length in seconds.items():
        phase_samples = [sample for sample in memory_samples if sample.phase == phase]
        highest_parts = max((sample.parts for sample in phase_samples), key=lambda highest_parts: sum(highest_parts.values()))
        largest = max(highest_parts, key=lambda name: highest_parts[name], default="")
        resident = max((sample.resident_gib for sample in phase_samples if sample.resident_gib is not None), default=None)
        total = sum(highest_parts.values()) if highest_parts else None
        rows.append([phase, number(length, 1), number(total, 2), largest, number(resident, 2)])
    return Table("Highest memory by phase", heads, rows)


def losses(run: RunPage, *, is_drawn: bool) -> list[Block]:
    if not is_drawn:
        return [missing("No loss was recorded in this run.")]
    above = (
        "How surprised the model is by the next token: lower is better. Where the curves of two plans lie on each "
        "other, the plans learn the same from the same number of tokens."
    )
    caption = (
        "Light: each step as it was. Bold: its moving mean over 3 % of the curve. Diamonds: loss on held-out text, "
        "which was not trained on."
    )
    label = f"Line plot of loss over tokens trained, for: {', '.join(curve.name for curve in run.loss_curves)}"
    return [Paragraph(above), Plot("plot-loss", label, caption)]


def samples(run: RunPage) -> list[Block]:
    if not run.samples:
        return [missing("No text was generated after this run.")]
    above = "What the trained model wrote. The prompt is bold; the rest is the model's own, unedited."
    return [Paragraph(above), *(Quote(sample.prompt, sample.text) for sample in run.samples)]


def repeat(run: RunPage) -> list[Block]:
    commands: list[Block] = [Command(command) for command in run.commands]
    environment = [Heading("Environment"), fact_list(run.environment)] if run.environment else []
    return [
        Paragraph("The commands that made this page, and where they ran."),
        *(commands or [missing("No command lines were recorded.")]),
        *environment,
        Heading("How floating-point operations are counted"),
        Paragraph(run.flop_convention or "", css=""),
    ]
