"""Tables, bars and lines that several commands print. Results go to standard output, progress to standard error.

First bars and numbers, then the tables of a plan, of a run and of a model, then those of a race between engines.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from upshift.cli.progress import activity
from upshift.models.profile import Isolation
from upshift.models.source import AdapterOptions
from upshift.planning.cost.time import SampleUnit
from upshift.planning.trials.select import Tried
from upshift.record import Numbers, compared_numbers
from upshift.units import GIB, format_count, format_seconds

SHOWN_PLANS = 5  # in a table for which the user gives no number
NO_BREAK = "\N{NO-BREAK SPACE}"
RATES: dict[SampleUnit, str] = {"tokens": "tok/s", "images": "images/s"}


def new_console(*, stderr: bool = False, file: IO[str] | None = None, width: int | None = None) -> Console:
    """Return a console that prints every text as it is. Styles are arguments or ``rich.text.Text``, never markup in a text.

    Messages of libraries, paths and names hold brackets. As markup rich would drop them, or raise MarkupError."""
    return Console(stderr=stderr, file=file, width=width, markup=False, emoji=False)


out = new_console()
err = new_console(stderr=True)


def text_column(template: str, column: Column | None = None) -> TextColumn:
    """Return a column of a progress bar that shows its text as it is, as the consoles do. ``column``: its place in the table."""
    return TextColumn(template, markup=False, table_column=column)


def print_detail(name: str, text: str) -> None:
    """Print a detail below a finding or a change, such as its cause. The line is not broken: a person copies commands."""
    out.print(Text.assemble((f"      {name}:", "dim"), f" {text}"), soft_wrap=True)


@contextmanager
def bar(title: str) -> Iterator[Callable[[float, float], None]]:
    """Show a progress bar on standard error until the block ends. Yield ``update(done, total)``."""
    columns = (SpinnerColumn(), text_column("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress, activity(title) as current:
        task = progress.add_task(title, total=None)

        def update(done: float, total: float) -> None:
            progress.update(task, completed=done, total=total)
            current.update(done, total)

        yield update


@contextmanager
def step(title: str) -> Iterator[None]:
    """Show a spinner with the elapsed time until the block ends, then print one line with the time that it took."""
    start = time.perf_counter()
    with err.status(Text(title)), activity(title):
        yield
    err.print(f"{title}: {format_seconds(time.perf_counter() - start)}", style="dim")


def gib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def number(value: float | None, digits: int = 0) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.1%}"


COPIED = ("choice", "value", "engine", "precision")  # a person copies these columns: they do not wrap, others do


def new_table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return an empty table: text columns first, then right-aligned number columns. It is to fit 80 columns."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        show_header=any(columns) or any(numbers),
    )
    for name in columns:
        table.add_column(name, overflow="fold", min_width=30 if name == "plan" else None, no_wrap=name in COPIED)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def wrap_items(items: list[str], width: int) -> str:
    """Join the items with commas in lines of at most ``width`` characters. A line breaks between items only."""
    unbroken = ", ".join(item.replace(" ", NO_BREAK) for item in items)
    lines = textwrap.wrap(unbroken, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(NO_BREAK, " ")


def adapter_line(options: AdapterOptions) -> str | None:
    """Return a sentence that describes the new adapter, or None if there is none."""
    if options.lora_rank is None:
        return None
    kind = "DoRA" if options.lora_dora else "LoRA"
    settings = [] if options.lora_alpha is None else [f"alpha {options.lora_alpha}"]
    settings += [f"dropout {options.lora_dropout:g}"] if options.lora_dropout else []
    settings += ["rsLoRA"] if options.lora_rslora else []
    details = f" ({', '.join(settings)})" if settings else ""
    is_everywhere = options.targets_all
    target = "every linear layer but the head" if is_everywhere else ", ".join(options.lora_target)
    saved = options.lora_modules_to_save
    beside = f", beside {', '.join(saved)}, trained whole" if saved else ""
    weights = "; the frozen weights are stored in NF4" if options.load_in_4bit else ""
    return f"{kind} of rank {options.lora_rank}{details} around {target}{beside}{weights}"


def trials_table(tried: list[Tried], chosen: Tried) -> Table:
    table = new_table("Trials: measured (predicted)", "plan", numbers=("tok/s", "peak GiB", "loss"))
    for entry in tried:
        style = "bold" if entry is chosen else None
        if not entry.ok:
            table.add_row(f"{entry.candidate.plan.label()}: {entry.failure}", "", "", "", style="dim")
            continue
        numbers = entry.numbers()
        table.add_row(
            entry.candidate.plan.label(),
            f"{number(numbers.tokens_per_second)} ({number(entry.candidate.tokens_per_second)})",
            f"{gib(numbers.peak_gib)} ({gib(entry.candidate.memory.peak / GIB)})",
            number(numbers.loss, 4),
            style=style,
        )
    return table


def comparison_table(rows: list[tuple[str, Numbers]]) -> Table:
    """Compare runs by name. The first row is the baseline of the column "speed"."""
    numbers_shown = ("tok/s", "speed", "peak GiB", "process GiB", "held-out loss*")
    table = new_table("Plain default against the chosen plan", "", numbers=numbers_shown)
    table.caption = "* after the same number of tokens"
    base = rows[0][1].tokens_per_second
    for name, numbers in rows:
        ratio = numbers.tokens_per_second / base if base and numbers.tokens_per_second else None
        table.add_row(
            name,
            number(numbers.tokens_per_second),
            "unknown" if ratio is None else f"{ratio:.2f}x",
            gib(numbers.peak_gib),
            gib(numbers.resident_gib),
            number(numbers.evaluation_loss, 4),
        )
    return table


def prediction_table(predicted: Numbers, measured: Numbers) -> Table:
    table = new_table("Predicted against measured", "", numbers=("predicted", "measured", "error"))
    for name, predicted_value, measured_value in compared_numbers(predicted, measured):
        digits = 2 if "GiB" in name else 0
        error = None
        if predicted_value is not None and measured_value:
            error = predicted_value / measured_value - 1
        table.add_row(name, number(predicted_value, digits), number(measured_value, digits), percent(error))
    return table


def inspection_tables(inspection: Any) -> list[Table]:
    """Return the tables of ``upshift inspect``: parameters, costs of a sequence, declarations, and isolation of texts."""
    title = f"{inspection.architecture} · {inspection.objective} · {inspection.num_layers} layers"
    parameters = new_table(title, "parameters", numbers=("count",))
    for component, count in inspection.parameters.items():
        parameters.add_row(component, format_count(count))
    tables = [parameters, _costs_table(inspection), _declarations_table(inspection)]
    tables += [_listed_table(name, value) for name, value in inspection.declares.items() if _is_long(value)]
    return [*tables, isolation_table(inspection.isolation)]


def _costs_table(inspection: Any) -> Table:
    costs = new_table(f"One sequence of {inspection.sequence_length} tokens", "", "")
    costs.add_row("forward", f"{inspection.flops_forward / 1e9:,.1f} GFLOP")
    costs.add_row("forward + backward", f"{inspection.flops_train / 1e9:,.1f} GFLOP")
    for row in inspection.activations:
        recomputed = "" if row.whole_model_recomputed is None else f", {row.whole_model_recomputed / 2**20:,.1f} MiB recomputed"
        costs.add_row(
            f"saved activations ({row.precision})",
            f"{row.whole_model / 2**20:,.1f} MiB{recomputed}; {row.per_layer / 2**20:,.2f} MiB a layer",
        )
    if inspection.kv_bytes is not None:
        costs.add_row(
            "keys and values, bf16",
            f"{inspection.kv_bytes / 2**20:,.2f} MiB; {inspection.kv_bytes_per_token / 2**10:,.2f} KiB a token",
        )
    return costs


def _declarations_table(inspection: Any) -> Table:
    table = new_table("What the model declares", "", "")
    for name, value in inspection.declares.items():
        table.add_row(name.replace("_", " "), _declaration_text(value) or "nothing")
    table.add_row("loss in chunks", inspection.chunked_loss)
    return table


MAX_LISTED = 6  # more entries than these would wrap a cell over many lines


def _is_long(value: Any) -> bool:
    return isinstance(value, (dict, tuple, list)) and len(value) > MAX_LISTED


def _declaration_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _is_long(value):
        return f"{len(value)} entries, listed below"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(value)
    return str(value)


def _listed_table(name: str, value: Any) -> Table:
    """Return a table with a row for each entry of a long declaration."""
    table = new_table(name.replace("_", " ").capitalize(), "", "")
    for key, item in value.items() if isinstance(value, dict) else ((item, "") for item in value):
        table.add_row(str(key), str(item))
    return table


PADDING_WORDS = {
    "unmasked": "changes nothing",
    "masked": "changes nothing where a mask says where it is",
    "none": "changes the text's results, with a mask, too",
}


def isolation_table(isolation: Isolation) -> Table:
    """Return what a text computes to when other texts share its row or its batch, as seen on a small copy."""
    table = new_table("What reaches a text, seen on a small copy with random weights", "", "")
    if not isolation.proven:
        table.add_row("not proven", isolation.reason)
        return table
    for kernel, reason in isolation.packing.items():
        table.add_row(f"packed, {kernel} attention", reason or "nothing from other texts in its row")
    if isolation.packing or isolation.loss_splits:  # else a text's results depend on its batch, padding included
        table.add_row("padding behind it", PADDING_WORDS[isolation.padding])
    if isolation.packing:
        table.add_row("token by token", isolation.by_token or "as the whole text")
        if not isolation.by_token:
            table.add_row("padding before it", isolation.left_padding or "changes nothing")
    if isolation.packing or not isolation.loss_splits:
        loss = "of the whole batch alone: micro-batches would change it"
        if isolation.loss_splits:
            loss = "the mean over its texts, by labels"
        table.add_row("loss of a batch", loss)
    if isolation.exact_tokens is not None:
        effect = "change the results of all texts of their batch, and are not packed"
        table.add_row(f"texts above {isolation.exact_tokens:,} tokens", effect)
    return table


UNLIMITED = 10_000  # columns, to measure a table in its own width
MAX_FAILURE = 160  # characters of a library's error; all of it is in the race's file
STOPPED = {  # why the race stopped timing an engine, by the reason's name
    "quality": "the quality is not reached",
    "behind": "the fastest is 1.5 times as fast or more",
    "time": "the race's time was over",
}


def dim(text: str, console: Console | None = None, *, soft_wrap: bool = False) -> None:
    """Print a text in gray.

    ``console``: standard output if None. ``soft_wrap``: never break the line, so that its command or path can be copied."""
    (console or out).print(text, style="dim", highlight=False, soft_wrap=soft_wrap)


def run_printer(unit: str) -> Callable[[Any], None]:
    """Return a callback that prints the rate of each engine's run as it ends, in ``unit`` (texts/s or tokens/s)."""

    def print_run(run: Any) -> None:
        outcome = run.failure or f"{run.per_second:,.0f} {unit}, batch {run.setup.batch:,}"
        dim(f"{run.setup.label()}: {outcome}", err)

    return print_run


