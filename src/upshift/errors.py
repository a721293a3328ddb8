"""Define every error a user can meet, in one tree; the exit code of the command line is the class's own.

UpshiftError            exit 1  something failed that is not the user's request
├── RequestError        exit 2  the request was wrong: names the value, the valid set and the next step (also a ValueError)
│   ├── MissingExtra    exit 2  an optional library is needed for what was asked
│   └── MissingInternal exit 2  the installed version of a library has no longer what a feature needs
├── NothingFits         exit 3  no plan fits; carries the nearest plan that would
├── JobFailed           exit 1  the job itself failed (a worker died, the loss became NaN, the disk is full)
└── Interrupted         exit 130  the user or the system asked it to stop; the message says how to continue
"""

from __future__ import annotations


class UpshiftError(Exception):
    exit_code = 1


class RequestError(UpshiftError, ValueError):
    """An error for a wrong request. The message is one line: the value, the valid set, the next step.

    It is a ValueError, because scripts that call transformers catch that for a wrong argument. Where a ``try`` holds a call
    that may raise it, ``except ValueError`` stands behind ``except RequestError: raise``.
    """

    exit_code = 2


class MissingExtra(RequestError):
    """An error for an optional library that is not installed. The message is the install command."""

    def __init__(self, *, library: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {library}: run  pip install 'upshift[{extra}]'")


class MissingInternal(RequestError):
    """An error for a name that a library's new version took away, and that the library had not promised.

    The message is one line: the feature that needs the name, the library and its version, the name, and what else to do."""

    def __init__(self, *, library: str, version: str, name: str, feature: str, instead: str = "") -> None:
        older = f"install an earlier {library}: pip install '{library}<{version}'" if version else f"pip install {library}"
        self.library = library
        self.name = name
        ways = f"{instead}, or {older}" if instead else older
        shown = version or "(not installed)"
        super().__init__(f"{feature} needs {name}, which {library} {shown} does not have; {ways}")


class NothingFits(UpshiftError):
    """An error if no plan fits the host. The message names the nearest plan that would, and what it needs."""

    exit_code = 3


class JobFailed(UpshiftError):
    """An error for a job that started and could not finish. The message says what is safe on disk."""


class Interrupted(UpshiftError):
    """An error if SIGINT or SIGTERM stopped the job after a whole step. The message says what is saved and how to continue."""

    exit_code = 130
