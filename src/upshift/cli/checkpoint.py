"""Run ``upshift shard``, ``convert`` and ``merge``, which write a checkpoint anew: in files of another size, in another dtype, or
with an adapter folded into the weights that it was made for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TimeRemainingColumn, TransferSpeedColumn

from upshift.cli import tables
from upshift.cli.options import Json, Model, argument, option, output_folder
from upshift.cli.progress import activity
from upshift.cli.tables import dim
from upshift.cli.usage.help_page import Panel
from upshift.hardware.disk import disk_rate
from upshift.models.source import find_model
from upshift.units import format_bytes, format_seconds

MEGA = 10**6
BAR_WIDTH = 12  # so that the whole line fits 80 columns
Output = Annotated[Path, output_folder("The folder to write. The same command continues an interrupted one.")]
MaxShardSize = Annotated[
    str, option("--max-shard-size", text="The largest file, such as 5GB, 500MB or 2GiB.", panel=Panel.OUTPUT, metavar="SIZE")
]
Dtype = Annotated[
    str,
    option(
        "--dtype", text="The dtype of the written weights", panel=Panel.OUTPUT, metavar="NAME",
        choices=("bfloat16", "float16", "float32"),
    ),
]  # fmt: skip
Adapter = Annotated[str, argument("ADAPTER", "The folder of an adapter that peft saved. It has an adapter_config.json.")]
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@contextmanager
def byte_bar(model: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar in bytes, with their rate beside the disk's, until the block ends. Yield ``update(done, total)``.

    Every byte counts twice, because it is written and read again."""
    columns = (
        SpinnerColumn(), tables.text_column("Writing"), BarColumn(bar_width=BAR_WIDTH), DownloadColumn(binary_units=True),
        TransferSpeedColumn(), tables.text_column(_disk_rate_text(model)), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=tables.err, transient=True) as progress, activity("Writing") as current:
        task = progress.add_task("", total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            current.update(done, total, text=f"{format_bytes(done)} of {format_bytes(total)} written or read again")

        yield update


def _disk_rate_text(model: str) -> str:
    """Return the disk's rate as text; blank if it is unknown, or no terminal shows it, because measuring takes a moment."""
    if not tables.err.is_terminal:
        return ""
    path = Path(model)
    folder = path.parent if path.is_file() else find_model(model).directory
    if folder is None:
        return ""
    rate = disk_rate([file for pattern in WEIGHTS for file in folder.glob(pattern)])
    return f"(disk: {rate / MEGA:,.0f} MB/s)" if rate else ""


def print_summary(written: Any, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(written.to_json() + "\n")
        return
    files = f"{written.shards} {'file' if written.shards == 1 else 'files'}"
    earlier = f", {written.kept_shards} of them by an earlier run" if written.kept_shards else ""
    tables.out.print(f"{written.output}: {written.tensors:,} tensors, {format_bytes(written.bytes)} in {files}{earlier}")
    dim(f"Written and read again in {format_seconds(written.seconds)}. SHA-256 of all tensors: {written.sha256}")


def shard_command(
    model: Model,
    output: Output,
    max_shard_size: MaxShardSize = "5GB",
    as_json: Json = False,
) -> None:
    """Write the weights of a model again, in files of at most a given size. The weights stay the same to the bit."""
    from upshift.loading.placement.memory_limits import read_size
    from upshift.loading.rewrite.rewrite import shard

    max_shard_bytes = read_size(max_shard_size, option="--max-shard-size")
    with byte_bar(model) as update:
        written = shard(model, output, max_shard_bytes=max_shard_bytes, progress=update)
    print_summary(written, as_json=as_json)


def convert_command(
    model: Model,
    dtype: Dtype,
    output: Output,
    as_json: Json = False,
) -> None:
    """Write the weights of a model again, in another dtype, as safetensors files."""
    with tables.step("Importing torch"):
        from upshift.loading.rewrite.convert import convert

    with byte_bar(model) as update:
        written = convert(model, output, dtype=dtype, progress=update)
    for name, count in written.noted.items():
        dim(f"{name}: {count:,} numbers are beyond what {dtype} holds, and became infinite; bfloat16 would keep them", tables.err)
    print_summary(written, as_json=as_json)


def merge_command(
    adapter: Adapter,
    output: Output,
    as_json: Json = False,
) -> None:
    """Merge an adapter into the weights of its base model, and write the result."""
    with tables.step("Importing torch"):
        from upshift.loading.rewrite.merge import merge

    with byte_bar(adapter) as update:
        written = merge(adapter, output, progress=update)
    for name in written.noted:
        dim(f"{name} is in neither the base model nor the adapter; transformers draws it at random", tables.err)
    print_summary(written, as_json=as_json)
