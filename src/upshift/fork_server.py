"""Run a process that imports a worker and its heavy libraries once, and forks a child for every request.

A child starts in milliseconds, and its death ends nothing else. The worker is a module with ``main(request, answer)``:
``request`` is the path of the request, and ``answer`` is a function that sends a value back. The caller gives the worker's name
and does not import it, so that the caller may be in a lower layer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from upshift import parent_process
from upshift.errors import JobFailed
from upshift.value import Value

PROCESS = "upshift.fork_server_process"
END_SECONDS = 5.0
ENDLESS_SECONDS = 1e9  # stands for no limit
Answer = TypeVar("Answer", bound=Value)


class ChildExit(Value):
    """Describe how a child ended: by itself, by a signal, or because it exceeded its time limit."""

    timed_out: bool
    signal: int | None
    exit: int | None
    last_words: str  # the last line that it wrote to its stderr


class ForkServer:
    """Send requests to the server process, one at a time, and read the worker's answers."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._log = folder / "log"
        self._log_position = 0  # the part before it was reported
        self._child: int | None = None
        self._interrupted = False

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Value, answer_type: type[Answer], *, limit_seconds: float) -> Iterator[Answer | ChildExit]:
        """Yield the worker's answers as they come, then how the child ended. Raise JobFailed if the server itself ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        path = self._folder / "request.json"
        path.write_text(request.to_json(), encoding="utf-8")
        with suppress(BrokenPipeError):  # the server ended, and so does its output
            self._process.stdin.write(json.dumps({"request": str(path), "limit": limit_seconds}) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            message = json.loads(line)
            if "child" in message:
                self._child = message["child"]
                if self._interrupted:
                    self.interrupt()
            elif "answer" in message:
                yield answer_type.from_json(message["answer"], origin="the worker's answer")
            else:
                self._child = None
                yield ChildExit(**message, last_words=self._last_words())
                return
        raise JobFailed(f"the process that runs workers ended: {self._last_words() or 'it said nothing'}")

    def interrupt(self) -> None:
        """Send SIGINT to the child, or to the next child if none runs yet. A worker that does not handle SIGINT ends."""
        self._interrupted = True
        if self._child is not None:
            with suppress(ProcessLookupError):  # its ending is not read yet
                os.kill(self._child, signal.SIGINT)

    def _last_words(self) -> str:
        with self._log.open(errors="replace") as log:
            log.seek(self._log_position)
            lines = log.read().strip().splitlines()
            self._log_position = log.tell()
        return lines[-1][-400:] if lines else ""


@contextmanager
def fork_server(worker: str, *, own_session: bool = False) -> Iterator[ForkServer]:
    """Start a server without waiting until it is ready.

    The server and its child end with the context, or with this process. Ctrl-C in a terminal ends them, too. With
    ``own_session`` Ctrl-C does not reach them, and the caller decides what to do."""
    with tempfile.TemporaryDirectory(prefix="upshift-fork-") as folder_name:
        folder = Path(folder_name)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                parent_process.command(PROCESS, worker),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=own_session,
            )
            try:
                yield ForkServer(process, folder)
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(timeout=END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                assert process.stdin is not None and process.stdout is not None
                process.stdout.close()
                with suppress(BrokenPipeError):  # it ended before it read the last request
                    process.stdin.close()
