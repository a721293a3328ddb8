"""Run a model that has no room in transformers, as it is stored, with weights on the disk. Nothing is raced."""

from __future__ import annotations

from collections.abc import Mapping

from upshift.errors import NothingFits
from upshift.hardware.spec import Host
from upshift.inference.bounds import Quality
from upshift.inference.setup import EngineSetup, Precision
from upshift.inference.weights import free_memory, needed_memory, stored_for
from upshift.loading.checkpoint import find_checkpoint
from upshift.loading.load import place_source
from upshift.loading.memory_limits import USABLE_SHARE, read_device, read_size
from upshift.loading.placed import Where
from upshift.models.source import ModelSource
from upshift.units import format_bytes

UNMEASURED = 0.99  # the highest cosine that may be asked of 16 bits where there is no room for fp32 to compare them with
STORED: dict[str, Precision] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def room(host: Host, max_memory: Mapping[str | int, str | int] | None) -> int | None:
    """Return the bytes for the model and its work."""
    if max_memory is not None:
        said = {read_device(device, host): read_size(size) for device, size in max_memory.items()}
        if "cpu" in said:
            return said["cpu"]
    return free_memory(host)


def is_too_large(source: ModelSource, host: Host, max_memory: Mapping[str | int, str | int] | None) -> bool:
    """Return whether the CPU has no room for a race, which begins with transformers in fp32, although the model's
    parts have some."""
    free = room(host, max_memory)
    return host.gpu is None and stored_for(source) is None and free is not None and needed_memory(source, "fp32") > free


def divide(
    source: ModelSource, host: Host, quality: Quality, max_memory: Mapping[str | int, str | int] | None, *, rows: int, tokens: int
) -> tuple[EngineSetup, Where, str]:
    """Return the setup, where its weights go, and why. Raise NothingFits if not even one layer at a time fits, or if
    the requested quality is one that the files' dtype may not have."""
    assert source.directory is not None
    stored = {STORED.get(tensor.dtype) for tensor in find_checkpoint(source.directory).tensors.values()} - {None}
    precision = next((name for name in ("fp16", "bf16", "fp32") if name in stored), "fp32")
    free = room(host, max_memory)
    if precision != "fp32" and (quality == "exact" or quality > UNMEASURED):
        raise NothingFits(
            f"{source.reference!r} in fp32 does not fit into {format_bytes(free or 0)}; in {precision}, as it is stored, it runs "
            f"partly from the disk, and how near that is was not measured: allow it with --quality {UNMEASURED}, or free memory"
        )
    limits = max_memory or {"cpu": int(USABLE_SHARE * free) if free is not None else 0}
    where = Where("auto", limits, batch=rows, sequence_length=tokens)
    placement = place_source(source, where=where)
    speed = "unknown" if placement.tokens_per_second is None else f"{placement.tokens_per_second:,.2f}"
    reason = (
        f"no race: transformers in fp32 takes {format_bytes(needed_memory(source, 'fp32'))}, and {format_bytes(free or 0)} is "
        f"there for it. It runs in {precision}, as it is stored, {format_bytes(placement.disk_bytes)} of it on the disk: {speed} "
        f"tokens/s to expect, {rows} at once, bound by {placement.bound or 'what is not known'}"
    )
    threads = host.cpu.usable_cores if host.cpu is not None else 1
    return EngineSetup(engine="torch", precision=precision, threads=threads, batch=rows, hint="latency"), where, reason
