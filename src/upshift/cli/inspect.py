"""Run ``upshift inspect``: show the parts of a model and their costs, without loading it.

With ``--placement``, show the device of each part and the reason, and the times of loading and of a token.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated

from rich.table import Table

from upshift.cli import tables
from upshift.cli.options import Json, MaxMemory, Model, SequenceLength, option
from upshift.cli.progress import importing_libraries
from upshift.cli.usage.help_page import Panel
from upshift.errors import RequestError
from upshift.loading.placement.memory_limits import read_max_memory
from upshift.loading.placement.place import CPU, DISK, ModulePlacement, Placement
from upshift.units import format_bytes, format_seconds

NUMBER = re.compile(r"\.(\d+)(?=\.|$)")  # a layer's index in a module's name


def show_placement(
    model: str, *, max_memory: list[str] | None, dtype: str | None, batch: int, sequence_length: int | None, as_json: bool
) -> None:
    limits = read_max_memory(max_memory)  # before torch is imported and a model is fetched
    from upshift.loading.load import build_empty_with_files, place_empty
    from upshift.loading.placement.apply import PlacementOptions
    from upshift.models.sequence_length import sequence_length_of
    from upshift.models.source import find_model

    source = find_model(model)
    sequence_length = sequence_length_of(source, sequence_length)
    empty, checkpoint = build_empty_with_files(source, dtype)
    request = PlacementOptions("auto", limits, batch=batch, sequence_length=sequence_length)
    with tables.step("Measuring this machine and its disk"):
        placement = place_empty(empty, checkpoint, request)
    if as_json:
        derived = {
            "device_map": placement.device_map, "totals": placement.totals, "peak_bytes": placement.peak_bytes,
            "disk_read": placement.disk_read,
        }  # fmt: skip
        sys.stdout.write(json.dumps(placement.model_dump() | derived) + "\n")
        return
    _print_placement(placement)


def _print_placement(placement: Placement) -> None:
    tables.out.print(_placement_table(_rows(placement)))
    tables.out.print(_memory_table(placement))
    for line in _cost_lines(placement):
        tables.out.print(line, highlight=False)


def _placement_table(rows: Iterable[tuple[str, str, int, str]]) -> Table:
    table = tables.new_table("Where it goes", "device", "part", "why", numbers=("size",))
    for device, names, size, reason in rows:
        table.add_row(device, names, reason, format_bytes(size))
    return table


def _rows(placement: Placement) -> Iterator[tuple[str, str, int, str]]:
    """Yield (device, names, bytes, reason). Neighboring parts whose names differ by a number only share a row."""
    group: list[ModulePlacement] = []
    for place in [*placement.modules, None]:
        if group and (place is None or _group_key(place) != _group_key(group[0])):
            first = group[0]
            last = group[-1]
            names = first.name or "the whole model"
            if len(group) > 1:
                names = f"{names} to {last.name.rpartition('.')[2]} ({len(group)})"
            yield first.device, names, sum(member.bytes for member in group), first.why
            group = []
        if place is not None:
            group.append(place)


def _group_key(place: ModulePlacement) -> tuple[str, str, str, int]:
    return NUMBER.sub(".#", place.name), place.device, place.why, place.bytes


def _memory_table(placement: Placement) -> object:
    table = tables.new_table("Memory", "device", numbers=("weights", "buffers on the way", "the work", "peak", "limit"))
    totals = placement.totals
    peaks = placement.peak_bytes
    for device, total in totals.items():
        if device == DISK:
            table.add_row(DISK, format_bytes(total), "", "", "", "")
            continue
        streamed = placement.stream_bytes.get(device, 0)
        work = peaks[device] - total - streamed
        sizes = (total, streamed, work, peaks[device], placement.limits.get(device, 0))
        table.add_row(device, *(format_bytes(size) if size else "" for size in sizes))
    return table


def _cost_lines(placement: Placement) -> Iterator[str]:
    """Yield lines about the memory of the work, and the times of loading and of a token."""
    sizes = {"activations": placement.activations, "keys and values": placement.cache, "the model's buffers": placement.buffers}
    texts = [f"{name} {'unknown' if size is None else format_bytes(size)}" for name, size in sizes.items()]
    yield f"The work: batch {placement.batch} x {placement.sequence} tokens, {', '.join(texts)}"
    rate = placement.disk_bytes_per_second
    if placement.load_bytes is None:
        yield "Loading: there are no files yet; the sizes are the model's own."
    else:
        seconds = "unknown" if placement.load_seconds is None else format_seconds(placement.load_seconds)
        measured = "too small a file to measure the disk" if rate is None else f"the disk gave {rate / 1e6:,.0f} MB/s just now"
        yield f"Loading: {format_bytes(placement.load_bytes)} to read, {seconds} ({measured})"
    tokens = placement.tokens_per_second
    if tokens is None:
        yield "A token: how long it takes is not known, for want of a measured rate."
    else:
        read = f", {format_bytes(placement.disk_read)} from the disk for each" if placement.disk_read else ""
        yield f"A token: {tokens:,.2f} tokens/s to expect, bound by {placement.bound}{read}"
    if placement.main != CPU:
        yield f"What is not on a GPU is computed on {placement.main}."


PlacementOption = Annotated[
    bool,
    option(
        "--placement", panel=Panel.TASK,
        text="Show which part of the model goes to GPUs, CPU and disk, and the time of loading and of a token.",
    ),
]  # fmt: skip
Dtype = Annotated[
    str | None,
    option(
        "--dtype", text="With --placement: the dtype of the loaded weights", panel=Panel.TASK, metavar="NAME",
        default="as stored", choices=("float32", "bfloat16", "float16"),
    ),
]  # fmt: skip
Batch = Annotated[int, option("--batch", text="With --placement: sequences at a time.", panel=Panel.TASK, metavar="N", least=1)]


def command(
    model: Model, sequence_length: SequenceLength = None, placement: PlacementOption = False, max_memory: MaxMemory = None,
    dtype: Dtype = None, batch: Batch = 1, as_json: Json = False,
) -> None:  # fmt: skip
    """Show the parts of a model with their parameters, FLOPs and memory, or where they would be placed. Loads no weights."""
    if placement:
        show_placement(model, max_memory=max_memory, dtype=dtype, batch=batch, sequence_length=sequence_length, as_json=as_json)
        return
    if max_memory or dtype is not None or batch != 1:
        raise RequestError("--max-memory, --dtype and --batch are for --placement; add it, or leave them out")
    with importing_libraries():
        from upshift.models.inspect import inspect

    with tables.step("Tracing the model on fake tensors"):
        inspection = inspect(model, sequence_length=sequence_length)
    if as_json:
        sys.stdout.write(inspection.to_json() + "\n")
        return
    for table in tables.inspection_tables(inspection):
        tables.out.print(table)
    tables.dim(f"FLOPs: {inspection.flop_convention}.")
