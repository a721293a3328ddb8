"""Run ``upshift doctor``: report the problems of a machine, a network or a run, and the commands that mend them.

Run ``upshift compare-runs``: find the first difference between two runs that should agree.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from upshift.cli import tables
from upshift.cli.options import Json, argument, command_line_options, option
from upshift.cli.usage.help_page import Panel
from upshift.debugging.finding import Finding, worst_first
from upshift.errors import RequestError
from upshift.launching.request import RENDEZVOUS_PORT
from upshift.settings import read_ranks

MACHINE = "a look at this machine"
USED = {  # by the subject of the examination: the options that refine it
    "RUN_DIR": (), "--hosts": ("--network", "--port", "--wait"), "--network": (), "--tpu": ("--data",),
    MACHINE: ("--quick", "--psu", "--plan", "--output"),
}  # fmt: skip
USED_BY_ALL = ("--json",)
MARKS = {  # by severity: the mark before a finding, and its style
    "error": ("ERROR", "bold red"), "warning": ("WARN ", "yellow"), "hint": ("HINT ", "cyan"), "ok": ("ok   ", "green"),
    "unknown": ("?    ", "dim"),
}  # fmt: skip

RunDir = Annotated[
    Path | None,
    argument(
        "[RUN_DIR]", "The output folder of a run that hung, was slow or died. Without it: this machine.", panel=Panel.SUBJECT
    ),
]
Quick = Annotated[
    bool, option("--quick", text="Measure only the disks, with files of 16 MiB. Takes seconds.", panel=Panel.MEASUREMENT)
]
Psu = Annotated[
    float | None,
    option(
        "--psu",
        text="The rated power of the power supply, in watts.",
        panel=Panel.MEASUREMENT,
        metavar="WATTS",
        default="unknown",
        least=1,
    ),
]
PlanFile = Annotated[
    Path | None,
    option(
        "--plan", text="Check that the best plan of this file fits here. upshift plan --json wrote it.", panel=Panel.MEASUREMENT,
        metavar="PATH",
    ),
]  # fmt: skip
Network = Annotated[
    bool,
    option(
        "--network", text="Test the network between --hosts, or between the ranks of a launcher.", panel=Panel.SUBJECT
    ),
]  # fmt: skip
Hosts = Annotated[
    str | None,
    option(
        "--hosts", text="Test the network between these hosts. Start the same command on each at the same time.",
        panel=Panel.SUBJECT, metavar="HOST,HOST",
    ),
]  # fmt: skip
Port = Annotated[
    int,
    option(
        "--port", text="With --hosts: the port where the hosts meet.", panel=Panel.MEASUREMENT, metavar="N", least=1, most=65535
    ),
]  # fmt: skip
Wait = Annotated[
    float,
    option(
        "--wait", text="With --hosts: the time to wait for the other hosts, in seconds.", panel=Panel.MEASUREMENT,
        metavar="SECONDS", least=0.0,
    ),
]  # fmt: skip
Tpu = Annotated[bool, option("--tpu", text="Check the nine steps that training on a TPU needs, in order.", panel=Panel.SUBJECT)]
Data = Annotated[
    str | None,
    option(
        "--data", text="With --tpu: the path of the training data, or gs://bucket/folder.", panel=Panel.MEASUREMENT,
        metavar="PATH",
    ),
]  # fmt: skip
Output = Annotated[
    Path,
    option(
        "--output", "-o", text="Check the disk of this folder, into which your runs will write.", panel=Panel.MEASUREMENT,
        metavar="PATH",
    ),
]  # fmt: skip


def command(
    context: typer.Context, run_dir: RunDir = None, quick: Quick = False, psu: Psu = None, plan: PlanFile = None,
    tpu: Tpu = False, data: Data = None, output: Output = Path("upshift-output"), network: Network = False, hosts: Hosts = None,
    port: Port = RENDEZVOUS_PORT, wait: Wait = 30.0, as_json: Json = False,
) -> None:  # fmt: skip
    """Find what is wrong with this machine, its software, a network or a run. Each problem comes with the command that mends it.

    Exit code 1: it found an error.
    """
    _check_used([option for option in command_line_options(context).values() if option not in USED_BY_ALL])
    if run_dir is not None:
        _examine_run(run_dir, as_json=as_json)
        return
    if network or hosts is not None:
        _examine_network(hosts, port=port, wait=wait, as_json=as_json)
        return
    if tpu:
        _examine_tpu(data, as_json=as_json)
        return
    from upshift.debugging.doctor import examine
    from upshift.debugging.plan_needs import read_plan_needs
    from upshift.inference.engine_environment import examine_environment

    needs = None if plan is None else read_plan_needs(plan)
    with tables.step("Looking at this machine" + ("" if quick else " and measuring it")):
        diagnosis = examine(quick=quick, output=output, psu_watts=psu, needs=needs)
        diagnosis = diagnosis.changed(findings=(*diagnosis.findings, *examine_environment()))
    if not as_json:
        tables.out.print(verdict(diagnosis.findings), style="bold", highlight=False)
    report_findings(list(diagnosis.findings), document=diagnosis.to_json(), as_json=as_json)


def verdict(findings: Sequence[Finding]) -> str:
    """Return whether Upshift can run on this machine, and how many findings say what to type."""
    numbers = Counter(finding.severity for finding in findings)
    counted = ((numbers["error"], "error"), (numbers["warning"], "warning"), (numbers["hint"], "hint"))
    words = ", ".join(f"{number} {word}{'s' if number > 1 else ''}" for number, word in counted if number)
    if numbers["error"]:
        return f"Not ready: {words}. Mend the errors first."
    return f"Ready: no errors; {words or 'nothing to mend'}."


def _check_used(options: Sequence[str]) -> None:
    """Raise RequestError for an option that would be ignored."""
    subject = next((name for name in USED if name in options), MACHINE)
    unused = next((option for option in options if option not in (subject, *USED[subject])), None)
    if unused is not None:
        user = next((name for name, used in USED.items() if unused in used), "another look")
        raise RequestError(f"{subject} does not use {unused}, which is for {user}; leave one of them out")


def _examine_network(hosts: str | None, *, port: int, wait: float, as_json: bool) -> None:
    """Test the network: between hosts by sockets, or between a launcher's ranks by the backend that they train with."""
    ranks = read_ranks()
    if hosts is None and ranks is None:
        command = "torchrun --nproc-per-node 2 -m upshift.cli.main doctor --network"
        raise RequestError(f"--network needs --hosts A,B on each host, or a launcher: {command}")
    if hosts is not None:
        from upshift.debugging.network import examine_network

        findings = list(examine_network(hosts.split(","), port=port, wait_seconds=wait))
    else:
        from upshift.debugging.network_ranks import examine_ranks

        assert ranks is not None
        findings = examine_ranks(ranks)
        if not findings:
            return  # rank 0 prints the findings
    document = json.dumps({"findings": [finding.model_dump() for finding in findings]})
    report_findings(findings, document=document, as_json=as_json)


