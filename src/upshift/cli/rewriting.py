"""What ``upshift shard``, ``merge`` and ``convert`` share: where to write, how far it is, and what was written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from upshift.cli import show
from upshift.units import format_bytes, format_seconds

Output = Annotated[Path, typer.Option("--output", "-o", help="the directory to write; the same command again goes on in it")]


@contextmanager
def byte_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in bytes with their rate, on standard error, gone when done; yields ``update(done, total)``."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=show.err, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def tell(written: Any, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(written.to_json() + "\n")
        return
    files = f"{written.shards} {'file' if written.shards == 1 else 'files'}"
    kept = f", {written.kept_shards} of them by an earlier run" if written.kept_shards else ""
    show.out.print(f"{written.output}: {written.tensors:,} tensors, {format_bytes(written.bytes)} in {files}{kept}")
    show.out.print(
        f"[dim]Written and read again in {format_seconds(written.seconds)}; every tensor is what it should be. "
        f"SHA-256 of all of them: {written.sha256}[/dim]"
    )
