"""What tests of commands share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import warm_python
from command import Answer, Command

from upshift.cli.main import main


@pytest.fixture(scope="session", autouse=True)
def _warm_python() -> Iterator[None]:
    """Let Python processes be forks of processes that have imported everything: to import it takes five seconds of a core."""
    warm = warm_python.WarmPython()
    with warm_python.in_force(warm):
        yield
    warm.close()


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start Python processes as a user's machine does: for tests about memory, imports, and the processes themselves."""
    monkeypatch.setattr(subprocess, "Popen", warm_python.Real)


@pytest.fixture
def upshift(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """One command, in this process: importing everything again would take longer than most of them."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["upshift", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        return Answer(int(ended.value.code or 0), captured.out, captured.err)

    return run
