"""Run ``upshift profile -- train ...``: show how the time of training steps is spent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from upshift.cli import doctor, tables
from upshift.cli import train as train_command
from upshift.cli.options import Json, argument, move_flags_to_set, option, output_folder
from upshift.cli.progress import importing_libraries
from upshift.cli.run_display import RunDisplay
from upshift.cli.usage.help_page import Panel
from upshift.errors import RequestError

Command = Annotated[
    list[str],
    argument("-- train MODEL --data PATH ...", "The training command to profile, after --.", panel=Panel.SUBJECT),
]
Output = Annotated[Path, output_folder("The folder for the traces and profile.json.")]
Steps = Annotated[
    int,
    option(
        "--steps", text="Training steps before the profiler runs. The first two settle.", panel=Panel.MEASUREMENT, metavar="N",
        least=3,
    ),
]  # fmt: skip
EXAMPLE = "upshift profile -- train MODEL --data DATA"


def command(command: Command, output: Output = Path("upshift-profile"), steps: Steps = 6, as_json: Json = False) -> None:
    """Show where the time of training steps goes, and the three changes that would help most. Trains and saves nothing."""
    options = read_train_command(command)
    if options["backend"] != "torch":
        raise RequestError(f"--backend {options['backend']} is not profiled; leave it out")
    with importing_libraries():
        from upshift.training.profiling.run import profile

    with RunDisplay(quiet=as_json) as display:
        report = profile(train_command.request_of(options), output=output, steps=steps, watcher=display.watcher)
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        _print_report(report)


def read_train_command(words: list[str]) -> dict[str, Any]:
    """Parse the command by train's own parser, so that it takes the same options. Return them by name."""
    if not words or words[0] != "train":
        raise RequestError(f"profile takes the command of a training run, not {' '.join(words[:1]) or 'nothing'}: {EXAMPLE}")
    return move_flags_to_set(train_command.parse(words[1:]))


def _print_report(report: Any) -> None:
    tables.out.print(report.label, style="bold", highlight=False)
    against = f"{tables.number(report.roofline_ms, 1)} ms at this host's rates"
    predicted = "" if report.predicted_ms is None else f", {tables.number(report.predicted_ms, 1)} predicted"
    speed = f"{tables.number(report.tokens_per_second)} tokens/s"
    tables.out.print(f"{tables.number(report.step_ms, 1)} ms a step ({speed}); {against}{predicted}", highlight=False)
    tables.out.print(Text.assemble((f"Bound by {report.binding_term}", "bold"), f": {report.binding_words}"))
    table = tables.new_table("Where a step goes", "work", "", numbers=("ms", "share", "roofline ms", "times"))
    for kind in report.kinds:
        bar = "█" * round(20 * kind.share)
        times = tables.number(kind.times_roofline, 1) if kind.times_roofline is not None else "-"
        bound = tables.number(kind.roofline_ms, 1) if kind.roofline_ms is not None else "-"
        table.add_row(kind.kind, Text(bar, style="cyan"), tables.number(kind.ms, 1), f"{kind.share:.0%}", bound, times)
    tables.out.print(table)
    _print_memory(report)
    _print_changes(report)
    for finding in report.findings:
        doctor.show_finding(finding)
    traces = ", ".join(rank.trace for rank in report.ranks)
    tables.dim(f"For https://ui.perfetto.dev: {traces}; all numbers: profile.json; in {report.folder}")


def _print_changes(report: Any) -> None:
    """Print the changes of the plan that would help most, by the planner with the measured terms."""
    if not report.changes:
        rest = " would bring a percent, by the planner with these measured terms."
        tables.out.print(Text.assemble(("No single choice", "bold"), rest))
    for number, change in enumerate(report.changes, start=1):
        mathematics = ", changes the mathematics" if change.allow else ""
        memory = "" if change.more_gib is None else f", {change.more_gib:+.2f} GiB"
        gain = (f"{change.gain:+.0%}", "bold green")
        rest = f" tokens/s, {-change.saved_ms:+,.1f} ms a step{memory}{mathematics}"
        tables.out.print(Text.assemble((f"{number}. {change.choice}", "bold"), ": ", gain, rest))
        tables.print_detail("because", change.why)
        tables.print_detail("type", change.fix)


def _print_memory(report: Any) -> None:
    table = tables.new_table("Memory of a step, GiB allocated", "phase", numbers=("measured", "predicted"))
    for row in report.memory:
        table.add_row(row.phase, tables.number(row.measured_gib, 3), tables.number(row.predicted_gib, 3))
    table.add_row("the process holds", tables.number(report.resident_gib, 3), tables.number(report.predicted_resident_gib, 3))
    tables.out.print(table)
