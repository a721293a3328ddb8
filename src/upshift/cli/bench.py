"""Run ``upshift bench``: list and measure the claims, compare two commands, and check the numbers in the documents."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from upshift.cli import tables
from upshift.cli.options import Json
from upshift.errors import JobFailed, RequestError

app = typer.Typer(
    no_args_is_help=True, help="What is claimed, the command that measures it, and which of two commands is faster."
)

Cases = Annotated[Path | None, typer.Option("--cases", help="folder of the cases; default: benchmarks/cases of this clone")]
Results = Annotated[Path | None, typer.Option("--results", help="append rows to this folder")]


@app.command("list")
def list_(cases: Cases = None, as_json: Json = False) -> None:
    """Every claim: its newest number, its goal, and the command that measures it."""
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


@app.command("run", context_settings={"ignore_unknown_options": True})
def run(
    name: Annotated[str, typer.Argument(metavar="CASE", help="as in upshift bench list")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="of the case")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="tiny settings: shows that the case runs, proves nothing")] = False,
    against: Annotated[str | None, typer.Option("--against", metavar="PEER", help="beside Upshift run only this one")] = None,
    results: Results = None, cases: Cases = None,
) -> None:  # fmt: skip
    """Run a case: what it claims, then its own output, then what the claims stand at. Rows are appended."""
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
        tables.err.print(
            f"{name}/{claim.name}: {claim.text}. {claim.ours} against {claim.baseline}{goal}", markup=False, highlight=False
        )
    code = subprocess.run(command, check=False).returncode
    if code:
        raise JobFailed(f"case {name} ended with exit code {code}")
    if quick or results is not None:
        return
    for claim in case.claims:
        status = ClaimStatus.of(case, claim)
        tables.err.print(f"{status.name}: {status.written(status.value)}", markup=False, highlight=False)


@app.command("compare")
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="a command in quotes, or module:function")],
    b: Annotated[str, typer.Argument(metavar="B")],
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="of both, in turn; 11 that agree decide at 99.9 %")] = 12,
    max_rounds: Annotated[int | None, typer.Option("--max-rounds", help="go on up to these where it is not decided")] = None,
    confidence: Annotated[float, typer.Option("--confidence", help="of a claim")] = 0.999,
    measure: Annotated[str, typer.Option("--measure", help="seconds, cpu_seconds, or result: a number printed last")] = "seconds",
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="seconds of one run")] = 3600.0,
    results: Results = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Tell which of two commands or functions is faster, or how many more rounds would tell. Exit code 0 either way."""
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
    has_results = comparison.a.result and comparison.b.result
    columns = ("p20 s", "p50 s", "p80 s", "cpu s", "GiB", *(["result"] if has_results else []))
    table = tables.new_table("", "", "command", numbers=columns)
    for letter, contender in (("A", comparison.a), ("B", comparison.b)):
        times = (contender.seconds.p20, contender.seconds.p50, contender.seconds.p80, contender.cpu_seconds.p50)
        result = [f"{contender.result.p50:g}"] if "result" in columns and contender.result else []
        table.add_row(letter, contender.label, *(f"{value:.3f}" for value in times), tables.gib(contender.resident_gib), *result)
    tables.out.print(table)
    tables.out.print(str(comparison), markup=False, highlight=False, soft_wrap=True)


@app.command("report")
def report(
    html: Annotated[Path | None, typer.Option("--html", help="draw every claim on one page that works offline")] = None,
    write: Annotated[bool, typer.Option("--write", help="renew the numbers and tables in README and docs")] = False,
    cases: Cases = None,
) -> None:
    """Check that README and docs say what the rows say. Exit code 1: they do not."""
    from upshift.benchmarking import documents
    from upshift.benchmarking.claims import find_cases

    cases_by_name = find_cases(cases)
    root = next(iter(cases_by_name.values())).path.parents[2] if cases_by_name else Path.cwd()
    if write:
        for path in documents.renew_documents(root, cases_by_name):
            tables.out.print(f"{path.relative_to(root)} renewed", markup=False, highlight=False)
    if html is not None:
        from upshift.benchmarking.claims import claim_statuses
        from upshift.reports.claims import claims_page
        from upshift.reports.document import write_page

        write_page(html, claims_page(claim_statuses(cases_by_name)))
    problems = [str(problem) for problem in documents.find_stale(root, cases_by_name)]
    for problem in problems:
        tables.out.print(problem, markup=False, highlight=False, soft_wrap=True)
    if problems:
        raise JobFailed(f"{len(problems)} of README and docs are not what the rows say; upshift bench report --write renews them")
    tables.out.print("README and docs say what the rows do", markup=False, highlight=False)
