"""Tables and bars. Results go to standard output; progress goes to standard error.

Print the lines on a race that ``upshift encode`` and ``upshift generate`` share.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from upshift.cli.progress import activity
from upshift.hardware.spec import Host
from upshift.models.profile import Isolation
from upshift.planning.cost.process_memory import unknown_memory
from upshift.planning.cost.time import SampleUnit, sample_unit
from upshift.planning.cost.uncertainty import Number
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import COST_KEY, Candidate
from upshift.planning.trials.select import Tried
from upshift.record import Basis, Numbers, compared_numbers
from upshift.units import GIB, format_count, format_seconds

SAME = 0.005  # of time and of memory: what no prediction tells apart
SMALL_GIB = 0.005  # below what is printed
PHASE_WIDTH, NUMBER_WIDTH = 18, 9  # of the memory table, with what stands between columns
PLAN_WIDTH = 24  # at least, of a plan's label among seven columns of numbers
NO_BREAK = "\N{NO-BREAK SPACE}"
NUMBERS: tuple[Number, ...] = ("step", "allocated", "held")
RATES: dict[SampleUnit, str] = {"tokens": "tok/s", "images": "images/s"}
TIERS = {"measured": "measured here", "transferred": "corrected by other runs here", "formula": "formula"}

out = Console()
err = Console(stderr=True)


@contextmanager
def bar(title: str) -> Iterator[Callable[[float, float], None]]:
    """A progress bar on standard error, gone when done; yields ``update(done, total)``."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress, activity(title) as current:
        task = progress.add_task(title, total=None)

        def update(done: float, total: float) -> None:
            progress.update(task, completed=done, total=total)
            current.update(done, total)

        yield update


@contextmanager
def step(title: str) -> Iterator[None]:
    """Spinner with elapsed time while something runs; then one line saying how long it took."""
    start = time.perf_counter()
    with err.status(title), activity(title):
        yield
    err.print(f"[dim]{title}: {format_seconds(time.perf_counter() - start)}[/dim]")


def gib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def number(value: float | None, digits: int = 0) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.1%}"


COPIED = ("choice", "value", "engine", "precision")  # by a person: other columns wrap for them


def new_table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Text columns first, right-aligned number columns after; narrow enough for 80 columns."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", min_width=30 if name == "plan" else None, no_wrap=name in COPIED)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def plans_title(ranked: int, rejected: int, host: Host) -> str:
    held = " that fit" if unknown_memory(host) is None else ""
    return f"Best of {ranked:,} plans{held} ({rejected:,} rejected)"


def plans_table(planning: Planning, *, rows: int) -> Table:
    ranking = planning.ranking
    title = plans_title(len(ranking.candidates), ranking.num_rejected, planning.host)
    wide = out.width >= 110
    on_gpu = planning.host.device == "cuda"  # its allocator holds whole segments
    memory = ("alloc.", *(["resv."] if on_gpu else []), "held")
    columns = (RATES[sample_unit(planning.profile)], "step ms", *memory, "tier")
    table = new_table(title, "#", "plan", *(["bound by"] if wide else []), numbers=columns)
    table.padding, table.caption_justify = (0, 0), "left"
    table.columns[1].min_width = PLAN_WIDTH
    folded = folded_rows(ranking.candidates, rows=rows)
    for label, candidate, alike in [*folded, ("plain", planning.default, 0)]:
        numbers = planning.numbers(candidate)
        sizes = [numbers.peak_gib, *([numbers.reserved_gib] if on_gpu else []), numbers.resident_gib]
        bases = (candidate.basis("step"), candidate.basis("allocated"), candidate.basis("held"))
        table.add_row(
            label, candidate.plan.label() + (f" [dim]and {alike:,} alike[/dim]" if alike else ""),
            *([numbers.binding_term] if wide else []), number(numbers.tokens_per_second),
            number(numbers.step_ms.p50 if numbers.step_ms else None), *(gib(size) for size in sizes),
            "".join(basis.tier[0] for basis in bases), end_section=label == folded[-1][0],
        )  # fmt: skip
    kinds = {candidate.basis(name).tier for _, candidate, _ in folded for name in NUMBERS}
    words = "; ".join(f"{tier[0]} {TIERS[tier]}" for tier in TIERS if tier in kinds)
    reserved = "resv.: what the allocator holds; " if on_gpu else ""
    table.caption = (
        f"Memory in GiB. alloc.: tensors at the peak; {reserved}held: the whole {'device' if on_gpu else 'process'}. "
        f"tier, of time, alloc. and held: {words}."
    )
    return table


