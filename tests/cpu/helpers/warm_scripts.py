"""Scripts that start ranks, in forks of one process that has imported everything: importing it takes five seconds of a core."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from pathlib import Path

from warm_jobs import Job, Server
from warm_servers import surroundings

WORKER = "warm_script"


class WarmScripts:
    """Stands for ``subprocess.run`` of a Python script."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._surroundings: tuple[object, ...] = ()

    def run(self, script: str | Path, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Return the script's exit code and what it printed. Kill it and fail after ``timeout`` seconds."""
        command = [str(script), *arguments]
        with tempfile.TemporaryDirectory(prefix="upshift-script-") as name:
            folder = Path(name)
            (folder / "command.json").write_text(json.dumps(command))
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
            folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._server = Server(WORKER, PYTHONPATH=os.pathsep.join(folders))
            self._surroundings = now
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
