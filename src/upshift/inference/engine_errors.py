"""Report what a library raises while an engine computes, in one line. Libraries have error types of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from upshift.errors import JobFailed, UpshiftError
from upshift.text import one_line

FAILED = "the engine failed while it computed: "
NEXT_STEP = "; choose another one with --engine"


class ComputationFailed(JobFailed):
    """Report that an engine failed while it computed. ``reason`` is the type and the message of the library's error.

    ``kind`` is the type alone."""

    def __init__(self, error: BaseException) -> None:
        self.kind = type(error).__name__
        self.reason = f"{self.kind}: {one_line(error) or 'no reason given'}"
        super().__init__(f"{FAILED}{self.reason}{NEXT_STEP}")


class PromptsFailed(ComputationFailed):
    """Report that an engine could not compute prompts. Its rows are as they were before."""


def describe_error(error: Exception) -> str:
    """Return an error in one line: the message of one of ours, or the type and the message of another one."""
    text = one_line(error)
    return text if isinstance(error, UpshiftError) else f"{type(error).__name__}: {text or 'no reason given'}"


def reason_of(error: Exception) -> str:
    """Return why an engine failed, without the words for whoever started it. The error may come from another process."""
    return describe_error(error).removeprefix(FAILED).removesuffix(NEXT_STEP)


@contextmanager
def computing(failed: type[ComputationFailed] = ComputationFailed) -> Iterator[None]:
    """Raise ``failed`` in place of an error that a library raises inside."""
    try:
        yield
    except UpshiftError:
        raise
    except Exception as error:  # of any library
        raise failed(error) from error