def describe_copies(copies: int | None) -> str:
    """Return how many copies of the model shared the work, after a comma. None: the command's own process did it."""
    if copies is None:
        return ""
    return f", {copies} {'copies' if copies > 1 else 'copy'} of the model"


def race_table(race: Any, batch: str, unit: str, task_columns: Mapping[str, Callable[[Any], str]]) -> Table:
    """Return a row for each engine and precision that ran, the fastest first, at its best batch.

    Columns: ``batch`` and ``unit`` name the batch size and the rate; forecast: the rate by the planner's formulas; cosine: of
    the output that agrees least; diff: the largest difference. ``task_columns``: further columns, by name."""
    columns: dict[str, Callable[[Any], str]] = {
        batch: lambda run: f"{run.setup.batch:,}",
        unit: lambda run: f"{run.per_second:,.0f}",
        "forecast": lambda run: "" if run.forecast_per_second is None else f"{run.forecast_per_second:,.0f}",
        **task_columns,
        "cosine": lambda run: f"{run.worst_cosine:.5f}",
        "diff": lambda run: f"{run.largest_difference:.1e}",
    }
    table = _race_table(race, columns, joint=False)
    return (
        table
        if out.measure(table, options=out.options.update(width=UNLIMITED)).maximum <= out.width
        else _race_table(race, columns, joint=True)
    )


