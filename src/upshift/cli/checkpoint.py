"""Share the options and lines of ``upshift shard``, ``merge`` and ``convert``: where to write, progress, and what was
written.

Run ``upshift shard``: write a checkpoint in files of another size.

Run ``upshift convert``: write a checkpoint in another dtype.

Run ``upshift merge``: fold an adapter into the weights that it was made for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from upshift.cli import tables
from upshift.cli.plan.command import Json, Model
from upshift.cli.progress import activity
from upshift.cli.tables import dim
from upshift.hardware.disk import disk_rate
from upshift.models.source import find_model
from upshift.units import format_bytes, format_seconds

MEGA = 10**6
BAR_WIDTH = 12  # 80 columns hold all
Output = Annotated[Path, typer.Option("--output", "-o", help="the directory to write; the same command again goes on in it")]
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@contextmanager
def byte_bar(model: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in bytes with their rate beside that of the disk, on standard error, gone when done; yields
    ``update(done, total)``. Every byte counts twice: it is written, and read again."""
    columns = (
        SpinnerColumn(), TextColumn("Writing"), BarColumn(bar_width=BAR_WIDTH), DownloadColumn(binary_units=True),
        TransferSpeedColumn(), TextColumn(_of_disk(model)), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=tables.err, transient=True) as progress, activity("Writing") as current:
        task = progress.add_task("", total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            current.update(done, total, text=f"{format_bytes(done)} of {format_bytes(total)} written or read again")

        yield update


def _of_disk(model: str) -> str:
    """Return the rate of the disk in words; nothing where no terminal shows it (measuring takes a moment) or none is known."""
    if not tables.err.is_terminal:
        return ""
    path = Path(model)
    folder = path.parent if path.is_file() else find_model(model).directory
    rate = disk_rate([file for pattern in WEIGHTS for file in folder.glob(pattern)]) if folder else None
    return f"(disk: {rate / MEGA:,.0f} MB/s)" if rate else ""


def tell(written: Any, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(written.to_json() + "\n")
        return
    files = f"{written.shards} {'file' if written.shards == 1 else 'files'}"
    kept = f", {written.kept_shards} of them by an earlier run" if written.kept_shards else ""
    tables.out.print(f"{written.output}: {written.tensors:,} tensors, {format_bytes(written.bytes)} in {files}{kept}")
    dim(f"Written and read again in {format_seconds(written.seconds)}. SHA-256 of all tensors: {written.sha256}")


def shard_command(
    model: Model,
    output: Output,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="of a file: 5GB, 500MB, 2GiB")] = "5GB",
    as_json: Json = False,
) -> None:
    """Write a model's weights, the same to the bit, in files of at most this size."""
    from upshift.loading.placement.memory_limits import read_size
    from upshift.loading.rewrite.rewrite import shard

    with byte_bar(model) as update:
        written = shard(model, output, max_shard_bytes=read_size(max_shard_size), progress=update)
    tell(written, as_json=as_json)


def convert_command(
    model: Model,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Write a model's weights in another dtype, as safetensors."""
    with tables.step("Importing torch"):
        from upshift.loading.rewrite.convert import convert

    with byte_bar(model) as update:
        written = convert(model, output, dtype=dtype, progress=update)
    for name, count in written.noted.items():
        dim(f"{name}: {count:,} numbers are beyond what {dtype} holds, and became infinite; bfloat16 would keep them", tables.err)
    tell(written, as_json=as_json)


def merge_command(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER_DIR", help="directory with adapter_config.json, as peft saves it")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Write an adapter's base model with the adapter merged into its weights."""
    with tables.step("Importing torch"):
        from upshift.loading.rewrite.merge import merge

    with byte_bar(adapter) as update:
        written = merge(adapter, output, progress=update)
    for name in written.noted:
        dim(f"{name} is in neither the base model nor the adapter; transformers draws it at random", tables.err)
    tell(written, as_json=as_json)