def _examine_tpu(data: str | None, *, as_json: bool) -> None:
    from upshift.debugging.tpu import read_tpu_facts, tpu_readiness

    facts = read_tpu_facts(data=data)
    findings = tpu_readiness(facts)
    document = json.dumps({"facts": facts.model_dump(), "findings": [finding.model_dump() for finding in findings]})
    report_findings(findings, document=document, as_json=as_json, in_order=True)


def _examine_run(run_dir: Path, *, as_json: bool) -> None:
    from upshift.debugging.run_report import examine_run

    findings = examine_run(run_dir)
    document = json.dumps({"run": str(run_dir), "findings": [finding.model_dump() for finding in findings]})
    report_findings(findings, document=document, as_json=as_json)


def report_findings(findings: list[Finding], *, document: str, as_json: bool, in_order: bool = False) -> None:
    """Print the findings, or ``document`` if as JSON. Raise typer.Exit(1) if one of them is an error.

    ``in_order``: as they are; else the worst first."""
    if as_json:
        sys.stdout.write(document + "\n")
    else:
        for finding in findings if in_order else worst_first(findings):
            show_finding(finding)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


def show_finding(finding: Finding) -> None:
    facts = f" | {finding.evidence}" if finding.evidence else ""
    line = Text.assemble(MARKS[finding.severity], " ", (finding.subject, "bold"), f": {finding.what}", (facts, "dim"))
    tables.out.print(line, soft_wrap=True)
    for name, text in (("because", finding.cause), ("fix", finding.fix)):
        if text is not None:
            tables.print_detail(name, text)


FirstRun = Annotated[Path, argument("A", "The output folder of a run.", panel=Panel.SUBJECT)]
SecondRun = Annotated[Path, argument("B", "The output folder of the run that should agree with A.", panel=Panel.SUBJECT)]
Tolerance = Annotated[
    float | None,
    option(
        "--tolerance", text="The largest relative difference that counts as equal.", panel=Panel.MEASUREMENT, metavar="X",
        default="1e-5 in fp32, 1e-3 in bf16 and fp16, 5e-3 else", least=0.0,
    ),
]  # fmt: skip


def compare_runs_command(first: FirstRun, second: SecondRun, tolerance: Tolerance = None, as_json: Json = False) -> None:
    """Find the first step, checkpoint and tensor in which two runs differ, and by how much.

    Exit code 1: they differ.
    """
    from upshift.training.compare_runs import compare_runs

    with tables.step("Comparing the runs"):
        comparison = compare_runs(first, second, tolerance=tolerance)
    report_findings(list(comparison.findings), document=comparison.to_json(), as_json=as_json)
