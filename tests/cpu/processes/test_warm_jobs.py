"""A job of a warm server ends as the process does that upshift starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_jobs import Job, Server

WORKER = """
def run_folder(folder):
    exec((folder / "code.py").read_text(), {})
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    (tmp_path / "made_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    server = Server("made_worker")
    yield server
    server.close()


def start(server: Server, folder: Path, code: str) -> Job:
    (folder / "code.py").write_text(code)
    return Job(server, str(folder), ())


def test_a_fork_ends_as_a_process_ends(server: Server, tmp_path: Path) -> None:
    endings = (
        "pass", "raise SystemExit", "raise SystemExit(0)", "raise SystemExit(75)", "raise SystemExit('no')", "raise ValueError",
        "raise KeyboardInterrupt", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    )  # fmt: skip
    codes = [start(server, tmp_path, code).wait() for code in endings]
    assert codes == [subprocess.run([sys.executable, "-c", code], capture_output=True).returncode for code in endings]
    assert codes == [0, 0, 0, 75, 1, 1, -signal.SIGINT, -signal.SIGTERM]


def test_the_end_of_a_server_ends_its_job(server: Server, tmp_path: Path) -> None:
    job = start(server, tmp_path, "import time; time.sleep(60)")
    server._process.kill()
    assert job.wait() == -signal.SIGKILL
