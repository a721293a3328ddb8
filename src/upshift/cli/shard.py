"""Run ``upshift shard``: write a checkpoint in files of another size."""

from __future__ import annotations

from typing import Annotated

import typer

from upshift.cli.plan import Json, Model
from upshift.cli.rewriting import Output, byte_bar, tell


def command(
    model: Model,
    output: Output,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="of a file: 5GB, 500MB, 2GiB")] = "5GB",
    as_json: Json = False,
) -> None:
    """Write a model's weights, the same to the bit, in files of at most this size."""
    from upshift.loading.memory_limits import read_size
    from upshift.loading.shard import shard

    with byte_bar(model) as update:
        written = shard(model, output, max_shard_bytes=read_size(max_shard_size), progress=update)
    tell(written, as_json=as_json)
