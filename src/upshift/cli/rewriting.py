"""Share the options and lines of ``upshift shard``, ``merge`` and ``convert``: where to write, progress, and what was
written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from upshift.cli import show
from upshift.cli.progress import activity
from upshift.cli.race import dim
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
    with Progress(*columns, console=show.err, transient=True) as progress, activity("Writing") as current:
        task = progress.add_task("", total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            current.update(done, total, text=f"{format_bytes(done)} of {format_bytes(total)} written or read again")

        yield update


def _of_disk(model: str) -> str:
    """Return the rate of the disk in words; nothing where no terminal shows it (measuring takes a moment) or none is known."""
    if not show.err.is_terminal:
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
    show.out.print(f"{written.output}: {written.tensors:,} tensors, {format_bytes(written.bytes)} in {files}{kept}")
    dim(f"Written and read again in {format_seconds(written.seconds)}. SHA-256 of all tensors: {written.sha256}")
