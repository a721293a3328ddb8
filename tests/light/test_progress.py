"""A plain line every ten seconds where standard error is no terminal, by every command, and never on standard output."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from upshift.cli import main as command_line
from upshift.cli import progress, tables

ROOT = Path(__file__).parents[2]


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def test_the_innermost_activity_is_told(clock: Clock) -> None:
    told: list[str] = []
    writer = progress.LineWriter("upshift train", told.append)
    inner = progress.Activity("Tokenizing")
    clock.now += 10
    writer.write_line()
    writer.begin(inner)
    inner.update(25, 100)
    clock.now += 20
    writer.write_line()
    inner.update(title="Step", text="Step 3/9, loss 2.5 · 100 tokens/s · 1 min 00 s left")
    clock.now += 10
    writer.write_line()
    writer.end(inner)
    writer.write_line()
    assert told == [
        "upshift train: 10.0 s so far",
        "Tokenizing: 30.0 s so far, 25 of 100 (25%), about 1 min 30 s left",
        "Step: 10.0 s so far, Step 3/9, loss 2.5 · 100 tokens/s · 1 min 00 s left",
        "upshift train, after Step: 40.0 s so far",
    ]


@pytest.mark.parametrize("text", ["a\r\nb", "\x1b[31mred\x1b[0m", "tab\there", "[/x.cc:1] closed \x07", "runs[a]", "[red]x"])
def test_lines_are_plain(text: str) -> None:
    words = "".join(character if character.isprintable() else " " for character in text).split()
    for activity in (progress.Activity(text), progress.Activity("Step")):
        activity.update(title=text, text=text)
        assert activity.line().isprintable() and " ".join(words) in activity.line()


def test_nothing_on_a_terminal_nor_of_ranks_that_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.01)
    for console, speaks in ((Console(file=io.StringIO(), force_terminal=True), True), (Console(file=io.StringIO()), False)):
        with progress.progress_lines("upshift train", console, is_enabled=speaks), progress.activity("x"):
            time.sleep(0.1)
        assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_lines_end_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.02)
    console = Console(file=io.StringIO())
    with progress.progress_lines("upshift train", console):
        with tables.bar("Encoding") as update:
            update(1, 4)
            time.sleep(0.2)
        progress.stop()  # as a server does once it waits for requests
        before = console.file.getvalue()  # type: ignore[attr-defined]
        assert "Encoding: " in before and "1 of 4 (25%)" in before
        time.sleep(0.1)
    time.sleep(0.1)
    assert console.file.getvalue() == before  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == "upshift-progress"]


def commands() -> list[str]:
    """Every one that the command line has, groups by their members."""
    found = []
    for info in command_line.app.registered_commands:
        found.append(str(info.name))
    for group in command_line.app.registered_groups:
        found += [f"{group.name} {one.name or one.callback.__name__}" for one in group.typer_instance.registered_commands]
    return found


@pytest.mark.parametrize("name", commands())
def test_every_command_speaks_while_it_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is slow in it, its imports too: here all of it is."""
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.05)

    def slow(**_: Any) -> None:
        time.sleep(0.3)
        sys.stdout.write(json.dumps({"done": True}) + "\n")

    monkeypatch.setattr(command_line, "app", slow)
    monkeypatch.setattr(sys, "argv", ["upshift", *name.split(), "--json"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 0 and json.loads(out) == {"done": True}
    lines = err.splitlines()
    assert 2 <= len(lines) <= 8 and {line.partition(":")[0] for line in lines} == {f"upshift {name.split()[0]}"}
    assert all(line.isprintable() for line in lines)


def test_real_seconds() -> None:
    """A line after every ten seconds; here after every three, as the others wait for this test."""
    assert progress.EVERY_SECONDS == 10.0
    code = (
        "import time; from upshift.cli import main, progress; progress.EVERY_SECONDS = 3.0; "
        "main.app = lambda **_: time.sleep(7.5); main.main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, "plan"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    assert done.stdout == "" and len(done.stderr.splitlines()) == 2, done.stderr
    assert done.stderr.startswith("upshift plan: 3")
