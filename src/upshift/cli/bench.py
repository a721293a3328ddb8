"""Run ``upshift bench``: list and measure the claims, compare two commands, and check the numbers in the documents."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from upshift.cli import tables
from upshift.cli.options import Json, argument, option
from upshift.cli.usage.commands import HelpCommand, HelpGroup
from upshift.cli.usage.help_page import Panel
from upshift.errors import JobFailed, RequestError

app = typer.Typer(
    cls=HelpGroup, no_args_is_help=True,
    help="Measure what Upshift claims, and compare two commands.",
    epilog="upshift bench list\nupshift bench compare 'sleep 0.1' 'sleep 0.2'",
)  # fmt: skip

Cases = Annotated[
    Path | None,
    option(
        "--cases", text="The folder with the cases.", panel=Panel.SPECIAL, metavar="PATH",
        default="benchmarks/cases of this clone",
    ),
]  # fmt: skip
Results = Annotated[
    Path | None,
    option("--results", text="Append the results to files in this folder.", panel=Panel.OUTPUT, metavar="PATH"),
]
Case = Annotated[str, argument("CASE", "The name of a case. upshift bench list shows them.", panel=Panel.SUBJECT)]
CaseOptions = Annotated[
    list[str] | None, argument("[-- OPTIONS]", "Options that the case itself takes, after --.", panel=Panel.SUBJECT)
]
Quick = Annotated[
    bool,
    option("--quick", text="Use tiny settings. This shows that the case runs, and measures nothing.", panel=Panel.MEASUREMENT),
]
Against = Annotated[
    str | None,
    option(
        "--against", text="Compare Upshift with this library alone.", panel=Panel.MEASUREMENT, metavar="PEER",
        default="all that the case has",
    ),
]  # fmt: skip
A = Annotated[str, argument("A", "A command in quotes, or a Python function as module:function.", panel=Panel.SUBJECT)]
B = Annotated[str, argument("B", "The command or function to compare with A.", panel=Panel.SUBJECT)]
Rounds = Annotated[
    int,
    option(
        "--rounds", panel=Panel.MEASUREMENT, metavar="N", least=1,
        text="Runs of each, in turn. If 11 of them agree, the result is certain to 99.9 %.",
    ),
]  # fmt: skip
MaxRounds = Annotated[
    int | None,
    option(
        "--max-rounds", text="The most rounds, if --rounds do not decide.", panel=Panel.MEASUREMENT, metavar="N",
        default="as --rounds", least=1,
    ),
]  # fmt: skip
Confidence = Annotated[
    float,
    option(
        "--confidence",
        text="The certainty of the result, between 0.5 and 1.",
        panel=Panel.MEASUREMENT,
        metavar="X",
        least=0.5,
        most=0.999999,
    ),
]
MeasureOption = Annotated[
    str,
    option(
        "--measure", text="What to compare; result is the number that a command prints last", panel=Panel.MEASUREMENT,
        metavar="NAME", choices=("seconds", "cpu_seconds", "result"),
    ),
]  # fmt: skip
Timeout = Annotated[
    float, option("--timeout", text="The longest time of one run, in seconds.", panel=Panel.LIMITS, metavar="SECONDS", least=0.1)
]
Html = Annotated[
    Path | None,
    option("--html", text="Also draw every claim on an HTML page. It works offline.", panel=Panel.OUTPUT, metavar="PATH"),
]
Write = Annotated[bool, option("--write", text="Update the numbers and tables in README and docs.", panel=Panel.OUTPUT)]


@app.command("list", cls=HelpCommand, epilog="upshift bench list --json")
def list_(cases: Cases = None, as_json: Json = False) -> None:
    """List every claim with its newest number, its goal, and the command that measures it."""
    from upshift.benchmarking.claims import claim_statuses, find_cases

    cases_by_name = find_cases(cases)
    rows = claim_statuses(cases_by_name)
    if as_json:
        print(json.dumps([json.loads(row.to_json()) for row in rows]))
        return
    table = tables.new_table(f"{len(rows)} claims of {len(cases_by_name)} cases", "claim", numbers=("number", "goal", "rows"))
    for column in table.columns[1:]:
        column.no_wrap = True
    for row in rows:
        style = {True: "green", False: "red", None: ""}[row.is_reached]
        # Two lines: names are long, and a user types them.
        name_and_text = Text.assemble((row.name, f"bold {style}".strip()), "\n", row.claim.text)
        goal = "" if row.claim.goal is None else f"{row.claim.goal:g}"
        table.add_row(name_and_text, row.written(row.value), goal, str(len(row.readings)), style=style)
    tables.out.print(table)
    tables.out.print(
        "upshift bench run CASE measures one anew; upshift bench report --html FILE draws them", style="dim", highlight=False
    )


@app.command(
    "run", cls=HelpCommand, context_settings={"ignore_unknown_options": True},
    epilog="upshift bench run trainer --quick\nupshift bench run trainer -- --steps 10 --rounds 2",
)  # fmt: skip
def run(
    name: Case, options: CaseOptions = None, quick: Quick = False, against: Against = None,
    results: Results = None, cases: Cases = None,
) -> None:  # fmt: skip
    """Measure the claims of one case again."""
    from upshift.benchmarking.claims import ClaimStatus, find_case

    case = find_case(name, cases)
    peer_options: list[str] = []
    if against is not None:
        if against not in case.peers:
            valid = f"use one of {', '.join(case.peers)}" if case.peers else "it always runs all its peers"
            raise RequestError(f"case {name} has no peer {against!r}; {valid}")
        peer_options = case.peers[against].split()
    command = [sys.executable, str(case.path), *(["--quick"] if quick else []), *peer_options, *(options or [])]
    if results is not None:
        command += ["--results", str(results)]
    for claim in case.claims:
        goal = "" if claim.goal is None else f"; goal: {claim.goal:g} {claim.unit}"
        tables.err.print(f"{name}/{claim.name}: {claim.text}. {claim.ours} against {claim.baseline}{goal}", highlight=False)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise JobFailed(f"case {name} ended with exit code {code}")
    if quick or results is not None:
        return
    for claim in case.claims:
        status = ClaimStatus.of(case, claim)
        tables.err.print(f"{status.name}: {status.written(status.value)}", highlight=False)


@app.command("compare", cls=HelpCommand, epilog="upshift bench compare 'sleep 0.1' 'sleep 0.2' --rounds 12")
def compare(
    a: A, b: B, rounds: Rounds = 12, max_rounds: MaxRounds = None, confidence: Confidence = 0.999,
    measure: MeasureOption = "seconds", timeout: Timeout = 3600.0,
    results: Results = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Tell which of two commands or functions is faster, or how many more rounds would tell."""
    from upshift.benchmarking import ab_test
    from upshift.benchmarking.harness import append_rows, check_results

    if results is not None:
        check_results(results)
    with tables.bar("Rounds") as update:
        comparison = ab_test.compare(
            a, b, rounds=rounds, max_rounds=max_rounds, confidence=confidence, measure=measure,  # type: ignore[arg-type]
            timeout_seconds=timeout, on_sample=lambda number, *_: update(number + 1, max(rounds, number + 1)),
        )  # fmt: skip
    if as_json:
        print(comparison.to_json())
    else:
        _print_comparison(comparison)
    if results is not None:
        from upshift.hardware import detect

        append_rows(results / "compare.jsonl", comparison.records(detect()))


