"""Run ``upshift inspect``: show what a model is made of, and with --placement which part goes where."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from upshift.cli import inspect_placement, show
from upshift.cli.plan import Json, Model, SequenceLength
from upshift.errors import RequestError
from upshift.importing import importing

Placement = Annotated[bool, typer.Option("--placement", help="what goes to GPUs, CPU and disk, what loading and a token cost")]
MaxMemory = Annotated[
    list[str] | None,
    typer.Option("--max-memory", help="with --placement: DEVICE=SIZE, as cpu=8GiB, 0=20GiB (repeatable); default: what is free"),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="with --placement: float32, bfloat16 or float16; default: as stored")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="with --placement: sequences at a time")]


def command(
    model: Model, sequence_length: SequenceLength = None, placement: Placement = False, max_memory: MaxMemory = None,
    dtype: Dtype = None, batch: Batch = 1, as_json: Json = False,
) -> None:  # fmt: skip
    """Parameters by part, FLOPs, activation and key-value bytes, and what the model declares; or where its parts are placed."""
    if placement:
        inspect_placement.run(
            model, max_memory=max_memory, dtype=dtype, batch=batch, sequence_length=sequence_length, as_json=as_json
        )
        return
    if max_memory or dtype is not None or batch != 1:
        raise RequestError("--max-memory, --dtype and --batch are for --placement; add it, or leave them out")
    with importing():
        from upshift.models.inspect import inspect

    with show.step("Tracing the model on fake tensors"):
        inspection = inspect(model, sequence_length=sequence_length)
    if as_json:
        sys.stdout.write(inspection.to_json() + "\n")
        return
    for table in show.inspection_tables(inspection):
        show.out.print(table)
    show.out.print(f"[dim]FLOPs: {inspection.flop_convention}.[/dim]")