def folded_rows(candidates: list[Candidate], *, rows: int) -> list[tuple[str, Candidate, int]]:
    """(rank, plan, how many are alike): one row for plans that come from each other by one choice at a time that changes neither
    predicted time nor memory."""
    found: list[tuple[str, list[Candidate]]] = []
    for rank, candidate in enumerate(candidates, start=1):
        alike = next((group for _, group in found if _alike(candidate, group)), None)
        if alike is not None:
            alike.append(candidate)
        elif len(found) < rows:
            found.append((str(rank), [candidate]))
        elif candidate.tokens_per_second < (1 - SAME) * found[-1][1][0].tokens_per_second:
            break  # slower than every row: nothing alike comes any more
    return [(rank, group[0], len(group) - 1) for rank, group in found]


def _alike(candidate: Candidate, group: list[Candidate]) -> bool:
    first = group[0]
    pairs = (
        (candidate.tokens_per_second, first.tokens_per_second), (candidate.time.total, first.time.total),
        (candidate.memory.peak, first.memory.peak), (candidate.resident, first.resident),
    )  # fmt: skip
    if any(abs(one - other) > SAME * other for one, other in pairs):
        return False
    return any(sum(getattr(candidate.plan, name) != getattr(one.plan, name) for name in COST_KEY) == 1 for one in group)


def time_line(candidate: Candidate) -> str:
    """Return a line about the parts of the best plan's step, the longest first."""
    terms = sorted(candidate.time.terms.items(), key=lambda item: -item[1])
    shares = [f"{name} {seconds / candidate.time.total:.0%}" for name, seconds in terms if seconds > 0.005 * candidate.time.total]
    return f"Its step is bound by {', '.join(shares)}\n"


def memory_table(planning: Planning, candidate: Candidate) -> Table:
    """A row a phase, its parts in words: a column each would not fit."""
    numbers, on_gpu = planning.numbers(candidate), candidate.plan.device == "cuda"
    columns = ("alloc.", *(["resv."] if on_gpu else []), "held")
    table = new_table("Its memory, GiB at the highest moment of each phase", "phase", numbers=(*columns, "of it"))
    table.columns[-1].justify = "left"
    room = max(out.width - PHASE_WIDTH - len(columns) * NUMBER_WIDTH, 24)
    for phase, row in numbers.memory.items():
        total = sum(row.values())
        held = planning.job_memory.held_bytes(candidate, total * GIB) / GIB
        sizes = [total, *([planning.job_memory.reserved_bytes(candidate, total * GIB) / GIB] if on_gpu else []), held]
        parts = sorted(((part, size) for part, size in row.items() if size >= SMALL_GIB), key=lambda item: -item[1])
        table.add_row(phase, *(gib(size) for size in sizes), wrapped([f"{part} {gib(size)}" for part, size in parts], room))
    return table


