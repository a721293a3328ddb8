"""Read texts from a file that may be larger than memory, and write rows to one, block by block, so that a stopped run
can continue.

Write scores of tokens to a file, a row a text, block by block, so that a stopped run can continue.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from upshift.errors import MissingExtra, RequestError
from upshift.inference.encoding.model_config import Output
from upshift.inference.encoding.run import TokenScores
from upshift.inference.resumable_output import Unfinished, UnfinishedLines, blocks, check_output, is_empty, is_text, read_lines

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


DIGITS = 7  # behind the point: what fp32 tells apart near 1


class TokenRows:
    """Rows with lists of one length each: the tokens, where each starts and ends in the text, its likeliest label and
    that label's score. They are JSON lines until the output is whole. ``made_of`` says which input and setup they
    belong to."""

    block = 4096  # texts at once in memory, with the scores of all labels

    def __init__(self, output: Path, total: int, made_of: str, labels: tuple[str, ...]) -> None:
        self._lines = UnfinishedLines(output, total, made_of)
        self._labels = labels

    @property
    def done(self) -> int:
        return self._lines.done

    def add(self, found: list[TokenScores]) -> None:
        self._lines.add(map(self._row, found))

    def close(self) -> None:
        self._lines.close()

    def finish(self) -> None:
        """Put the whole output in place."""
        output, partial = self._lines.output, self._lines.partial
        if output.suffix != ".parquet":
            self._lines.finish()
            return
        whole = partial.with_name(f"{output.name}.writing")
        with self._lines.writing(), partial.open("rb") as lines:
            _write_token_parquet(blocks(lines, size=self.block), whole)
        self._lines.finish(whole)

    def _row(self, one: TokenScores) -> dict[str, list[Any]]:
        likeliest = one.scores.argmax(axis=1)
        return {
            "token": one.tokens,
            "start": one.offsets[:, 0].tolist(),
            "end": one.offsets[:, 1].tolist(),
            "label": [self._labels[place] for place in likeliest],
            "score": np.round(one.scores.max(axis=1).astype(np.float64), DIGITS).tolist(),
        }


def _write_token_parquet(rows: Iterator[list[bytes]], path: Path) -> None:
    """Write ``rows``, blocks of JSON lines, as Parquet."""
    import pyarrow
    from pyarrow import json as arrow_json
    from pyarrow import parquet

    text, place, score = pyarrow.list_(pyarrow.string()), pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.float32())
    schema = pyarrow.schema([("token", text), ("start", place), ("end", place), ("label", text), ("score", score)])
    parse = arrow_json.ParseOptions(explicit_schema=schema)
    with parquet.ParquetWriter(path, schema) as writer:
        for block in rows:
            data = b"".join(block)
            whole = arrow_json.ReadOptions(block_size=len(data) + 1)  # a row that crosses two blocks is an error
            writer.write_table(arrow_json.read_json(BytesIO(data), read_options=whole, parse_options=parse))
