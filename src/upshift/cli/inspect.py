"""``upshift inspect``: what a model is made of."""

from __future__ import annotations

import sys

from upshift.cli import show
from upshift.cli.plan import Json, Model, SequenceLength


def command(model: Model, sequence_length: SequenceLength = 512, as_json: Json = False) -> None:
    """Parameters by part, FLOPs, activation and key-value bytes, and what the model declares."""
    from upshift.models.inspect import inspect

    with show.step("Tracing the model on fake tensors"):
        inspection = inspect(model, sequence_length=sequence_length)
    if as_json:
        sys.stdout.write(inspection.to_json() + "\n")
        return
    for table in show.inspection_tables(inspection):
        show.out.print(table)
    show.out.print(f"[dim]FLOPs: {inspection.flop_convention}.[/dim]")
