"""Write an output piece by piece. A file beside it records the progress, so that a stopped run can continue.

Write an output's JSON lines to disk block by block, so that a stopped run can continue.

Read and write lines of a file that may be larger than memory, block by block, so that a stopped run can continue.
"""

from __future__ import annotations

import codecs
import hashlib
import json
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


class Progress(Value):
    """The number of rows in an unfinished output, and its input, model and setup."""

    rows: int
    total: int
    made_of: str


def made_of(given: Path, source: ModelSource, *by: str) -> str:
    """Return a text that identifies an output's origin. The same input, weights and tokenizer, as they are now, by
    the same setup give the same text."""
    files = files_identity([given]), weights_identity(source), files_identity(tokenizer_files(source))
    return repr((*files, source.model_hash, *by))


class Unfinished:
    """An output that is being written.

    ``made_of`` says which input and setup the output belongs to. ``partial`` is where it is written until it is
    whole, by one process until it is closed. Raise RequestError if another process writes it."""

    def __init__(self, output: Path, total: int, made_of: str) -> None:
        self.output, self.total = output, total
        self.partial = output.with_name(f"{output.name}.partial")
        self._made_of = hashlib.sha256(made_of.encode()).hexdigest()[:16]
        self._said = output.with_name(f"{output.name}.progress.json")
        self._safe = 0
        self._lock: OutputLock | None = OutputLock(output, lock_file_beside(output))
        try:
            with self.writing():
                self.partial.touch()
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        """Release the output, so that another process may go on with it."""
        if self._lock is not None and self.partial.is_file() and not self.partial.stat().st_size:
            self.partial.unlink()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def noted(self) -> int:
        """Return the number of rows of an earlier run. Raise RequestError if they are of something else."""
        if not (self._said.is_file() and self.partial.is_file() and self.partial.stat().st_size):
            return 0
        progress = Progress.from_file(self._said)
        if (progress.made_of, progress.total) != (self._made_of, self.total):
            self.close()
            raise RequestError(
                f"{self.partial} is the unfinished output of another input, model or setup; "
                f"finish that run, or remove it and {self._said.name}"
            )
        self._safe = progress.rows
        return progress.rows

    def note(self, rows: int) -> None:
        write_whole(self._said, Progress(rows=rows, total=self.total, made_of=self._made_of).to_json())
        self._safe = rows

    @contextmanager
    def writing(self) -> Iterator[None]:
        """End the run with a line on what is safe if a write fails."""
        try:
            yield
        except OSError as error:
            reason = "the disk is full" if error.errno in DISK_FULL_ERRORS else error.strerror or str(error)
            safe = f"its first {self._safe:,} rows are safe in {self.partial}, and the same command goes on behind them"
            if not self._safe:
                self.partial.unlink(missing_ok=True)
                safe = "nothing is kept of it; free some space, or give another folder"
            raise JobFailed(f"{self.output} could not be written: {reason}; {safe}") from error

    def finish(self, whole: Path | None = None) -> None:
        """Put the whole output in place, and remove what stood beside it. ``whole``: where it is, if not in ``partial``."""
        (whole or self.partial).replace(self.output)
        if whole is not None:
            self.partial.unlink(missing_ok=True)
        self._said.unlink(missing_ok=True)
        self._release()


def check_output(output: Path, suffixes: tuple[str, ...], given: Path, *, overwrite: bool) -> None:
    """Raise RequestError if the output cannot be written. ``given`` is the file that it is made of."""
    if output.suffix not in suffixes:
        raise RequestError(f"--output {output} must end with {' or '.join(suffixes)}")
    check_folder(output)
    if output.exists() and output.samefile(given):
        raise RequestError(f"--output {output} is the input itself, which would be lost; give another name")
    if output.exists() and not overwrite:
        raise RequestError(f"--output {output} exists; give another name, or --overwrite")
    check_free(output, lock_file_beside(output))


def check_folder(output: Path) -> None:
    """Raise RequestError if the folder of the output does not exist, or takes no files."""
    if not output.parent.is_dir():
        raise RequestError(f"--output {output}: the folder {output.parent} does not exist; make it first")
    try:
        with TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise RequestError(f"--output {output}: {output.parent} takes no files ({error.strerror}); give another folder") from None


class UnfinishedLines(Unfinished):
    """An unfinished output of JSON lines. ``done`` is the number of lines, those of an earlier run included."""

    def __init__(self, output: Path, total: int, made_of: str) -> None:
        super().__init__(output, total, made_of)
        self.done = self.noted()
        with self.writing(), self.partial.open("rb+" if self.done else "wb+") as file:
            for _ in range(self.done):
                file.readline()
            file.truncate()  # lines of a block that was not noted

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        found = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines]
        with self.writing():
            with self.partial.open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(found)
            self.note(self.done + len(found))
        self.done += len(found)


T = TypeVar("T")


def read_lines(path: Path, read: Callable[[str, str], T]) -> Iterator[T | str]:
    """Yield a .txt's lines as they are. For another file, yield what ``read`` makes of a line and of the words that
    name its place."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:  # the lines that count_lines counts
        for number, line in enumerate(file, start=1):
            yield line.rstrip("\r\n") if path.suffix == ".txt" else read(line, f"{path} line {number}")


def is_empty(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(codecs.BOM_UTF8) + 1) in (b"", codecs.BOM_UTF8)


def is_text(value: object) -> bool:
    """Return whether the value is a text that tokenizers take."""
    return isinstance(value, str) and find_lone_surrogate(value) is None


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def blocks(items: Iterator[T], *, size: int, skip: int = 0) -> Iterator[list[T]]:
    rest = islice(items, skip, None)
    while block := list(islice(rest, size)):
        yield block