def _print_comparison(comparison: Any) -> None:
    for letter, contender in (("A", comparison.a), ("B", comparison.b)):  # no cell: a command is long, and a person copies it
        tables.out.print(f"{letter}: {contender.label}", highlight=False, soft_wrap=True)
    tables.out.print(_comparison_table(comparison))
    tables.out.print(str(comparison), highlight=False, soft_wrap=True)


def _comparison_table(comparison: Any) -> Table:
    has_results = comparison.a.result and comparison.b.result
    columns = ("p20 s", "p50 s", "p80 s", "cpu s", "GiB", *(["result"] if has_results else []))
    table = tables.new_table("", "", numbers=columns)
    for letter, contender in (("A", comparison.a), ("B", comparison.b)):
        times = (contender.seconds.p20, contender.seconds.p50, contender.seconds.p80, contender.cpu_seconds.p50)
        result = [f"{contender.result.p50:g}"] if "result" in columns and contender.result else []
        table.add_row(letter, *(f"{value:.3f}" for value in times), tables.gib(contender.resident_gib), *result)
    return table


@app.command("report", cls=HelpCommand, epilog="upshift bench report --html claims.html")
def report(
    html: Html = None,
    write: Write = False,
    cases: Cases = None,
) -> None:
    """Check that the numbers in README and docs are those of the results.

    Exit code 1: they are not.
    """
    from upshift.benchmarking import documents
    from upshift.benchmarking.claims import find_cases

    cases_by_name = find_cases(cases)
    root = next(iter(cases_by_name.values())).path.parents[2] if cases_by_name else Path.cwd()
    if write:
        for path in documents.renew_documents(root, cases_by_name):
            tables.out.print(f"{path.relative_to(root)} renewed", highlight=False)
    if html is not None:
        from upshift.benchmarking.claims import claim_statuses
        from upshift.reports.claims import claims_page
        from upshift.reports.document import write_page

        write_page(html, claims_page(claim_statuses(cases_by_name)))
    problems = [str(problem) for problem in documents.find_stale(root, cases_by_name)]
    for problem in problems:
        tables.out.print(problem, highlight=False, soft_wrap=True)
    if problems:
        raise JobFailed(f"{len(problems)} of README and docs are not what the rows say; upshift bench report --write renews them")
    tables.out.print("README and docs say what the rows do", highlight=False)