def _race_table(race: Any, columns: Mapping[str, Callable[[Any], str]], *, joint: bool) -> Table:
    """Return the table. ``joint``: the precision stands below the engine's name, for a narrow screen."""
    names = ("engine",) if joint else ("engine", "precision")
    table = new_table("Race, from memory" if race.recalled else "Race", *names, numbers=tuple(columns))
    table.padding = (0, 0)
    for run in race.best():
        style = "bold green" if run.setup == race.chosen else None
        setup = (run.setup.engine, run.setup.precision)
        cells = ("\n".join(setup),) if joint else setup
        table.add_row(*cells, *(column(run) for column in columns.values()), style=style)
    return table


def print_race_notes(race: Any, unit: str) -> None:
    """Print the ceiling of the rate, the engines that failed, stopped, did not race or are not installed, and the race's file."""
    from upshift.inference.registry import install_line

    if race.ceiling:
        dim(f"The upper limit: {race.ceiling:,.0f} {unit}, for an engine that computes nothing")
    for run in race.runs:
        if run.failure:
            dim(f"{run.setup.label()} did not run: {textwrap.shorten(run.failure, MAX_FAILURE, placeholder=' ...')}")
    for reason, text in STOPPED.items():
        names = [run.setup.label() for run in race.runs if run.stopped == reason]
        if names:
            dim(f"Timed once only, as {text}: {', '.join(dict.fromkeys(names))}")
    _print_skipped(race, unit)
    if race.seconds > race.allowed:
        dim(f"The race took {race.seconds:.0f} s, because the reference always runs to its end")
    elif race.seconds:
        dim(f"The race took {race.seconds:.0f} s of at most {race.allowed:.0f} (--race-seconds)")
    if race.recalled:
        dim(f"remembered; delete {race.file} to race again", soft_wrap=True)
    for name, rate in race.expected.items():
        expected_rate = f"; the planner expects {rate:,.0f} {unit} of it" if rate else ""
        dim(f"{name} is not installed and did not race: {install_line(name)}{expected_rate}", soft_wrap=True)


def _print_skipped(race: Any, unit: str) -> None:
    """Print a line for each reason, with all engines that did not race for this reason."""
    names_by_reason: dict[str, list[str]] = {}
    for skipped in race.left_out:
        names_by_reason.setdefault(_skip_reason(skipped, race, unit), []).append(skipped.setup.label())
    for reason, names in names_by_reason.items():
        dim(f"{', '.join(dict.fromkeys(names))} did not race: {reason}")


def _skip_reason(skipped: Any, race: Any, unit: str) -> str:
    if skipped.reason == "time":
        return f"the {format_seconds(race.allowed)} of the race were over; use a larger --race-seconds"
    if skipped.reason == "start":
        engine = skipped.setup.engine
        return f"a run of this length ends about as soon as its process has started twice; --engine {engine} races it"
    if skipped.reason == "quality":
        return f"{skipped.by.label()}, which rounds less, leaves it a cosine of {skipped.cosine:.5f} at most"
    reason = "the planner cannot predict its speed, because there is no C++ compiler, or no formula for this model"
    if skipped.rate:
        reason = f"the planner expects at most {skipped.rate:,.0f} {unit}, so here compiling costs more time than it saves"
    return f"{reason}; --engine {skipped.setup.engine} races it"
