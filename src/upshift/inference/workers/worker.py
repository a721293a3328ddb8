"""Compute the tasks of one worker with the object of its job, which it builds for the first task."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from upshift.errors import EngineEnded, UpshiftError
from upshift.importing import importing
from upshift.inference.workers.dispatcher import Answer, Job, Task


class Worker:
    """The object of a job, and the tasks that it computes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._object: Any = None

    def compute(self, task: Task) -> Answer:
        """Return the result of a task, or its error. End the process if that of an engine has ended: another worker starts."""
        try:
            if self._object is None:
                self._object = self._build()
            return Answer(getattr(self._object, task.method)(*task.arguments, **(task.keywords or {})))
        except EngineEnded as error:
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
            os._exit(1)
        except UpshiftError as error:
            return Answer(error=str(error), exit_code=error.exit_code)
        except Exception as error:  # of any library: the command reports it in its own process, in one line
            reason = " ".join(str(error).split()) or "no reason given"
            return Answer(error=f"a worker failed: {type(error).__name__}: {reason}")

    def _build(self) -> Any:
        module, _, name = self._job.factory.partition(":")
        with importing():
            factory = getattr(import_module(module), name)
        return factory(**self._job.arguments)
