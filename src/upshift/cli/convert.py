"""Run ``upshift convert``: write a checkpoint in another dtype."""

from __future__ import annotations

from typing import Annotated

import typer

from upshift.cli import show
from upshift.cli.plan import Json, Model
from upshift.cli.race import dim
from upshift.cli.rewriting import Output, byte_bar, tell


def command(
    model: Model,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Write a model's weights in another dtype, as safetensors."""
    with show.step("Importing torch"):
        from upshift.loading.convert import convert

    with byte_bar(model) as update:
        written = convert(model, output, dtype=dtype, progress=update)
    for name, count in written.noted.items():
        dim(f"{name}: {count:,} numbers are beyond what {dtype} holds, and became infinite; bfloat16 would keep them", show.err)
    tell(written, as_json=as_json)
