"""Run ``upshift merge``: fold an adapter into the weights that it was made for."""

from __future__ import annotations

from typing import Annotated

import typer

from upshift.cli import show
from upshift.cli.plan import Json
from upshift.cli.race import dim
from upshift.cli.rewriting import Output, byte_bar, tell


def command(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER_DIR", help="directory with adapter_config.json, as peft saves it")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Write an adapter's base model with the adapter merged into its weights."""
    with show.step("Importing torch"):
        from upshift.loading.merge import merge

    with byte_bar(adapter) as update:
        written = merge(adapter, output, progress=update)
    for name in written.noted:
        dim(f"{name} is in neither the base model nor the adapter; transformers draws it at random", show.err)
    tell(written, as_json=as_json)
