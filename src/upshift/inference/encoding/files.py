"""Read texts from a file that may be larger than memory, and write rows to one, block by block, so that a stopped run
can continue."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from upshift.errors import MissingExtra, RequestError
from upshift.inference.encoding.recipe import Output
from upshift.inference.lines import is_empty, is_text, read_lines
from upshift.inference.unfinished import Unfinished, check_output

INPUTS = (".txt", ".jsonl")
VECTORS, LISTS = (".npy", ".parquet"), (".parquet", ".jsonl")  # what rows of one length are written as, and rows of several
PARQUET_ROWS = 65_536  # of a row group
NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system that cannot reserve room
ZEROS = bytes(2**20)


def check_files(texts: Path, output: Path, *, overwrite: bool = False) -> None:
    if not texts.is_file():
        raise RequestError(f'--input {texts} does not exist; give a file with a text a line, or JSON lines with a "text"')
    if texts.suffix not in INPUTS:
        raise RequestError(f'--input {texts} must end with {" or ".join(INPUTS)}: a text a line, or JSON lines with a "text"')
    if is_empty(texts):
        raise RequestError(f"--input {texts} is empty; write a text a line")
    check_output(output, tuple(dict.fromkeys(VECTORS + LISTS)), texts, overwrite=overwrite)
    if output.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise MissingExtra(library="pyarrow", extra="data", purpose="writing parquet")


def check_form(output: Path, of: Output) -> None:
    able, why = (LISTS, "rows that differ in length") if of == "token scores" else (VECTORS, "rows of one length")
    if output.suffix not in able:
        raise RequestError(f"--output {output} is no file for {of}, which are {why}; give one that ends with {' or '.join(able)}")


def read_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file. Raise RequestError with the number of a line that holds no text."""
    return read_lines(path, _text)


def _text(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not is_text(record.get("text")):
        raise RequestError(f'{where} is no JSON object with a "text" of Unicode characters; write {{"text": "..."}} on each line')
    unknown = next((key for key in record if key != "text"), None)
    if unknown is not None:
        raise RequestError(f'{where} has a key {unknown!r}, which is not used; leave it out, and write {{"text": "..."}}')
    return str(record["text"])


class Rows:
    """The rows of an output, on disk block by block. ``made_of`` says which input and setup they belong to."""

    block = 16_384  # texts at once in memory

    def __init__(self, output: Path, total: int, made_of: str) -> None:
        self._file = Unfinished(output, total, made_of)
        self.done = self._file.noted()
        self._rows: Any = np.lib.format.open_memmap(self._file.partial, mode="r+") if self.done else None

    def add(self, rows: np.ndarray) -> None:
        with self._file.writing():
            if self._rows is None:
                shape = (self._file.total, rows.shape[1])
                self._rows = np.lib.format.open_memmap(self._file.partial, mode="w+", dtype=np.float32, shape=shape)
                _reserve(self._file.partial, self._rows.offset)
            self._rows[self.done : self.done + len(rows)] = rows
            self._rows.flush()
            self._file.note(self.done + len(rows))
        self.done += len(rows)

    def close(self) -> None:
        self._file.close()

    def finish(self) -> None:
        """Put the whole output in place."""
        whole = self._file.partial
        if self._file.output.suffix == ".parquet":
            whole = whole.with_name(f"{self._file.output.name}.writing")
            with self._file.writing():
                _write_parquet(self._rows, whole)
        self._file.finish(whole)


def _reserve(path: Path, start: int) -> None:
    """Reserve disk space for a file that is empty from ``start`` on. Raise OSError. Otherwise a disk that is full
    under a mapped file ends the process with SIGBUS."""
    size = path.stat().st_size
    with path.open("rb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", errno.ENOSYS) not in NO_SUCH_CALL:
                raise
            file.seek(start)
            for place in range(start, size, len(ZEROS)):
                file.write(ZEROS[: size - place])


def _write_parquet(rows: np.ndarray, path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    width = rows.shape[1]
    schema = pyarrow.schema([("vector", pyarrow.list_(pyarrow.float32(), width))])
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, len(rows), PARQUET_ROWS):
            values = pyarrow.array(np.ascontiguousarray(rows[start : start + PARQUET_ROWS]).reshape(-1))
            writer.write_table(pyarrow.table([pyarrow.FixedSizeListArray.from_arrays(values, width)], schema=schema))
