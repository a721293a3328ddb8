"""An output that is written piece by piece: beside it stands how far it is, so that a run that was stopped goes on."""

from __future__ import annotations

import hashlib
from pathlib import Path

from upshift.errors import RequestError
from upshift.value import Value
from upshift.whole_file import write_whole


class Progress(Value):
    """How many rows are in an unfinished output, and of which input, model and setup."""

    rows: int
    total: int
    made_of: str


def made_of(given: Path, *by: str) -> str:
    """Says what an output is made of: the same input, as it is now, by the same model and setup gives the same output."""
    stat = given.stat()
    return repr((given.name, stat.st_size, stat.st_mtime_ns, *by))


class Unfinished:
    """``made_of``: says which input and setup the output belongs to. ``partial``: where it is written until it is whole."""

    def __init__(self, output: Path, total: int, made_of: str) -> None:
        self.output, self.total = output, total
        self.partial = output.with_name(f"{output.name}.partial")
        self._made_of = hashlib.sha256(made_of.encode()).hexdigest()[:16]
        self._said = output.with_name(f"{output.name}.progress.json")

    def noted(self) -> int:
        """Rows of an earlier run. Raises RequestError where they are of something else."""
        if not (self.partial.is_file() and self._said.is_file()):
            return 0
        progress = Progress.from_file(self._said)
        if (progress.made_of, progress.total) != (self._made_of, self.total):
            raise RequestError(
                f"{self.partial} is the unfinished output of another input, model or setup; "
                f"finish that run, or remove it and {self._said.name}"
            )
        return progress.rows

    def note(self, rows: int) -> None:
        write_whole(self._said, Progress(rows=rows, total=self.total, made_of=self._made_of).to_json())

    def finish(self, whole: Path | None = None) -> None:
        """Put the whole output in place, and remove what stood beside it. ``whole``: where it is, if not in ``partial``."""
        (whole or self.partial).replace(self.output)
        self.partial.unlink(missing_ok=True)
        self._said.unlink(missing_ok=True)


def check_output(output: Path, suffixes: tuple[str, ...], *, overwrite: bool) -> None:
    if output.suffix not in suffixes:
        raise RequestError(f"--output {output} must end with {' or '.join(suffixes)}")
    if not output.parent.is_dir():
        raise RequestError(f"--output {output}: the folder {output.parent} does not exist; make it first")
    if output.exists() and not overwrite:
        raise RequestError(f"--output {output} exists; give another name, or --overwrite")
