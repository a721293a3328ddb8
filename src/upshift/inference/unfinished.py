"""Write an output piece by piece. A file beside it records the progress, so that a stopped run can continue."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from upshift.errors import JobFailed, RequestError
from upshift.inference.tokenizer import tokenizer_files
from upshift.inference.weights import files_identity, weights_identity
from upshift.loading.output_folder import FULL
from upshift.loading.output_lock import OutputLock, check_free, lock_file_beside
from upshift.models.source import ModelSource
from upshift.value import Value
from upshift.whole_file import write_whole


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
            reason = "the disk is full" if error.errno in FULL else error.strerror or str(error)
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