def wrapped(items: list[str], width: int) -> str:
    """Lines of whole items."""
    unbroken = ", ".join(item.replace(" ", NO_BREAK) for item in items)
    lines = textwrap.wrap(unbroken, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(NO_BREAK, " ")


def sureness(numbers: Numbers) -> list[str]:
    """Return a line for each predicted number: what it rests on, and between which factors of it the measured one should lie."""
    step = Basis(tier=numbers.tier, interval=numbers.interval, num_records=numbers.num_records)
    lines = []
    for name, basis in (("Time", step), ("Allocated", numbers.peak_basis), ("Held", numbers.resident_basis)):
        if basis is None or basis.interval is None:
            continue
        low, high = basis.interval
        runs = f" ({basis.num_records:,} {'run' if basis.num_records == 1 else 'runs'})" if basis.num_records else ""
        lines.append(f"{name}: {TIERS.get(basis.tier, basis.tier)}{runs}; expect {low:.2f}x to {high:.2f}x")
    chance = numbers.out_of_memory_probability
    if chance is not None:
        lines.append(f"Probability of running out of memory: {chance:.1%}")
    return lines


def reasons_table(planning: Planning) -> Table:
    wide = out.width >= 120
    table = new_table(
        "Why, and what the runner-up would cost", "choice", "value", "runner-up", "its cost", *(["it trades"] if wide else [])
    )
    for reason in planning.reasons:
        row = [reason.choice, reason.value, reason.runner_up, reason.runner_up_cost]
        table.add_row(*row, *([reason.why] if wide else []))
    return table


def rejected_table(planning: Planning, *, rows: int = 4) -> Table | None:
    if not planning.ranking.rejected:
        return None
    table = new_table("Some of the rejected", "plan", "why")
    for entry in planning.ranking.rejected[:: max(len(planning.ranking.rejected) // rows, 1)][:rows]:
        table.add_row(entry.plan.label(), entry.reason)
    return table


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
            f"{gib(numbers.peak_gib)} ({gib(entry.candidate.memory.peak / GIB)})", number(numbers.loss, 4), style=style,
        )  # fmt: skip
    return table


def comparison_table(rows: list[tuple[str, Numbers]]) -> Table:
    """The first row is the baseline."""
    numbers_shown = ("tok/s", "speed", "peak GiB", "process GiB", "held-out loss*")
    table = new_table("Plain default against the chosen plan", "", numbers=numbers_shown)
    table.caption = "* after the same number of tokens"
    base = rows[0][1].tokens_per_second
    for name, numbers in rows:
        ratio = numbers.tokens_per_second / base if base and numbers.tokens_per_second else None
        table.add_row(
            name, number(numbers.tokens_per_second), "unknown" if ratio is None else f"{ratio:.2f}x",
            gib(numbers.peak_gib), gib(numbers.resident_gib), number(numbers.evaluation_loss, 4),
        )  # fmt: skip
    return table


def prediction_table(predicted: Numbers, measured: Numbers) -> Table:
    table = new_table("Predicted against measured", "", numbers=("predicted", "measured", "error"))
    for name, ours, real in compared_numbers(predicted, measured):
        digits = 2 if "GiB" in name else 0
        error = ours / real - 1 if ours is not None and real else None
        table.add_row(name, number(ours, digits), number(real, digits), percent(error))
    return table


def inspection_tables(inspection: Any) -> list[Table]:
    title = f"{inspection.architecture} · {inspection.objective} · {inspection.num_layers} layers"
    parts = new_table(title, "parameters", numbers=("count",))
    for part, count in inspection.parameters.items():
        parts.add_row(part, format_count(count))
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
    declares = new_table("What the model declares", "", "")
    for name, value in inspection.declares.items():
        text = (
            ", ".join(f"{k}: {v}" for k, v in value.items())
            if isinstance(value, dict)
            else ", ".join(value)
            if isinstance(value, (tuple, list))
            else str(value)
        )
        declares.add_row(name.replace("_", " "), text or "nothing")
    declares.add_row("loss in chunks", inspection.chunked_loss)
    return [parts, costs, declares, isolation_table(inspection.isolation)]


PADDING_WORDS = {
    "unmasked": "changes nothing",
    "masked": "changes nothing where a mask says where it is",
    "none": "changes the text's results, with a mask, too",
}


def isolation_table(isolation: Isolation) -> Table:
    """Return a table of what was seen of texts that share a row or a batch."""
    table = new_table("What reaches a text, seen on a small copy with random weights", "", "")
    if not isolation.proven:
        table.add_row("not proven", isolation.reason)
        return table
    for kernel, reason in isolation.packing.items():
        table.add_row(f"packed, {kernel} attention", reason or "nothing from other texts in its row")
    table.add_row("padding behind it", PADDING_WORDS[isolation.padding])
    if isolation.packing:
        table.add_row("token by token", isolation.by_token or "as the whole text")
        if not isolation.by_token:
            table.add_row("padding before it", isolation.left_padding or "changes nothing")
        whole = "of the whole batch alone: micro-batches would change it"
        table.add_row("loss of a batch", "the mean over its texts, by labels" if isolation.loss_splits else whole)
    return table


RaceSeconds = Annotated[
    float | None, typer.Option("--race-seconds", help="most of the race; default: 90, or a tenth of the run if that is more")
]
STOPPED = {
    "quality": "the quality is not reached",
    "behind": "the fastest is 1.5 times as fast or more",
    "time": "the race's time was over",
}


def dim(text: str, console: Console = out) -> None:
    """Print a text as it is, in gray: the names of extras look like markup."""
    console.print(text, style="dim", markup=False, highlight=False)


def teller(unit: str) -> Callable[[Any], None]:
    """Says of each contestant, as it ends, how many texts or tokens a second it did."""
    return lambda run: dim(
        f"{run.setup.label()}: {run.failure or f'{run.per_second:,.0f} {unit}, batch {run.setup.batch:,}'}", err
    )


def table(race: Any, batch: str, unit: str, more: Mapping[str, Callable[[Any], str]]) -> Table:
    """Every contestant that ran, the fastest first, with the batch that was best. forecast: what the planner's formulas said;
    cosine: of what agrees least; diff: the largest. ``batch``, ``unit``: what its setup's batch and its rate are called;
    ``more``: columns of one task."""
    numbers: dict[str, Callable[[Any], str]] = {
        batch: lambda run: f"{run.setup.batch:,}",
        unit: lambda run: f"{run.per_second:,.0f}",
        "forecast": lambda run: "" if run.forecast_per_second is None else f"{run.forecast_per_second:,.0f}",
        **more,
        "cosine": lambda run: f"{run.worst_cosine:.5f}",
        "diff": lambda run: f"{run.largest_difference:.1e}",
    }
    found = new_table("Race, from memory" if race.recalled else "Race", "engine", "precision", numbers=tuple(numbers))
    found.padding = (0, 0)
    for run in race.best():
        style = "bold green" if run.setup == race.chosen else None
        found.add_row(run.setup.engine, run.setup.precision, *(number(run) for number in numbers.values()), style=style)
    return found


def failures(race: Any, unit: str) -> None:
    """Print how fast anything could be, what did not run, what is not installed, and where the race is remembered."""
    from upshift.inference.registry import install_line

    if race.ceiling:
        dim(f"Without any computing: {race.ceiling:,.0f} {unit}, more than any engine can do here")

    for run in race.runs:
        if run.failure:
            dim(f"{run.setup.label()} did not run: {run.failure}")
    for why, said in STOPPED.items():
        names = [run.setup.label() for run in race.runs if run.stopped == why]
        if names:
            dim(f"Timed once only, as {said}: {', '.join(dict.fromkeys(names))}")
    for skipped in race.left_out:
        dim(f"{skipped.setup.label()} did not race: {_why(skipped, race, unit)}")
    if race.seconds:
        dim(f"The race took {race.seconds:.0f} s of at most {race.allowed:.0f} (--race-seconds)")
    if race.recalled:
        dim(f"remembered; delete {race.file} to race again")
    for name, rate in race.expected.items():
        brings = f"; the planner expects {rate:,.0f} {unit} of it" if rate else ""
        dim(f"{name} is not installed and did not race: {install_line(name)}{brings}")


def _why(skipped: Any, race: Any, unit: str) -> str:
    if skipped.reason == "time":
        return f"the {race.allowed:.0f} s of the race were over; --race-seconds gives it more"
    if skipped.reason == "quality":
        return f"{skipped.by.label()}, which rounds less, leaves it a cosine of {skipped.cosine:.5f} at most"
    said = "nothing is expected of it without a C++ compiler, or of a model that the planner has no formulas for"
    if skipped.rate:
        said = f"the planner expects at most {skipped.rate:,.0f} {unit}, which do not pay for compiling in a run of this length"
    return f"{said}; --engine {skipped.setup.engine} races it"
