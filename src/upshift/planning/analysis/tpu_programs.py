"""Keep what Google's compiler says of programs for TPUs (``upshift xla compile``): memory of a chip, by model, slice and shape.

Training plans are not made for TPUs. A user who asks for one is told what is known, or what to type to know it.
"""

from __future__ import annotations

from pathlib import Path

from upshift.disk_full import write_cache_file
from upshift.hardware.spec import Host
from upshift.models.source import ModelSource
from upshift.record import Record
from upshift.settings import read_settings

FILE_NAME = "tpu_programs.jsonl"
MAX_ROWS = 500  # the oldest rows beyond this number are dropped
SHOWN = 3


def keep_program(record: Record) -> None:
    """Keep the newest row for each model, slice, kind and shape."""
    path = _path()
    others = [row for row in _read(path) if row.plan != record.plan]
    rows = "".join(row.to_json() + "\n" for row in [*others, record][-MAX_ROWS:])
    write_cache_file("the compiled program's numbers are", path, rows)


def known_programs(source: ModelSource, table_key: str) -> list[Record]:
    """Return the rows of this model on slices of this TPU, newest first."""
    rows = [row for row in _read(_path()) if (row.plan["model"], row.plan["device"]) == (source.model_hash, table_key)]
    return rows[::-1]


def compiled_so_far(source: ModelSource, host: Host) -> str:
    """Return the end of a refusal's message; empty for a host without TPUs."""
    key = None if host.gpu is None else host.gpu.table_key
    if host.device != "xla" or key is None:
        return ""
    rows = known_programs(source, key)[:SHOWN]
    if not rows:
        slice_ = key.removeprefix("tpu-") + "-4"
        return f"; what Google's compiler makes of it: upshift xla compile {source.reference} --topology {slice_}"
    return "; Google's compiler: " + "; ".join(_line(row) for row in rows)


def _line(row: Record) -> str:
    plan, measured = row.plan, row.measured
    assert measured is not None and measured.peak_gib is not None
    shape = f"{plan['kind']} of {plan['rows']} x {plan['length']} tokens in {plan['dtype']} on {plan['topology']}"
    return f"{shape} takes {measured.peak_gib:.2f} of {row.details['memory_gib']:.2f} GiB a chip"


def _path() -> Path:
    return read_settings().cache_dir / FILE_NAME


def _read(path: Path) -> list[Record]:
    if not path.is_file():
        return []
    return [Record.from_json(line, origin=str(path)) for line in path.read_text(encoding="utf-8").splitlines()]
