"""Report what a library raises while an engine computes, in one line. Libraries have error types of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from upshift.errors import JobFailed, UpshiftError
from upshift.text import one_line


class ComputationFailed(JobFailed):
    """Report that an engine failed while it computed. ``reason`` is the type and the message of the library's error.

    ``kind`` is the type alone."""

    def __init__(self, error: BaseException) -> None:
        self.kind = type(error).__name__
        self.reason = f"{self.kind}: {one_line(error) or 'no reason given'}"
        super().__init__(f"the engine failed while it computed: {self.reason}; choose another one with --engine")


class PromptsFailed(ComputationFailed):
    """Report that an engine could not compute prompts. Its rows are as they were before."""


@contextmanager
def computing(failed: type[ComputationFailed] = ComputationFailed) -> Iterator[None]:
    """Raise ``failed`` in place of an error that a library raises inside."""
    try:
        yield
    except UpshiftError:
        raise
    except Exception as error:  # of any library
        raise failed(error) from error
