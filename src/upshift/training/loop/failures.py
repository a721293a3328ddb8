"""Failures of a run in words that a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upshift.errors import JobFailed
from upshift.training.checkpoint.files import still_loadable
from upshift.training.out_of_memory import is_out_of_memory


@contextmanager
def out_of_memory_in_words(output: Path) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise JobFailed(
            f"out of memory ({' '.join(str(error).split())[:160]}); {still_loadable(output)}; "
            "let `upshift plan` choose again for the memory that is free"
        ) from error
