"""What tests of commands share."""

from __future__ import annotations

import sys

import pytest
from command import Answer, Command

from upshift.cli.main import main


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
