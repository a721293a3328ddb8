"""Read texts from a file that may be larger than memory, and write vectors or token scores to one, a row per text.

Rows are written block by block, so that a stopped run can continue."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np

from upshift.errors import MissingExtra, RequestError
from upshift.inference.encoding.model_config import Output, Task, read_task
from upshift.inference.encoding.text_pair import Item, Pair
from upshift.inference.resumable_output import (
    UnfinishedOutput,
    check_output,
    is_empty,
    is_text,
    parse_object,
    read_lines,
)

INPUTS = (".txt", ".jsonl")
TEXT_KEYS = ("text", "prompt")  # the second is that of files for upshift generate
PAIR_KEYS = (("query", "document"), ("text", "text_pair"))  # the second is that of transformers' pipelines
VECTOR_SUFFIXES = (".npy", ".parquet")  # for outputs whose rows have one length
LIST_SUFFIXES = (".parquet", ".jsonl")  # for outputs whose rows have different lengths
LISTS: tuple[Output, ...] = ("token scores", "sparse vectors", "token vectors")  # results whose rows have different lengths
PARQUET_ROWS = 65_536  # per row group
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of a file system that cannot reserve space
ZEROS = bytes(2**20)


def check_files(texts: Path, output: Path, *, overwrite: bool = False) -> None:
    """Raise RequestError if the input cannot be read, or the output cannot be written."""
    check_texts(texts, "--input")
    _check_output(output, tuple(dict.fromkeys(VECTOR_SUFFIXES + LIST_SUFFIXES)), texts, overwrite=overwrite)


def check_vector_output(input_path: Path, output: Path, *, overwrite: bool = False) -> None:
    """Raise RequestError if an output of rows of one length cannot be written."""
    _check_output(output, VECTOR_SUFFIXES, input_path, overwrite=overwrite)


def _check_output(output: Path, suffixes: tuple[str, ...], input_path: Path, *, overwrite: bool) -> None:
    check_output(output, suffixes, input_path, overwrite=overwrite)
    if output.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise MissingExtra(library="pyarrow", extra="data", purpose="writing parquet")


def check_texts(texts: Path, option: str) -> None:
    """Raise RequestError if the file does not exist, is empty, or has another suffix."""
    if not texts.is_file():
        raise RequestError(f'{option} {texts} does not exist; give a file with a text a line, or JSON lines with a "text"')
    if texts.suffix not in INPUTS:
        raise RequestError(f'{option} {texts} must end with {" or ".join(INPUTS)}: a text a line, or JSON lines with a "text"')
    if is_empty(texts):
        raise RequestError(f"{option} {texts} is empty; write a text a line")


def check_form(output: Path, result: Output) -> None:
    """Raise RequestError if the output's suffix does not suit the model's results."""
    suffixes = VECTOR_SUFFIXES
    description = "rows of one length"
    if result in LISTS:
        suffixes = LIST_SUFFIXES
        description = "rows that differ in length"
    if output.suffix not in suffixes:
        valid = " or ".join(suffixes)
        raise RequestError(f"--output {output} is no file for {result}, which are {description}; give one that ends with {valid}")


def read_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file. A line of a .jsonl file has one of TEXT_KEYS.

    Raise RequestError with the number of a line that has no text."""
    return read_lines(path, _parse_line)


def _parse_line(line: str, name: str) -> str:
    record = parse_object(line)
    key = next((key for key in TEXT_KEYS if record is not None and key in record), "text")
    if record is not None and "messages" in record:
        raise RequestError(f'{name} is a chat, and only texts are used here; write {{"text": "..."}} on each line')
    if record is None or not is_text(record.get(key)):
        raise RequestError(f'{name} is no JSON object with a "text" of Unicode characters; write {{"text": "..."}} on each line')
    unknown = next((other for other in record if other != key), None)
    if unknown is not None:
        raise RequestError(f'{name} has a key {unknown!r}, which is not used; leave it out, and write {{"{key}": "..."}}')
    return str(record[key])


def holds_pairs(path: Path) -> bool:
    """Return whether the first line of a file is a pair of texts for a cross-encoder."""
    if path.suffix == ".txt":
        return False
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:
        record = parse_object(file.readline())
    return record is not None and any(key in record for _, key in PAIR_KEYS)


