"""What tests of commands share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from command import Answer, Command
from warm_jobs import WarmJobs
from warm_scripts import WarmScripts
from warm_servers import WarmServers

from upshift.cli.main import main
from upshift.training.job import processes

SERVED = (  # modules that start a fork server for each run
    "upshift.inference.race.race", "upshift.planning.trials.runner", "upshift.training.job.server", "upshift.tuning.mup_check",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _warm_servers() -> Iterator[None]:
    servers = WarmServers()
    jobs = WarmJobs()
    with pytest.MonkeyPatch.context() as patch:
        for module in SERVED:
            patch.setattr(f"{module}.fork_server", servers)
        patch.setattr(processes, "subprocess", jobs)
        yield
    servers.close()
    jobs.close()


@pytest.fixture(scope="session")
def warm_scripts() -> Iterator[WarmScripts]:
    scripts = WarmScripts()
    yield scripts
    scripts.close()


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the process of every job as a user's machine does: for tests about that process itself."""
    monkeypatch.setattr(processes, "subprocess", subprocess)


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
