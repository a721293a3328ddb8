"""What tests of commands share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from command import Answer, Command
from warm_processes import WarmProcesses

from upshift import fork_server
from upshift.cli.main import main
from upshift.training.job import processes

STARTERS = (fork_server, processes)  # modules that start processes of upshift's own


@pytest.fixture(scope="session")
def warm_processes() -> Iterator[WarmProcesses]:
    warm = WarmProcesses()
    yield warm
    warm.close()


@pytest.fixture(scope="session", autouse=True)
def _forked_processes(warm_processes: WarmProcesses) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in STARTERS:
            patch.setattr(module, "subprocess", warm_processes)
        yield


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start upshift's own processes as a user's machine does: for tests about such a process itself."""
    for module in STARTERS:
        monkeypatch.setattr(module, "subprocess", subprocess)


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
