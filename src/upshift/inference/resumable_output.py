"""Write an output block by block, so that a stopped run can continue, and read the lines of files that may be larger
than memory.

A file beside the output records the progress."""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from upshift.atomic_file import write_whole
from upshift.errors import JobFailed, RequestError
from upshift.inference.tokenizer import tokenizer_files
from upshift.inference.weights import files_identity, weights_identity
from upshift.loading.output_lock import OutputLock, check_free, lock_file_beside
from upshift.loading.rewrite.output_folder import DISK_FULL_ERRORS
from upshift.models.source import ModelSource
from upshift.text import find_lone_surrogate
from upshift.value import Value

logger = logging.getLogger(__name__)


class Progress(Value):
    """The progress of an unfinished output: its rows so far, its total rows, and a hash of its input, model and setup."""

    rows: int
    total: int
    made_of: str  # a hash


def output_identity(input_file: Path, source: ModelSource, *by: str) -> str:
    """Return a text that identifies an output.

    It is the same for the same input file, weights and tokenizer, all unchanged, and the same further texts ``by``, such as
    the setup."""
    files = files_identity([input_file]), weights_identity(source), files_identity(tokenizer_files(source))
    return repr((*files, source.model_hash, *by))


class UnfinishedOutput:
    """An output that is being written, by one process until it is closed.

    ``identity`` identifies the output's input, model and setup. ``partial`` is the file that is written until the output is
    complete. Raise RequestError if another process writes the same output."""

    def __init__(self, output: Path, total: int, identity: str) -> None:
        self.output = output
        self.total = total
        self.partial = output.with_name(f"{output.name}.partial")
        self._identity_hash = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._progress_file = output.with_name(f"{output.name}.progress.json")
        self._recorded_rows = 0
        self._lock: OutputLock | None = OutputLock(output, lock_file_beside(output))
        try:
            with self.writing():
                self.partial.touch()
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        """Release the output, so that another process may continue it."""
        if self._lock is not None and self.partial.is_file() and not self.partial.stat().st_size:
            self.partial.unlink()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def recorded(self) -> int:
        """Return the number of rows of an earlier run. Raise RequestError if that run had another input, model or setup."""
        if not (self._progress_file.is_file() and self.partial.is_file() and self.partial.stat().st_size):
            return 0
        try:
            progress = Progress.from_file(self._progress_file)
        except RequestError as error:
            self.close()
            raise RequestError(f"{error}; remove it and {self.partial}, and the output begins anew") from None
        if (progress.made_of, progress.total) != (self._identity_hash, self.total):
            self.close()
            raise RequestError(
                f"{self.partial} is the unfinished output of another input, model or setup; "
                f"finish that run, or remove it and {self._progress_file.name}"
            )
        self._recorded_rows = progress.rows
        return progress.rows

    def record(self, rows: int) -> None:
        """Record that ``rows`` rows are on disk."""
        write_whole(self._progress_file, Progress(rows=rows, total=self.total, made_of=self._identity_hash).to_json())
        self._recorded_rows = rows

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise JobFailed if a write fails, with the number of rows that are safe."""
        try:
            yield
        except OSError as error:
            reason = "the disk is full" if error.errno in DISK_FULL_ERRORS else error.strerror or str(error)
            safe = f"its first {self._recorded_rows:,} rows are safe in {self.partial}, and the same command goes on behind them"
            if not self._recorded_rows:
                self.partial.unlink(missing_ok=True)
                safe = "nothing is kept of it; free some space, or give another folder"
            raise JobFailed(f"{self.output} could not be written: {reason}; {safe}") from error

    def finish(self, complete_file: Path | None = None) -> None:
        """Move the complete output to its place, and remove the other files.

        ``complete_file`` is the complete output. None: it is ``partial``."""
        (complete_file or self.partial).replace(self.output)
        if complete_file is not None:
            self.partial.unlink(missing_ok=True)
        self._progress_file.unlink(missing_ok=True)
        self._release()


def check_output(output: Path, suffixes: tuple[str, ...], input_file: Path, *, overwrite: bool) -> None:
    """Raise RequestError if the output file cannot be written, exists, or is ``input_file`` itself."""
    if output.suffix not in suffixes:
        raise RequestError(f"--output {output} must end with {' or '.join(suffixes)}")
    check_folder(output)
    if output.exists() and output.samefile(input_file):
        raise RequestError(f"--output {output} is the input itself, which would be lost; give another name")
    if output.exists() and not overwrite:
        raise RequestError(f"--output {output} exists; give another name, or --overwrite")
    check_free(output, lock_file_beside(output))


def check_folder(output: Path) -> None:
    """Raise RequestError if the folder of the output does not exist, or if no file can be written there."""
    if not output.parent.is_dir():
        raise RequestError(f"--output {output}: the folder {output.parent} does not exist; make it first")
    try:
        with TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise RequestError(f"--output {output}: {output.parent} takes no files ({error.strerror}); give another folder") from None


class UnfinishedLines(UnfinishedOutput):
    """An unfinished output of JSON lines. ``done`` is the number of lines so far, with those of an earlier run."""

    def __init__(self, output: Path, total: int, identity: str) -> None:
        super().__init__(output, total, identity)
        self.done = self.recorded()
        with self.writing(), self.partial.open("rb+" if self.done else "wb+") as file:
            num_bytes = 0
            for number in range(self.done):
                line = file.readline()
                if not (line.startswith(b"{") and line.endswith(b"\n")):
                    logger.warning(
                        "%s has %d of its %d recorded lines; the others are written again", self.partial, number, self.done
                    )
                    self.done = number
                    break
                num_bytes += len(line)
            file.truncate(num_bytes)  # lines after the recorded ones: a block that was being written

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        texts = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines]
        with self.writing():
            with self.partial.open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(texts)
                file.flush()
                os.fsync(file.fileno())  # before the record, so that no power cut leaves a record without its lines
            self.record(self.done + len(texts))
        self.done += len(texts)


T = TypeVar("T")


def read_lines(path: Path, parse: Callable[[str, str], T]) -> Iterator[T | str]:
    """Yield the lines of a .txt file as they are. For another file, yield ``parse(line, name)`` for each line.

    ``name`` is the file with the number of the line, for messages."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:  # the same lines that count_lines counts
        for number, line in enumerate(file, start=1):
            yield line.rstrip("\r\n") if path.suffix == ".txt" else parse(line, f"{path} line {number}")


def first_record(path: Path) -> dict[str, Any] | None:
    """Return the object on the first line of a .jsonl file, or None if there is no such file or object."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return parse_object(file.readline())


def parse_object(line: str) -> dict[str, Any] | None:
    """Return the JSON object that the line holds, or None if it holds none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_empty(path: Path) -> bool:
    """Return whether a file has no byte, or only a byte order mark."""
    with path.open("rb") as file:
        return file.read(len(codecs.BOM_UTF8) + 1) in (b"", codecs.BOM_UTF8)


def is_text(value: object) -> bool:
    """Return whether the value is a string that tokenizers take: one without half a surrogate pair."""
    return isinstance(value, str) and find_lone_surrogate(value) is None


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def read_blocks(items: Iterator[T], *, size: int, skip: int = 0) -> Iterator[list[T]]:
    """Yield the items after the first ``skip`` in lists of ``size``. The last list may be shorter."""
    remaining = islice(items, skip, None)
    while block := list(islice(remaining, size)):
        yield block
