"""Run ``upshift compare-runs``: find where two runs that should agree part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from upshift.cli import doctor, show
from upshift.cli.plan import Json

One = Annotated[Path, typer.Argument(metavar="A", help="the output folder of a run")]
Other = Annotated[Path, typer.Argument(metavar="B", help="of the run that should agree with it")]
Tolerance = Annotated[
    float | None, typer.Option("--tolerance", min=0.0, help="relative; default: 1e-5 in fp32, 1e-3 in bf16 and fp16, 5e-3 else")
]


def command(one: One, other: Other, tolerance: Tolerance = None, as_json: Json = False) -> None:
    """The first step, checkpoint and tensors in which two runs differ, and by how much. Exit code 1: they differ."""
    from upshift.training.compare_runs import compare_runs

    with show.step("Comparing the runs"):
        comparison = compare_runs(one, other, tolerance=tolerance)
    doctor.tell(list(comparison.findings), document=comparison.to_json(), as_json=as_json)
