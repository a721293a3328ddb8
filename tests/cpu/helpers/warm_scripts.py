"""Commands of Python in forks of one process that has imported everything: importing it takes five seconds of a core.

Shared are the modules that the server has imported, torch's state after the imports among them. The fork's own are its session,
its streams, its arguments, its folder, its environment and its exit code. So a variable that a library reads when it is imported
must have one value for all commands of a server. Tests of what a process imports, of its start, its memory or its death need a
new process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from warm_jobs import Job, Server
from warm_servers import surroundings


class WarmScripts:
    """Stands for ``subprocess.run`` of Python. ``worker``: the module that the server imports, and which runs a command.

    ``variables``: what the server's environment has besides this process's."""

    def __init__(self, worker: str = "warm_script", variables: Mapping[str, str] | None = None) -> None:
        self._worker = worker
        self._variables = dict(variables or {})
        self._server: Server | None = None
        self._surroundings: tuple[object, ...] = ()

    def run(
        self, *arguments: str | Path, timeout: float | None = None, cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Return the exit code of ``python ARGUMENTS`` and what it printed. Kill it and fail after ``timeout`` seconds."""
        command = [*map(str, arguments)]
        with tempfile.TemporaryDirectory(prefix="upshift-script-") as name:
            folder = Path(name)
            given = {"arguments": command, "cwd": cwd and str(cwd), "environment": environment and dict(environment)}
            (folder / "command.json").write_text(json.dumps(given))
            job = Job(self._idle_server(), name, ())
            with job.stdout:
                ends = bool(select.select([job.connection], [], [], timeout)[0])
                if not ends:
                    os.killpg(job.pid, signal.SIGKILL)
                code = job.wait()
            stdout, stderr = ((folder / stream).read_text(errors="replace") for stream in ("stdout", "stderr"))
        assert ends, f"{command} took longer than {timeout} s\n{stderr[-5000:]}"
        return subprocess.CompletedProcess(command, code, stdout, stderr)

    def _idle_server(self) -> Server:
        now = surroundings()
        if self._server is None or not self._server.is_idle or self._surroundings != now:
            self.close()
            folders = [str(Path(__file__).parent), self._variables.get("PYTHONPATH") or os.environ.get("PYTHONPATH")]
            path = os.pathsep.join(filter(None, folders))
            self._server = Server(self._worker, **{**self._variables, "PYTHONPATH": path})
            self._surroundings = now
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
