"""Run a process that imports a worker and its heavy libraries once, and forks a child for every request.

A child starts in milliseconds and dies alone. The worker is a module with ``main(request, answer)``: the path of the request,
and a function that sends a value back. The worker is named, not imported, so that its caller may be in a lower layer.
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
V = TypeVar("V", bound=Value)


class Ending(Value):
    """The ending of a child, by itself or not."""

    timed_out: bool
    signal: int | None
    exit: int | None
    last_words: str  # the last line that it wrote to its stderr


class ForkServer:
    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._log = folder / "log"
        self._read = 0
        self._child: int | None = None
        self._interrupted = False

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Value, kind: type[V], *, limit_seconds: float) -> Iterator[V | Ending]:
        """Yield the worker's answers as they come, and at last how it ended. Raise JobFailed if the server itself ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        path = self._folder / "request.json"
        path.write_text(request.to_json(), encoding="utf-8")
        with suppress(BrokenPipeError):  # the server ended, and so does its output
            self._process.stdin.write(json.dumps({"request": str(path), "limit": limit_seconds}) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            said = json.loads(line)
            if "child" in said:
                self._child = said["child"]
                if self._interrupted:
                    self.interrupt()
            elif "answer" in said:
                yield kind.from_json(said["answer"], origin="the worker's answer")
            else:
                self._child = None
                yield Ending(**said, last_words=self._last_words())
                return
        raise JobFailed(f"the process that runs workers ended: {self._last_words() or 'it said nothing'}")

    def interrupt(self) -> None:
        """Send SIGINT to the child, also to one that is still to come. A worker that does not handle it ends."""
        self._interrupted = True
        if self._child is not None:
            with suppress(ProcessLookupError):  # its ending is not read yet
                os.kill(self._child, signal.SIGINT)

    def _last_words(self) -> str:
        with self._log.open(errors="replace") as log:
            log.seek(self._read)
            lines = log.read().strip().splitlines()
            self._read = log.tell()
        return lines[-1][-400:] if lines else ""


@contextmanager
def fork_server(worker: str, *, own_session: bool = False) -> Iterator[ForkServer]:
    """Start a server at once, without waiting until it is ready.

    It ends with the context, or with this process, and so does its child. Ctrl-C of a terminal ends it, too. A server in a
    session of its own is not ended so: its caller decides there what Ctrl-C means."""
    with tempfile.TemporaryDirectory(prefix="upshift-fork-") as name:
        folder = Path(name)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                parent_process.command(PROCESS, worker),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=own_session,
            )  # fmt: skip
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
                with suppress(BrokenPipeError):  # of a request that it did not live to read
                    process.stdin.close()
