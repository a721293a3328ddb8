"""``upshift merge``: an adapter folded into the weights that it was made for."""

from __future__ import annotations

from typing import Annotated

import typer

from upshift.cli import show
from upshift.cli.plan import Json
from upshift.cli.rewriting import Output, byte_bar, tell


def command(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER_DIR", help="directory with an adapter_config.json, as peft saves it")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Write an adapter's base model with the adapter merged into its weights."""
    with show.step("Importing torch"):
        from upshift.loading.merge import merge

    with byte_bar("Writing, and reading again") as update:
        written = merge(adapter, output, progress=update)
    tell(written, as_json=as_json)