def check_query(path: Path, query: str | None) -> None:
    """Raise RequestError if there is a query, and the file has its own queries."""
    if query is not None and not is_text(query):
        raise RequestError(f"--query {query!r:.80} is no text of Unicode characters")
    if query is not None and holds_pairs(path):
        raise RequestError(f"--input {path} has pairs of texts already; leave --query out, or give a file of texts")


def check_task(task: str | None, *, has_query: bool) -> Task | None:
    """Return the task. Raise RequestError for an unknown task, or one beside a query, which makes pairs."""
    if task is not None and has_query:
        raise RequestError(f"--task {task} is for single texts, and --query makes pairs; leave one of them out")
    return read_task(task)


def read_items(path: Path, query: str | None) -> Iterator[Item]:
    """Yield the texts or the pairs of a file. With a query, yield the pair of the query and each text."""
    if query is not None:
        return (Pair(query, text) for text in read_texts(path))
    return read_pairs(path) if holds_pairs(path) else read_texts(path)


def read_pairs(path: Path) -> Iterator[Pair]:
    """Yield the pairs of a .jsonl file, whose lines have PAIR_KEYS. Raise RequestError with the number of another line."""
    return cast("Iterator[Pair]", read_lines(path, _parse_pair))


def _parse_pair(line: str, name: str) -> Pair:
    record = parse_object(line) or {}
    keys = next((keys for keys in PAIR_KEYS if set(keys) == set(record)), PAIR_KEYS[0])
    texts = [record.get(key) for key in keys]
    if not all(map(is_text, texts)) or len(record) != len(keys):
        forms = " or ".join(f'{{"{first}": "...", "{second}": "..."}}' for first, second in PAIR_KEYS)
        raise RequestError(f"{name} is no pair of texts of Unicode characters; write {forms} on each line")
    return Pair(*map(str, texts))


class Rows:
    """An output of vectors or class scores. ``identity`` identifies its input, model and setup."""

    block = 16_384  # texts in memory at once

    def __init__(self, output: Path, total: int, identity: str) -> None:
        self._file = UnfinishedOutput(output, total, identity)
        self.done = self._file.recorded()
        self._rows: Any = self._map_rows() if self.done else None

    def _map_rows(self) -> Any:
        """Return the rows of an earlier run. Raise RequestError if their file is cut short."""
        try:
            np.lib.format.open_memmap(self._file.partial, mode="r")  # "r+" would fill a file that is cut short with zeros
            return np.lib.format.open_memmap(self._file.partial, mode="r+")
        except ValueError as error:
            partial = self._file.partial
            self._file.close()
            raise RequestError(f"{partial} is damaged ({error}); remove it, and the output begins anew") from None

    def add(self, rows: np.ndarray) -> None:
        """Write the next rows [N, H]."""
        with self._file.writing():
            if self._rows is None:
                shape = (self._file.total, rows.shape[1])
                self._rows = np.lib.format.open_memmap(self._file.partial, mode="w+", dtype=np.float32, shape=shape)
                _reserve(self._file.partial, self._rows.offset)
            self._rows[self.done : self.done + len(rows)] = rows
            self._rows.flush()
            self._file.record(self.done + len(rows))
        self.done += len(rows)

    def close(self) -> None:
        self._file.close()

    def finish(self) -> None:
        """Put the whole output in place."""
        complete_file = self._file.partial
        if self._file.output.suffix == ".parquet":
            complete_file = complete_file.with_name(f"{self._file.output.name}.writing")
            with self._file.writing(), removed_on_failure(complete_file):
                _write_parquet(self._rows, complete_file)
        self._file.finish(complete_file)


@contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Remove a file that could not be written completely, which may fill the disk."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _reserve(path: Path, start: int) -> None:
    """Reserve disk space for a file that is empty from ``start`` on. Raise OSError if the disk is full.

    Without it, a write to the mapped file on a full disk would end the process with SIGBUS."""
    size = path.stat().st_size
    with path.open("rb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", errno.ENOSYS) not in UNSUPPORTED:
                raise
            file.seek(start)
            for offset in range(start, size, len(ZEROS)):
                file.write(ZEROS[: size - offset])


def _write_parquet(rows: np.ndarray, path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    width = rows.shape[1]
    schema = pyarrow.schema([("vector", pyarrow.list_(pyarrow.float32(), width))])
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, len(rows), PARQUET_ROWS):
            values = pyarrow.array(np.ascontiguousarray(rows[start : start + PARQUET_ROWS]).reshape(-1))
            writer.write_table(pyarrow.table([pyarrow.FixedSizeListArray.from_arrays(values, width)], schema=schema))
