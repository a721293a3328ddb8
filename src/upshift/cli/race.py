"""Print the lines on a race that ``upshift encode`` and ``upshift generate`` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from upshift.cli import show

RaceSeconds = Annotated[
    float | None, typer.Option("--race-seconds", help="most of the race; default: 90, or a tenth of the run if that is more")
]
STOPPED = {
    "quality": "the quality is not reached",
    "behind": "the fastest is 1.5 times as fast or more",
    "time": "the race's time was over",
}


def dim(text: str, console: Console = show.out) -> None:
    """Print a text as it is, in gray: the names of extras look like markup."""
    console.print(text, style="dim", markup=False, highlight=False)


def teller(unit: str) -> Callable[[Any], None]:
    """Says of each contestant, as it ends, how many texts or tokens a second it did."""
    return lambda run: dim(
        f"{run.setup.label()}: {run.failure or f'{run.per_second:,.0f} {unit}, batch {run.setup.batch:,}'}", show.err
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
    found = show.new_table("Race, from memory" if race.recalled else "Race", "engine", "precision", numbers=tuple(numbers))
    found.padding = (0, 0)
    for run in race.best():
        style = "bold green" if run.setup == race.chosen else None
        found.add_row(run.setup.engine, run.setup.precision, *(number(run) for number in numbers.values()), style=style)
    return found


def failures(race: Any, unit: str) -> None:
    """Print how fast anything could be, what did not run, what is not installed, and where the race is remembered."""
    from upshift.inference.engines import install_line

    if race.ceiling:
        dim(f"Without any computing: {race.ceiling:,.0f} {unit}, more than any engine can do here")

    for run in race.runs:
        if run.failure:
            dim(f"{run.setup.label()} did not run: {run.failure}")
    for why, said in STOPPED.items():
        names = [run.setup.label() for run in race.runs if run.stopped == why]
        if names:
            dim(f"Timed once only, as {said}: {', '.join(dict.fromkeys(names))}")
    for out in race.left_out:
        dim(f"{out.setup.label()} did not race: {_why(out, race, unit)}")
    if race.seconds:
        dim(f"The race took {race.seconds:.0f} s of at most {race.allowed:.0f} (--race-seconds)")
    if race.recalled:
        dim(f"remembered; delete {race.file} to race again")
    for name, rate in race.expected.items():
        brings = f"; the planner expects {rate:,.0f} {unit} of it" if rate else ""
        dim(f"{name} is not installed and did not race: {install_line(name)}{brings}")


def _why(out: Any, race: Any, unit: str) -> str:
    if out.reason == "time":
        return f"the {race.allowed:.0f} s of the race were over; --race-seconds gives it more"
    if out.reason == "quality":
        return f"{out.by.label()}, which rounds less, leaves it a cosine of {out.cosine:.5f} at most"
    said = "nothing is expected of it without a C++ compiler, or of a model that the planner has no formulas for"
    if out.rate:
        said = f"the planner expects at most {out.rate:,.0f} {unit}, which do not pay for compiling in a run of this length"
    return f"{said}; --engine {out.setup.engine} races it"
