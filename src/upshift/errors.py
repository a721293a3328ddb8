"""Define every error that a user can meet, in one tree. Each class has the exit code of the command line.

UpshiftError            exit 1  something failed that is not the user's request
├── RequestError        exit 2  the request was wrong: names the value, the valid set and the next step (also a ValueError)
│   ├── MissingExtra    exit 2  the request needs a library that is not installed
│   └── MissingInternal exit 2  the installed version of a library no longer has a name that a feature needs
├── NothingFits         exit 3  no plan fits; carries the nearest plan that would
├── JobFailed           exit 1  the job itself failed (a worker died, the loss became NaN, the disk is full)
└── Interrupted         exit 130  the user or the system asked it to stop; the message says how to continue
"""

from __future__ import annotations

from upshift.versions import install_command


class UpshiftError(Exception):
    exit_code = 1


class RequestError(UpshiftError, ValueError):
    """Report a wrong request. The message is one line: the value, the valid set, the next step.

    It is a ValueError, because scripts that call transformers catch ValueError for a wrong argument. Code that catches
    ValueError around a call that may raise this error must first have ``except RequestError: raise``.
    """

    exit_code = 2


class MissingExtra(RequestError):
    """Report a library that is not installed. The message is the install command.

    ``extra``: the extra of Upshift that brings the library, or "" for a library that Upshift always needs."""

    def __init__(self, *, library: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {library}: run  {install_command(*filter(None, [extra]))}")


class MissingInternal(RequestError):
    """Report a private name of a library that the installed version does not have.

    The message is one line: the feature that needs the name, the library and its version, and what to do instead."""

    def __init__(self, *, library: str, version: str, name: str, feature: str, instead: str = "") -> None:
        install = f"install an earlier {library}: pip install '{library}<{version}'" if version else f"pip install {library}"
        self.library = library
        self.name = name
        next_step = f"{instead}, or {install}" if instead else install
        shown = version or "(not installed)"
        super().__init__(f"{feature} needs {name}, which {library} {shown} does not have; {next_step}")


class NothingFits(UpshiftError):
    """Report that no plan fits the host. The message names the nearest plan that would fit, and what it needs."""

    exit_code = 3


class JobFailed(UpshiftError):
    """Report a job that started and could not finish. The message says what is safe on disk."""


class EngineEnded(JobFailed):
    """Report that the process of an engine has ended although nobody told it to."""


class EngineFailed(EngineEnded):
    """Report that an engine ended at an error in what it computed. Another engine would meet the error, too."""


class Interrupted(UpshiftError):
    """Report that SIGINT or SIGTERM stopped the job after a whole step. The message says what is saved and how to continue."""

    exit_code = 130
