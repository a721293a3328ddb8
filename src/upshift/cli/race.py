"""What ``upshift encode`` and ``upshift generate`` both say of a race."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from upshift.cli import show

if TYPE_CHECKING:
    from upshift.inference.setup import Task


def dim(text: str, console: Console = show.out) -> None:
    """As it is: the names of extras look like markup."""
    console.print(text, style="dim", markup=False, highlight=False)


def teller(unit: str) -> Callable[[Any], None]:
    """Says of each contestant, as it ends, how many texts or tokens a second it did."""
    return lambda run: dim(f"{run.setup.label()}: {run.failure or f'{run.per_second:,.0f} {unit}'}", show.err)


def failures(race: Any, task: Task) -> None:
    """What did not run, what is not installed, and where the race is remembered."""
    from upshift.inference.engines import missing

    for run in race.runs:
        if run.failure:
            dim(f"{run.setup.label()} did not run: {run.failure}")
    if race.recalled:
        dim(f"remembered; delete {race.file} to race again")
    for said in missing(task):
        dim(said)
