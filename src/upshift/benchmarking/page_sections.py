"""The sections of the report page: captions for a person who does not know the internals, tables, places of the plots.

A section without data stays on the page and says why it is empty.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence

from upshift.benchmarking.page_candidates import CandidatePlot
from upshift.benchmarking.page_content import Candidate, ComparisonRow, MemorySample, Reason, RunPage
from upshift.benchmarking.page_html import (
    definitions,
    empty,
    number,
    paragraph,
    percent,
    plot,
    ratio,
    table,
    text,
    tile_list,
    times,
)
from upshift.benchmarking.page_plots import MIN_LABELLED_SHARE, phase_spans

MAX_REASONS_LISTED = 8
MAX_TRIED_LISTED = 20
ROLE_WORDS = {"default": "plain default", "chosen": "chosen by Upshift", "other": ""}


def baseline(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    return next((row for row in rows if row.role == "default"), None)


def tiles(page: RunPage) -> str:
    """The outcome in a few large numbers, those that are known."""
    base, chosen = baseline(page.comparison), next((row for row in page.comparison if row.role == "chosen"), None)
    found: list[tuple[str, str, str]] = []
    if base and chosen:
        speed = times(ratio(chosen.tokens_per_second, base.tokens_per_second))
        found.append(("Speed", speed, f"{number(chosen.tokens_per_second)} tokens per second"))
        peak = times(ratio(chosen.peak_gib, base.peak_gib))
        found.append(("Peak memory", peak, f"{number(chosen.peak_gib, digits=2)} GiB allocated"))
        if chosen.held_out_loss is not None and base.held_out_loss is not None:
            gap = f"{chosen.held_out_loss - base.held_out_loss:+.3f}".replace("-", "\N{MINUS SIGN}")
            found.append(("Held-out loss", gap, f"{number(chosen.held_out_loss, digits=3)}, after the same tokens"))
    errors = [(abs(row.error), row.quantity) for row in page.predictions if row.error is not None]
    if errors:
        worst, quantity = max(errors)
        found.append(("Largest prediction error", f"{worst * 100:,.1f} %", text(quantity)))
    return tile_list(found)


def facts(page: RunPage) -> list[str]:
    if not page.facts:
        return [empty("No facts about the machine, the model and the data were recorded.")]
    return [definitions((fact.label, fact.text) for fact in page.facts)]


def comparison(page: RunPage) -> list[str]:
    if not page.comparison:
        return [empty("No comparison: the plain default was not measured in this run.")]
    base = baseline(page.comparison)
    words = "All were measured on this machine, on the same data. The plain default is what a person gets without "
    words += "tuning. "
    words += "Small figures compare with the plain default." if base else "The plain default was not measured."
    heads = [("Plan", "long"), ("Tokens per second", "number"), ("Step, ms (median)", "number"),
             ("Peak allocated, GiB", "number"), ("Peak resident, GiB", "number"),
             ("Held-out loss", "number")]  # fmt: skip
    rows = []
    for row in page.comparison:
        against = base if base is not None and row is not base else None

        def cell(field: str, digits: int | None, row: ComparisonRow = row, base: ComparisonRow | None = against) -> str:
            value = getattr(row, field)
            part = "" if base is None else times(ratio(value, getattr(base, field)))
            return number(value, digits=digits, small=part)

        gap = ""
        if against and row.held_out_loss is not None and against.held_out_loss is not None:
            gap = f"{row.held_out_loss - against.held_out_loss:+.3f}".replace("-", "\N{MINUS SIGN}")
        role = f"<small>{ROLE_WORDS[row.role]}</small>" if ROLE_WORDS[row.role] else ""
        rows.append([text(row.plan) + role, cell("tokens_per_second", 0), cell("step_ms", None), cell("peak_gib", 2),
                     cell("resident_gib", 2), number(row.held_out_loss, digits=3, small=gap)])  # fmt: skip
    marked = frozenset(index for index, row in enumerate(page.comparison) if row.role == "chosen")
    note = (
        "Allocated is what the job's tensors take at the highest moment; resident is all memory of the process. The "
        "held-out loss is taken on text that was not trained on, after the same number of tokens: lower is better."
    )
    return [paragraph(words), table(heads, rows, label="Plans compared", marked=marked), paragraph(note)]


def predictions(page: RunPage) -> list[str]:
    if not page.predictions:
        return [empty("Nothing to compare: this run has no predicted quantities.")]
    heads = [("Quantity", "long"), ("Predicted", "number"), ("Measured", "number"), ("Error", "number")]
    rows = []
    for row in page.predictions:
        unit = f"<small>{text(row.unit)}</small>" if row.unit else ""
        rows.append([text(row.quantity) + unit, number(row.predicted), number(row.measured), percent(row.error)])
    words = "Upshift predicted these before the job started. An error above zero means that it predicted too much."
    return [paragraph(words), table(heads, rows, label="Predicted and measured")]


def reasons(all_reasons: Sequence[Reason]) -> list[str]:
    if not all_reasons:
        return [empty("No reasons were recorded for this plan.")]
    heads = [("Choice", ""), ("Value", ""), ("Why", "long"), ("Runner-up, and what it would cost", "long")]
    rows = []
    for one in all_reasons:
        words = [part for part in (one.runner_up, one.runner_up_cost) if part]
        rows.append([text(one.choice), text(one.value), text(one.why), text(": ".join(words)) if words else "none"])
    above = "Each decision that a person would otherwise make by hand, and what the next best answer would have cost."
    return [paragraph(above), table(heads, rows, label="Choices and reasons")]


def candidates(page: RunPage, drawing: CandidatePlot) -> list[str]:
    if not page.candidates:
        return [empty("No candidate plans were recorded for this run.")]
    num, counts = len(page.candidates), Counter(one.status for one in page.candidates)
    words = (
        f"{num:,} ways of running this job were considered; {counts['rejected']:,} were rejected, "
        f"{counts['tried'] + counts['chosen']:,} were tried for a few steps or run in full. "
    )
    parts = []
    if drawing.figure is None:
        parts.append(empty("There is no plot: no plan has both a predicted speed and a predicted memory."))
    else:
        caption = "Each mark is one plan; point at it to read it. A thin line leads from where a tried plan was "
        caption += "predicted to where it was measured. On the green line are the fastest plans for their memory."
        if any(one.changes_mathematics for one in page.candidates):
            caption += " Plans of other mathematics do not compute just what was asked for: a lower precision, say."
        if drawing.num_known < num:
            caption += f" {num - drawing.num_known:,} plans without a prediction are not drawn."
        if drawing.num_drawn < drawing.num_known:
            caption += f" Of {drawing.num_known:,} plans {drawing.num_drawn:,} are drawn: of plans of one kind at "
            caption += "nearly the same place only the fastest, but every tried plan and all on the green line."
        label = f"Scatter plot of {drawing.num_drawn} plans: predicted tokens per second over predicted peak GiB."
        parts.append(plot("plot-candidates", label=label, caption=caption))
    return [paragraph(words), *parts, tried(page.candidates), rejections(page.candidates)]


def tried(all_candidates: Sequence[Candidate]) -> str:
    rows = [one for one in all_candidates if one.status in ("chosen", "tried")]
    rows.sort(key=lambda one: (one.status != "chosen", -(one.measured_tokens_per_second or 0.0)))
    if not rows:
        return ""
    heads = [("Plan", "long"), ("Tokens per second, predicted", "number"), ("Tokens per second, measured", "number"),
             ("Peak GiB, predicted", "number"), ("Peak GiB, measured", "number")]  # fmt: skip
    cells = [
        [text(one.label) + ("<small>chosen</small>" if one.status == "chosen" else ""),
         number(one.tokens_per_second, digits=0), number(one.measured_tokens_per_second, digits=0),
         number(one.peak_gib, digits=2), number(one.measured_peak_gib, digits=2)]
        for one in rows[:MAX_TRIED_LISTED]
    ]  # fmt: skip
    more = paragraph(f"and {len(rows) - MAX_TRIED_LISTED:,} more") if len(rows) > MAX_TRIED_LISTED else ""
    marked = frozenset(index for index, one in enumerate(rows) if one.status == "chosen")
    return "<h3>Tried on this machine</h3>" + table(heads, cells, label="Tried plans", marked=marked) + more


def rejections(all_candidates: Sequence[Candidate]) -> str:
    counts = Counter(one.reason for one in all_candidates if one.status == "rejected").most_common()
    if not counts:
        return ""
    rows = [[text(reason), number(count)] for reason, count in counts[:MAX_REASONS_LISTED]]
    rest = sum(count for _, count in counts[MAX_REASONS_LISTED:])
    if rest:
        rows.append([f"{len(counts) - MAX_REASONS_LISTED:,} other reasons", number(rest)])
    return "<h3>Rejected, and why</h3>" + table([("Reason", "long"), ("Plans", "number")], rows, label="Rejections")


def memory(page: RunPage) -> list[str]:
    samples = page.memory.samples
    if not samples:
        return [empty("Memory was not sampled in this run.")]
    words = (
        "What took the memory, from loading the model to saving it. The coloured areas are the known parts; the line "
        "is what the operating system counted for the process; the dashed line is the peak that was predicted."
    )
    caption = "Shaded stretches are phases of the run; their names stand where they last "
    caption += f"at least {MIN_LABELLED_SHARE * 100:.0f} % of the time."
    label = f"Stacked area plot of memory in GiB over {samples[-1].seconds:.0f} seconds, by part; see the table below."
    return [paragraph(words), plot("plot-memory", label=label, caption=caption), memory_phases(samples)]


def memory_phases(samples: Sequence[MemorySample]) -> str:
    lengths: dict[str, float] = {}
    for phase, start, end in phase_spans(samples):
        lengths[phase] = lengths.get(phase, 0.0) + end - start
    heads = [("Phase", ""), ("Seconds", "number"), ("Highest sum of parts, GiB", "number"), ("Largest part then", ""),
             ("Highest resident, GiB", "number")]  # fmt: skip
    rows = []
    for phase, seconds in lengths.items():
        inside = [sample for sample in samples if sample.phase == phase]
        top = max(inside, key=lambda sample: sum(sample.parts.values()))
        largest = max(top.parts, key=lambda part: top.parts[part], default="")
        resident = max((one.resident_gib for one in inside if one.resident_gib is not None), default=None)
        total = sum(top.parts.values()) if top.parts else None
        cells = [number(seconds, digits=1), number(total, digits=2), text(largest), number(resident, digits=2)]
        rows.append([text(phase), *cells])
    return table(heads, rows, label="Highest memory by phase")


def losses(page: RunPage, *, is_drawn: bool) -> list[str]:
    if not is_drawn:
        return [empty("No loss was recorded in this run.")]
    words = (
        "How surprised the model is by the next token: lower is better. Where the curves of two plans lie on each "
        "other, the plans learn the same from the same number of tokens."
    )
    caption = (
        "Light: each step as it was. Bold: its moving mean over 3 % of the curve. Diamonds: loss on held-out text, "
        "which was not trained on."
    )
    names = ", ".join(curve.name for curve in page.loss_curves)
    label = f"Line plot of loss over tokens trained, for: {names}"
    return [paragraph(words), plot("plot-loss", label=label, caption=caption)]


def samples(page: RunPage) -> list[str]:
    if not page.samples:
        return [empty("No text was generated after this run.")]
    parts = [paragraph("What the trained model wrote. The prompt is bold; the rest is the model's own, unedited.")]
    for one in page.samples:
        words = f"<strong>{text(one.prompt) if one.prompt.strip() else ''}</strong>{html.escape(one.text)}"
        parts.append(f"<blockquote><p>{words}</p></blockquote>")
    return parts


def repeat(page: RunPage) -> list[str]:
    parts = [paragraph("The commands that made this page, and where they ran.")]
    if page.commands:
        parts += [f'<pre tabindex="0"><code>{text(command)}</code></pre>' for command in page.commands]
    else:
        parts.append(empty("No command lines were recorded."))
    if page.environment:
        parts += ["<h3>Environment</h3>", definitions((fact.label, fact.text) for fact in page.environment)]
    parts += ["<h3>How floating-point operations are counted</h3>", paragraph(text(page.flop_convention or ""), css="")]
    return parts
