"""Store the memory that programs for TPUs take of a chip, by model, slice and shape, as Google's compiler reports it.

Programs are compiled with ``upshift xla compile``. Training plans are not made for TPUs. If a user asks for one, the message
contains the stored numbers, or the command that gets them.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from upshift.disk_full import write_cache_file
from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.source import ModelSource
from upshift.record import Record
from upshift.settings import read_settings

FILE_NAME = "tpu_programs.jsonl"
MAX_ROWS = 500  # the oldest rows beyond this number are dropped
MAX_SHOWN = 3


def store_program(record: Record) -> None:
    """Store a row, in place of an earlier one of the same model, slice, kind and shape."""
    path = _path()
    other_rows = [row for row in _read(path) if row.plan != record.plan]
    rows = [*other_rows, record][-MAX_ROWS:]
    write_cache_file("the compiled program's numbers are", path, "".join(row.to_json() + "\n" for row in rows))


def stored_programs(source: ModelSource, table_key: str) -> list[Record]:
    """Return the rows of this model on slices of this TPU, newest first."""
    rows = [row for row in _read(_path()) if (row.plan["model"], row.plan["device"]) == (source.model_hash, table_key)]
    return rows[::-1]


def describe_programs(source: ModelSource, host: Host) -> str:
    """Return the end of an error message: stored programs, or the command to compile one. Empty for a host without TPUs."""
    key = None if host.gpu is None else host.gpu.table_key
    if host.device != "xla" or key is None:
        return ""
    rows = stored_programs(source, key)[:MAX_SHOWN]
    if not rows:
        slice_ = key.removeprefix("tpu-") + "-4"
        return f"; what Google's compiler makes of it: upshift xla compile {source.reference} --topology {slice_}"
    return "; Google's compiler: " + "; ".join(_line(row) for row in rows)


def _line(row: Record) -> str:
    plan = row.plan
    measured = row.measured
    assert measured is not None and measured.peak_gib is not None
    shape = f"{plan['kind']} of {plan['rows']} x {plan['length']} tokens in {plan['dtype']} on {plan['topology']}"
    return f"{shape} takes {measured.peak_gib:.2f} of {row.details['memory_gib']:.2f} GiB a chip"


def _path() -> Path:
    return read_settings().cache_dir / FILE_NAME


def _read(path: Path) -> list[Record]:
    """Return the rows of the file. A row that another version wrote, or that was cut short, is skipped."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        with suppress(RequestError):
            rows.append(Record.from_json(line))
    return rows
